"""Which sequences a step computes, and how many tokens of each."""

from collections import deque
from dataclasses import dataclass, field

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, Status
from nanovllm.outputs import FinishReason


@dataclass(slots=True)
class Step:
    """The work of one step. Its tokens are computed in this order: prefills, then decodes."""

    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    """Sequences that compute a chunk of their tokens, and its length."""
    decodes: list[Sequence] = field(default_factory=list)
    """Sequences that compute the token they generated last."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the step computes."""
        return len(self.decodes) + sum(n for _, n in self.prefills)

    @property
    def sequences(self) -> list[Sequence]:
        """All sequences that the step computes tokens of."""
        return [*(seq for seq, _ in self.prefills), *self.decodes]

    @property
    def sampled(self) -> list[Sequence]:
        """Sequences whose last token the step computes, so that a new one follows it."""
        return [seq for seq, _ in self._sampled_with_rows()]

    @property
    def sampled_rows(self) -> list[int]:
        """Rows of those last tokens among the step's, in the order of `sampled`."""
        return [row for _, row in self._sampled_with_rows()]

    def _sampled_with_rows(self) -> list[tuple[Sequence, int]]:
        sampled, end = [], 0
        for seq, num_tokens in self.prefills:
            end += num_tokens
            if num_tokens == seq.num_uncomputed_tokens:
                sampled.append((seq, end - 1))
        return sampled + [(seq, end + i) for i, seq in enumerate(self.decodes)]


class Scheduler:
    """Continuous batching: decodes first, then chunks of prompts, within a budget of tokens.

    A sequence is admitted when blocks for all it has so far are free, so that no two half-admitted
    sequences can wait for each other. When a running one needs a block and none is free, the newest
    running sequence goes back to the front of the queue and later computes its tokens again; the
    oldest is never sent back while another runs, so there is always progress.

    Args:
        block_manager: gives out KV blocks.
        max_num_seqs: most sequences that run at once.
        max_num_batched_tokens: the budget of a step.
        max_whole_prefill_tokens: a prefill of up to so many tokens is one step, whatever the
            budget: the runner computes it layer-major.
        takes_turns: whether a prefill is computed in chunks all the same while others decode.
        chunk_multiple: a chunk that is not a sequence's last ends at a multiple of so many tokens;
            no more than the budget.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_whole_prefill_tokens: int = 0,
        chunk_multiple: int = 1,
        takes_turns: bool = True,
    ) -> None:
        self.block_manager = block_manager
        self.num_preemptions = 0
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_whole_prefill_tokens = max_whole_prefill_tokens
        self._chunk_multiple = chunk_multiple
        self._takes_turns = takes_turns
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []

    @property
    def sequences(self) -> list[Sequence]:
        """All unfinished sequences: running ones, oldest first, then waiting ones."""
        return [*self._running, *self._waiting]

    def add(self, seq: Sequence) -> None:
        """Queue a new sequence."""
        self._waiting.append(seq)

    def schedule(self) -> Step:
        """Choose the next step's work and give it its blocks. Empty if nothing waits or runs."""
        step = Step()
        step.decodes = self._grow_decodes()
        # No more run than the budget has tokens: one is admitted only when each has had its share.
        budget = self._max_num_batched_tokens - len(step.decodes)
        for seq in self._running:
            if not seq.is_decoding:
                budget -= self._schedule_chunk(step, seq, budget)
        while (
            budget >= self._chunk_multiple
            and self._waiting
            and len(self._running) < self._max_num_seqs
        ):
            seq = self._waiting[0]
            if not self.block_manager.allocate(seq):
                break
            self._waiting.popleft()
            self._running.append(seq)
            if seq.num_cached_tokens is None:
                seq.num_cached_tokens = seq.num_computed_tokens
            seq.status = Status.RUNNING
            budget -= self._schedule_chunk(step, seq, budget)
        return step

    def commit(self, step: Step) -> None:
        """Note that the step's tokens are computed; to be called before new tokens are added."""
        for seq, num_tokens in step.prefills:
            self.block_manager.commit(seq, num_tokens)
        for seq in step.decodes:
            self.block_manager.commit(seq, 1)

    def finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End an unfinished sequence, wherever it stands, and free its blocks."""
        if seq.status is Status.RUNNING:
            self._running.remove(seq)
        else:
            self._waiting.remove(seq)
        self.block_manager.free(seq)
        seq.status, seq.finish_reason = Status.FINISHED, reason

    def check_integrity(self) -> None:
        """Check that the blocks' books agree with the sequences.

        Raises:
            RuntimeError: they do not.
        """
        self.block_manager.check_integrity(self.sequences)

    def _grow_decodes(self) -> list[Sequence]:
        decodes: list[Sequence] = []
        for seq in list(self._running):
            if seq.status is not Status.RUNNING or not seq.is_decoding:
                continue
            while not self.block_manager.grow(seq):
                victim = self._running[-1]
                self._preempt(victim)
                if victim is seq:
                    break
            else:
                decodes.append(seq)
        return decodes

    def _preempt(self, seq: Sequence) -> None:
        self.num_preemptions += 1
        self._running.remove(seq)
        self.block_manager.free(seq)
        seq.status = Status.WAITING
        self._waiting.appendleft(seq)

    def _schedule_chunk(self, step: Step, seq: Sequence, budget: int) -> int:
        num_tokens = seq.num_uncomputed_tokens
        # Where others decode, a long prefill takes its turn with them.
        takes_turns = step.decodes and self._takes_turns
        longest = 0 if takes_turns else self._max_whole_prefill_tokens
        if num_tokens > max(budget, longest):
            stop = seq.num_computed_tokens + budget
            num_tokens = stop - stop % self._chunk_multiple - seq.num_computed_tokens
        if num_tokens <= 0:
            return 0
        step.prefills.append((seq, num_tokens))
        return num_tokens
