"""The block manager against a symbolic memory that knows what each slot of each block holds."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from nanovllm import SamplingParams
from nanovllm.engine import block_manager
from nanovllm.engine.block_manager import BlockManager, hash_block
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence

BLOCK_SIZE = 2
TOKENS = st.integers(0, 1)  # so few that prefixes collide all the time
PROMPTS = st.lists(TOKENS, min_size=1, max_size=9)


def make_sequence(token_ids: list[int], seq_id: int = 0) -> Sequence:
    return Sequence(seq_id, list(token_ids), SamplingParams(), None, Random(0), 0.0)


class Memory:
    """The KV cache, with the token of each slot and those before it in place of numbers.

    What attention writes for a token depends on all tokens before it, so this is what a slot must
    hold to be right for a sequence.
    """

    def __init__(self) -> None:
        self._slots: dict[tuple[int, int], list[int]] = {}

    def compute(self, seq: Sequence, num_tokens: int) -> None:
        """Write what a step writes that computes the sequence's next tokens."""
        self.check(seq)
        for position in range(seq.num_computed_tokens, seq.num_computed_tokens + num_tokens):
            self._slots[self._slot(seq, position)] = seq.token_ids[: position + 1]

    def check(self, seq: Sequence) -> None:
        """Assert that the blocks of the sequence hold its computed tokens and no others."""
        for position in range(seq.num_computed_tokens):
            held = self._slots.get(self._slot(seq, position))
            expected = seq.token_ids[: position + 1]
            assert held == expected, f"position {position} of {expected} holds {held}"

    @staticmethod
    def _slot(seq: Sequence, position: int) -> tuple[int, int]:
        return seq.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE


class Machine(RuleBasedStateMachine):
    """Does in any order what a scheduler may do."""

    manager_class: ClassVar[type[BlockManager]] = BlockManager
    num_hits: ClassVar[int] = 0
    num_refusals: ClassVar[int] = 0

    @initialize(num_blocks=st.integers(1, 9))
    def start(self, num_blocks: int) -> None:
        self.manager = self.manager_class(num_blocks, BLOCK_SIZE, enable_prefix_caching=True)
        self.memory = Memory()
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.ended: list[Sequence] = []

    @rule(token_ids=PROMPTS)
    def add(self, token_ids: list[int]) -> None:
        self.waiting.append(make_sequence(token_ids))

    @precondition(lambda self: self.running or self.ended)
    @rule(which=st.integers(0, 50), token_ids=PROMPTS)
    def add_the_next_turn(self, which: int, token_ids: list[int]) -> None:
        known = self.running + self.ended
        self.waiting.append(make_sequence(known[which % len(known)].token_ids + token_ids[:2]))

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 50))
    def admit(self, which: int) -> None:
        seq = self.waiting[which % len(self.waiting)]
        num_free, num_blocks = self.manager.num_free_blocks, -(-seq.num_tokens // BLOCK_SIZE)
        if not self.manager.allocate(seq):
            assert num_blocks > num_free
            assert (seq.block_table, seq.num_computed_tokens) == ([], 0)
            assert self.manager.num_free_blocks == num_free
            type(self).num_refusals += 1
            return
        self.waiting.remove(seq)
        self.running.append(seq)
        assert len(seq.block_table) == num_blocks
        assert seq.num_computed_tokens < seq.num_tokens
        type(self).num_hits += seq.num_computed_tokens // BLOCK_SIZE

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 50), num_tokens=st.integers(1, 9))
    def compute(self, which: int, num_tokens: int) -> None:
        seq = self.running[which % len(self.running)]
        num_tokens = min(num_tokens, seq.num_uncomputed_tokens)
        self.memory.compute(seq, num_tokens)
        self.manager.commit(seq, num_tokens)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 50), token_id=TOKENS)
    def generate(self, which: int, token_id: int) -> None:
        seq = self.running[which % len(self.running)]
        self.memory.compute(seq, seq.num_uncomputed_tokens)
        self.manager.commit(seq, seq.num_uncomputed_tokens)
        seq.token_ids.append(token_id)
        num_free = self.manager.num_free_blocks
        if not self.manager.grow(seq):
            assert num_free == 0
            self.preempt(which)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 50))
    def preempt(self, which: int) -> None:
        seq = self.running.pop(which % len(self.running))
        self.manager.free(seq)
        assert (seq.block_table, seq.num_computed_tokens) == ([], 0)
        if -(-seq.num_tokens // BLOCK_SIZE) <= self.manager.num_blocks:
            self.waiting.append(seq)

    @precondition(lambda self: self.running)
    @rule(which=st.integers(0, 50))
    def finish(self, which: int) -> None:
        seq = self.running.pop(which % len(self.running))
        self.manager.free(seq)
        self.ended.append(seq)

    @invariant()
    def the_books_balance(self) -> None:
        if not hasattr(self, "manager"):  # before `start`
            return
        self.manager.check_integrity(self.running)
        for seq in self.running:
            self.memory.check(seq)
        used = {block_id for seq in self.running for block_id in seq.block_table}
        assert self.manager.num_free_blocks == self.manager.num_blocks - len(used)


def run_machine(machine: type[Machine], max_examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=40,
            deadline=None,
            derandomize=True,
            database=None,
            report_multiple_bugs=False,
            # A failure is reported as it was found: shrinking takes a minute.
            phases=[Phase.generate],
        ),
    )


