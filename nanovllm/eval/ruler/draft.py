"""A prompt whose length is still open, and how it is brought to the length asked for."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.eval.haystack import Prose
from nanovllm.eval.ruler.sample import PromptWriter

# A tokenizer whose counts do not add up is given this many tries to come close.
_MAX_TRIES = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Materials:
    """What the draft of one sample is made from."""

    random: Random
    """The sample's own; equal seed, task, length and index draw alike."""
    index: int
    """Of the sample."""
    length: int
    """Tokens of prompt and answer together."""
    depth: float
    """Where to hide what is asked for, as a share of the text, in [0, 1). Spread evenly over the
    samples, however many there are."""
    count: Callable[[Sequence[str]], int]
    """Returns how many tokens pieces of text take together."""
    prose: Prose
    """Sentences that all samples share, tokenised once."""
    questions: Any = None
    """A `QuestionFile`, for the tasks that need one."""


class Draft(ABC):
    """A prompt with any amount of filler: sentences, lines, words or documents."""

    outputs: list[str]
    """What a right answer says."""
    answer_prefix: str
    """How the answer begins; begins with a space or line break."""
    max_units: int | None = None
    """Most units of filler that there are. None: no limit."""

    @abstractmethod
    def pieces(self, num_units: int) -> list[str]:
        """Return the parts of the text with `num_units` of filler, which follow each other.

        They are cut before spaces and line breaks, where tokenizers cut too, so that their token
        counts add up to the text's.
        """


@dataclass(slots=True)
class PieceCounter:
    """Counts the tokens of pieces, each different one once."""

    writer: PromptWriter
    _counts: dict[str, int] = field(default_factory=dict)

    def total(self, pieces: Sequence[str]) -> int:
        """Return how many tokens the pieces take together."""
        counts = self._counts
        missing = list({piece: None for piece in pieces if piece not in counts})
        if missing:
            counts.update(zip(missing, self.writer.count(missing), strict=True))
        return sum(map(counts.__getitem__, pieces))


class Fitting:
    """The largest amount of filler with which a draft stays within a number of tokens."""

    def __init__(self, draft: Draft, counter: PieceCounter, max_tokens: int) -> None:
        self._draft = draft
        self._counter = counter
        self._max_tokens = max_tokens
        self._error = 0  # tokens that the pieces' counts do not tell of
        self._tries = 0
        self._chosen = 0
        self.user_text = ""
        self.token_ids: list[int] = []

    @cached_property
    def _fixed_tokens(self) -> int:
        """Tokens of template and answer prefix."""
        text = self._counter.writer.text("x", self._draft.answer_prefix)
        return len(self._counter.writer.encode([text])[0]) - 1

    def propose(self) -> str:
        """Return the user's text with as much filler as should fit.

        Raises:
            ConfigError: not even the draft without filler fits.
        """
        if self._expected(0) > self._max_tokens:
            raise ConfigError(
                f"a prompt of {self._max_tokens} tokens is too short: without any filler it takes "
                f"{self._expected(0)}"
            )
        self._chosen = self._largest()
        return "".join(self._draft.pieces(self._chosen))

    def settle(self, user_text: str, token_ids: list[int]) -> bool:
        """Take the ids of what was proposed. Return whether it is as long as can be."""
        num_tokens = len(token_ids)
        if len(self.token_ids) < num_tokens <= self._max_tokens:
            self.user_text, self.token_ids = user_text, token_ids
        error = num_tokens - self._expected(self._chosen)
        self._error += error
        self._tries += 1
        done = error == 0 or (bool(self.token_ids) and self._tries >= _MAX_TRIES)
        if not done and self._tries >= 4 * _MAX_TRIES:
            raise ConfigError(
                f"no text of at most {self._max_tokens} tokens was found: the tokenizer's counts "
                "vary too much with the context"
            )
        return done

    def _expected(self, num_units: int) -> int:
        pieces = self._draft.pieces(num_units)
        return self._fixed_tokens + self._error + self._counter.total(pieces)

    def _largest(self) -> int:
        """Return the most units that are expected to fit, by a bracketed secant search."""
        limit = self._draft.max_units
        low, low_tokens = 0, self._expected(0)
        high, high_tokens = None, 0
        step = 64
        while high is None:
            at = low + step if limit is None else min(low + step, limit)
            tokens = self._expected(at)
            if tokens > self._max_tokens:
                high, high_tokens = at, tokens
            elif at == limit:
                return at
            else:
                per_unit = max((tokens - low_tokens) / step, 1e-3)
                low, low_tokens = at, tokens
                step = int((self._max_tokens - tokens) / per_unit * 1.01) + 2
        while high - low > 1:
            slope = (high_tokens - low_tokens) / (high - low)
            guess = low + int((self._max_tokens - low_tokens) / max(slope, 1e-9))
            at = min(max(guess, low + 1), high - 1)
            tokens = self._expected(at)
            if tokens > self._max_tokens:
                high, high_tokens = at, tokens
            else:
                low, low_tokens = at, tokens
        return low


def fit(
    drafts: Sequence[Draft], counter: PieceCounter, max_tokens: int
) -> list[tuple[str, list[int]]]:
    """Return the text and token ids of each draft, as long as can be within `max_tokens`.

    The amount of filler is found from the counts of its pieces, and each text is then tokenised as
    a whole, all of them in one call: once, where counts add up.

    Raises:
        ConfigError: a draft is longer than `max_tokens` without any filler.
    """
    writer = counter.writer
    fittings = [Fitting(draft, counter, max_tokens) for draft in drafts]
    waiting = list(zip(fittings, drafts, strict=True))
    while waiting:
        user_texts = [fitting.propose() for fitting, _ in waiting]
        texts = [
            writer.text(user_text, draft.answer_prefix)
            for user_text, (_, draft) in zip(user_texts, waiting, strict=True)
        ]
        ids = writer.encode(texts)
        waiting = [
            entry
            for entry, user_text, token_ids in zip(waiting, user_texts, ids, strict=True)
            if not entry[0].settle(user_text, token_ids)
        ]
    return [(fitting.user_text, fitting.token_ids) for fitting in fittings]
