"""What a study found, as figures: of each policy, and of each policy against the first.

Every prompt counts alike, in a figure over several tasks too.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from nanovllm.errors import ConfigError
from nanovllm.eval.ruler.answers import Answer
from nanovllm.eval.ruler.breakdown import (
    Breakdown,
    break_down,
    common_task,
    has_own_lengths,
    span,
)
from nanovllm.eval.ruler.scoring import PASS_SCORE
from nanovllm.eval.ruler.statistics import Estimate, mean_difference, mean_score, sign_test

MARGIN = 0.02
"""A mean difference beyond this is marked, and so is an interval whose half is wider."""
SIGNIFICANT_P = 0.05
"""A p value below this is marked."""
ABLE_SCORE = 0.1
"""Where the base scores less, the model cannot do the task, and a difference proves nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupSummary:
    """Answers of one policy to prompts of one task and length, or of several."""

    task: str | None
    """None: of several tasks."""
    lengths: tuple[int, int]
    """The shortest and the longest, in tokens."""
    num_prompts: int
    score: Estimate
    """Mean score, in [0, 1]."""
    passed: float
    """Share of the prompts with a score of at least `PASS_SCORE`."""
    tile_density: float
    """Mean, in (0, 1]."""
    ttft_ms: float
    """Median: the first prompts of a run also wait for kernels to be compiled."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The answers of two policies to the same prompt."""

    base: Answer
    other: Answer

    @property
    def task(self) -> str:
        """Of the prompt."""
        return self.base.task

    @property
    def length(self) -> int:
        """Of the prompt's group, in tokens."""
        return self.base.length

    @property
    def gain(self) -> float:
        """How much higher `other` scores, in [-1, 1]."""
        return self.other.score - self.base.score


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSummary:
    """Two policies on the prompts that both answered, of one task and length, or of several."""

    task: str | None
    """None: of several tasks."""
    lengths: tuple[int, int]
    """The shortest and the longest, in tokens."""
    num_prompts: int
    base: Estimate
    """Mean score of the base, in [0, 1]."""
    other: Estimate
    """Mean score of the other policy, in [0, 1]."""
    difference: Estimate
    """Mean gain of the other policy, in [-1, 1]."""
    wins: int
    """Prompts on which the other policy scores higher."""
    losses: int
    """Prompts on which it scores lower."""
    p_value: float
    """Of the exact sign test: that wins and losses are as likely."""
    tile_density: float
    """Mean of the other policy, in (0, 1]."""
    base_ttft_ms: float
    """Median of the base."""
    ttft_ms: float
    """Median of the other policy."""

    @property
    def ttft_ratio(self) -> float:
        """The other policy's time to the first token as a multiple of the base's."""
        return self.ttft_ms / self.base_ttft_ms if self.base_ttft_ms else math.nan

    @property
    def is_large(self) -> bool:
        """Whether the difference is beyond `MARGIN`."""
        return abs(self.difference.value) > MARGIN

    @property
    def is_significant(self) -> bool:
        """Whether chance alone makes so uneven wins and losses in less than `SIGNIFICANT_P`."""
        return self.p_value < SIGNIFICANT_P

    @property
    def is_vague(self) -> bool:
        """Whether the prompts are too few to tell the difference to within `MARGIN`."""
        return (self.difference.high - self.difference.low) / 2 > MARGIN

    @property
    def base_is_unable(self) -> bool:
        """Whether the base scores too low for the prompts to prove anything."""
        return self.base.value < ABLE_SCORE


@dataclass(frozen=True, slots=True)
class PolicySummary:
    """What a policy scored."""

    label: str
    figures: Breakdown[GroupSummary]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A policy against the base, on the prompts that both answered."""

    base: str
    """Label of the policy that the other is set against."""
    other: str
    """Label of the other policy."""
    figures: Breakdown[PairSummary]
    pairs: tuple[Pair, ...]
    """All of them, in the base's order."""


@dataclass(frozen=True, slots=True)
class StudySummary:
    """What a study found."""

    policies: tuple[PolicySummary, ...]
    """The base first."""
    comparisons: tuple[Comparison, ...]
    """One for each further policy."""

    @property
    def lengths(self) -> list[int | None]:
        """Lengths of the policies' sections, the shortest first."""
        found = {part.length for policy in self.policies for part in policy.figures.sections}
        return sorted(found, key=lambda length: length or 0)


def summarise(answers: Mapping[str, Sequence[Answer]]) -> StudySummary:
    """Return the figures of a study.

    Args:
        answers: of each policy, by its label; the first is the base of all comparisons. Tasks,
            lengths and prompts that only some policies answered are compared among those.

    Raises:
        ConfigError: a sample of the same task, length and number had another prompt.
    """
    merge = has_own_lengths(answer for of_policy in answers.values() for answer in of_policy)
    policies = tuple(
        PolicySummary(label, break_down(of_policy, _summarise_answers, merge_lengths=merge))
        for label, of_policy in answers.items()
    )
    base, *others = answers
    comparisons = []
    for other in others:
        pairs = match(answers[base], answers[other])
        figures = break_down(pairs, _summarise_pairs, merge_lengths=merge)
        comparisons.append(Comparison(base, other, figures, tuple(pairs)))
    return StudySummary(policies, tuple(comparisons))


def match(base: Iterable[Answer], other: Iterable[Answer]) -> list[Pair]:
    """Return the answers to the samples that both answered, in the order of `base`.

    Raises:
        ConfigError: a sample of the same task, length and number had another prompt.
    """
    by_sample = {answer.key[1:]: answer for answer in other}
    pairs = [
        Pair(answer, by_sample[answer.key[1:]]) for answer in base if answer.key[1:] in by_sample
    ]
    for pair in pairs:
        if pair.base.prompt != pair.other.prompt:
            raise ConfigError(
                f"{pair.task} at length {pair.length}, sample {pair.base.index}: "
                f"{pair.base.policy} and {pair.other.policy} answered different prompts"
            )
    return pairs


def _summarise_answers(answers: Sequence[Answer]) -> GroupSummary:
    return GroupSummary(
        task=common_task(answers),
        lengths=span(answers),
        num_prompts=len(answers),
        score=mean_score([answer.score for answer in answers]),
        passed=_mean(answer.score >= PASS_SCORE for answer in answers),
        tile_density=_mean(answer.tile_density for answer in answers),
        ttft_ms=median(answer.ttft_ms for answer in answers),
    )


def _summarise_pairs(pairs: Sequence[Pair]) -> PairSummary:
    gains = [pair.gain for pair in pairs]
    wins, losses = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
    return PairSummary(
        task=common_task(pairs),
        lengths=span(pairs),
        num_prompts=len(pairs),
        base=mean_score([pair.base.score for pair in pairs]),
        other=mean_score([pair.other.score for pair in pairs]),
        difference=mean_difference(gains),
        wins=wins,
        losses=losses,
        p_value=sign_test(wins, losses),
        tile_density=_mean(pair.other.tile_density for pair in pairs),
        base_ttft_ms=median(pair.base.ttft_ms for pair in pairs),
        ttft_ms=median(pair.other.ttft_ms for pair in pairs),
    )


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)