def test_every_block_holds_what_its_sequences_think() -> None:
    class Correct(Machine):
        pass

    run_machine(Correct, max_examples=150)
    assert Correct.num_hits > 100
    assert Correct.num_refusals > 100


# Controls: each of these faults is found.


class CountsTheNewestToken(BlockManager):
    """Takes a token that was generated, but not fed, for one that is in the cache."""

    def grow(self, seq: Sequence) -> bool:
        grown = super().grow(seq)
        if grown:
            self.commit(seq, 1)
            seq.num_computed_tokens -= 1
        return grown


class FreesWhatOthersUse(BlockManager):
    def free(self, seq: Sequence) -> None:
        for block_id in seq.block_table:
            self._blocks[block_id].num_users = 1
        super().free(seq)


class RevivesWithoutTaking(BlockManager):
    """Leaves a cached block on the free list when it is used again."""

    def allocate(self, seq: Sequence) -> bool:
        free = list(self._free)
        allocated = super().allocate(seq)
        self._free.update(dict.fromkeys(i for i in free if i in seq.block_table[:1]))
        return allocated


class RemembersBlocksGivenAway(BlockManager):
    def _take_free(self) -> int:
        cached = dict(self._cached)
        block_id = super()._take_free()
        self._cached = cached
        return block_id


class SharesTheLastToken(BlockManager):
    """Leaves no token to compute where the whole prompt is cached."""

    def _match_prefix(self, seq: Sequence) -> list[int]:
        seq.token_ids.append(0)
        matched = super()._match_prefix(seq)
        seq.token_ids.pop()
        return matched


@pytest.mark.parametrize(
    "faulty",
    [
        CountsTheNewestToken,
        FreesWhatOthersUse,
        RevivesWithoutTaking,
        RemembersBlocksGivenAway,
        SharesTheLastToken,
    ],
)
def test_the_machine_finds_faults(faulty: type[BlockManager]) -> None:
    class Faulty(Machine):
        manager_class = faulty

    with pytest.raises((AssertionError, RuntimeError, KeyError)):
        run_machine(Faulty, max_examples=150)


@pytest.mark.parametrize(
    "careless",
    [
        lambda parent, ids: hash_block(b"", ids),
        lambda parent, ids: hash_block(parent, sorted(ids)),
    ],
    ids=["no_parent", "no_order"],
)
def test_the_machine_finds_careless_hashes(
    careless: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_manager, "hash_block", careless)
    # The comparison of tokens on a hit is a second guard: take it away.
    monkeypatch.setattr(BlockManager, "_tokens_of", lambda self, seq, i: Tokens(self, seq, i))

    class Faulty(Machine):
        pass

    with pytest.raises((AssertionError, RuntimeError)):
        run_machine(Faulty, max_examples=150)


