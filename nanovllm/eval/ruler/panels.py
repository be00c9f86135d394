"""What a picture of a study shows: each policy's tile density and what it costs in score."""

from dataclasses import dataclass
from typing import Any

from nanovllm.config import Config
from nanovllm.eval.ruler.policies import parse_policy
from nanovllm.eval.ruler.statistics import Estimate
from nanovllm.eval.ruler.summary import PairSummary, StudySummary
from nanovllm.kvcache.sparse.registry import SparsePolicyType
from nanovllm.kvcache.sparse.xattn_bsa import DEFAULTS

_ESTIMATOR = Config.__dataclass_fields__["sparse_estimator"].default


@dataclass(frozen=True, slots=True)
class Point:
    """A policy at one length, over all tasks."""

    family: str
    """Its kind: of XATTN_BSA, estimator and stride; of others, the name."""
    label: str
    """Of XATTN_BSA, the threshold and further options; of others, all options, or the name."""
    guarded: bool
    """Whether it has a guard."""
    tile_density: float
    """In (0, 1]."""
    difference: Estimate
    """Mean difference of the score to the base, in points, which are hundredths."""


@dataclass(frozen=True, slots=True)
class Panel:
    """The policies at one length."""

    lengths: tuple[int, int]
    """The shortest and the longest, in tokens."""
    points: tuple[Point, ...]


def panels_of(study: StudySummary) -> list[Panel]:
    """Return a panel for each length at which the base and another policy answered a prompt."""
    panels = []
    for length in study.lengths:
        found = {
            comparison.other: pair
            for comparison in study.comparisons
            if (pair := comparison.figures.total_at(length))
        }
        if found:
            lengths = [each for pair in found.values() for each in pair.lengths]
            points = tuple(_point(label, pair) for label, pair in found.items())
            panels.append(Panel((min(lengths), max(lengths)), points))
    return panels


def _point(policy: str, pair: PairSummary) -> Point:
    options = parse_policy(policy).options
    kind = options.pop("sparse_policy")
    family, guarded = kind.name, False
    words: list[str] = []
    if kind is SparsePolicyType.XATTN_BSA:
        family, words, guarded = _take_parameters(options)
    words += [f"{name.removeprefix('sparse_')} {value}" for name, value in options.items()]
    difference = pair.difference
    return Point(
        family,
        ", ".join(words) or family,
        guarded,
        pair.tile_density,
        Estimate(100 * difference.value, 100 * difference.low, 100 * difference.high),
    )


def _take_parameters(options: dict[str, Any]) -> tuple[str, list[str], bool]:
    """Take XATTN_BSA's parameters out of its options; return family, words and if it is guarded."""
    estimator = options.pop("sparse_estimator", _ESTIMATOR)
    defaults = DEFAULTS[estimator]
    threshold, stride, guard = (
        options.pop(f"sparse_{name}", getattr(defaults, name))
        for name in ("threshold", "stride", "guard")
    )
    words = [str(threshold), f"guard {guard}"] if guard < 1 else [str(threshold)]
    return f"{estimator}, stride {stride}", words, guard < 1