class Tokens(tuple):
    """A block's tokens that equal any others."""

    __slots__ = ()

    def __new__(cls, manager: BlockManager, seq: Sequence, index: int) -> Tokens:
        start = index * manager.block_size
        return super().__new__(cls, seq.token_ids[start : start + manager.block_size])

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = None


# The scheduler over the same memory.


def run_step(scheduler: Scheduler, memory: Memory, budget: int) -> list[Sequence]:
    """Do what the engine does in a step, and return the sequences that get a token."""
    step = scheduler.schedule()
    assert 0 < step.num_tokens <= budget
    for seq, num_tokens in [*step.prefills, *((seq, 1) for seq in step.decodes)]:
        assert num_tokens <= seq.num_uncomputed_tokens
        memory.compute(seq, num_tokens)
    sampled = step.sampled
    scheduler.commit(step)
    computed = {seq.seq_id for seq in scheduler.sequences if seq.num_uncomputed_tokens == 0}
    assert {seq.seq_id for seq in sampled} == computed
    scheduler.check_integrity()
    return sampled


def test_every_request_is_served() -> None:
    preemptions = []

    @given(
        # Prompt, tokens wanted, and the step before which the request is cancelled.
        requests=st.lists(
            st.tuples(PROMPTS, st.integers(1, 12), st.none() | st.integers(0, 20)), max_size=8
        ),
        num_blocks=st.integers(11, 16),  # the longest request, of 21 tokens, takes 11
        max_num_seqs=st.integers(1, 8),
        budget=st.integers(1, 12),
        caching=st.booleans(),
    )
    @settings(max_examples=300, deadline=None, derandomize=True, database=None)
    def serve(
        requests: list[tuple[list[int], int, int | None]],
        num_blocks: int,
        max_num_seqs: int,
        budget: int,
        caching: bool,
    ) -> None:
        manager, memory = BlockManager(num_blocks, BLOCK_SIZE, caching), Memory()
        scheduler = Scheduler(manager, max_num_seqs, budget)
        sequences = [make_sequence(prompt, i) for i, (prompt, _, _) in enumerate(requests)]
        for seq in sequences:
            scheduler.add(seq)
        for step in range(1000):
            for seq, (_, _, cancel_at) in zip(sequences, requests, strict=True):
                if cancel_at == step and seq.finish_reason is None:
                    scheduler.finish(seq, "abort")
            if not scheduler.sequences:
                break
            for seq in run_step(scheduler, memory, budget):
                seq.token_ids.append(sum(seq.token_ids) % 2)
                if len(seq.output_token_ids) == requests[seq.seq_id][1]:
                    scheduler.finish(seq, "length")
        assert manager.num_free_blocks == num_blocks
        for seq, (_, max_tokens, cancel_at) in zip(sequences, requests, strict=True):
            assert seq.finish_reason == "length" or cancel_at is not None
            assert (seq.finish_reason == "length") == (len(seq.output_token_ids) == max_tokens)
        preemptions.append(scheduler.num_preemptions)

    serve()
    assert sum(preemptions) > 50


def test_a_preempted_request_goes_before_those_that_wait() -> None:
    scheduler = Scheduler(BlockManager(4, BLOCK_SIZE, True), 8, 100)
    old, new, waiting = (make_sequence([i] * n, i) for i, n in enumerate((3, 3, 1)))
    for seq in (old, new, waiting):
        scheduler.add(seq)
    memory = Memory()
    for _ in range(2):
        assert run_step(scheduler, memory, 100) == [old, new]
        old.token_ids.append(9)
        new.token_ids.append(9)
    # The fifth token needs a third block. One is left then, but who waits may not overtake.
    assert run_step(scheduler, memory, 100) == [old]
    assert (scheduler.num_preemptions, scheduler.sequences) == (1, [old, new, waiting])
