"""What a grid of needles found, in figures and as a table."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from nanovllm.eval.needle_grid import NeedleAnswer, depth_text


@dataclass(frozen=True, slots=True)
class Tally:
    """How many of some needles were found."""

    num_found: int
    num_prompts: int
    """>= 1."""

    @property
    def share(self) -> float:
        """In [0, 1]."""
        return self.num_found / self.num_prompts

    def __str__(self) -> str:
        """Return whole percent: 100% only if all were found, 0% only if none was."""
        if 0 < self.num_found < self.num_prompts:
            return f"{min(max(round(100 * self.share), 1), 99)}%"
        return f"{self.share:.0%}"


@dataclass(frozen=True, slots=True)
class GridSummary:
    """One policy's figures."""

    policy: str
    """Label of the policy."""
    cells: Mapping[tuple[int, float], Tally]
    """By length and depth; only those that were run."""
    by_length: Mapping[int, Tally]
    """Over all depths."""
    total: Tally
    ttft_ms: Mapping[int, float]
    """Mean milliseconds to the first token, by length."""
    tile_density: float
    """Share of the causal tiles of attention that was computed; the mean of all prompts."""

    @property
    def lengths(self) -> list[int]:
        """From the shortest on."""
        return sorted(self.by_length)

    @property
    def depths(self) -> list[float]:
        """From the first on."""
        return sorted({depth for _, depth in self.cells})


def summarise(answers: Iterable[NeedleAnswer]) -> list[GridSummary]:
    """Return the figures of each policy, in the order in which the answers name them first."""
    by_policy: dict[str, list[NeedleAnswer]] = {}
    for answer in answers:
        by_policy.setdefault(answer.policy, []).append(answer)
    return [_summary(policy, group) for policy, group in by_policy.items()]


def as_text(summary: GridSummary) -> str:
    """Return a title and a table of the needles found: depths down, lengths across.

    The last lines are over all depths, and the mean time to the first token in seconds.
    """
    rows = [("depth", *map(str, summary.lengths))]
    for depth in summary.depths:
        found = [summary.cells.get((length, depth), "-") for length in summary.lengths]
        rows.append((depth_text(depth), *map(str, found)))
    rows.append(("all", *(str(summary.by_length[length]) for length in summary.lengths)))
    seconds = [summary.ttft_ms[length] / 1e3 for length in summary.lengths]
    rows.append(("TTFT s", *(f"{value:.2f}" for value in seconds)))
    total = summary.total
    title = (
        f"{summary.policy}: {total.num_found} of {total.num_prompts} needles found, "
        f"{summary.tile_density:.0%} of the prefill's attention computed"
    )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(str.rjust, row, widths)) for row in rows]
    return "\n".join([title, "", *lines])


def _summary(policy: str, answers: Sequence[NeedleAnswer]) -> GridSummary:
    cells: dict[tuple[int, float], list[NeedleAnswer]] = {}
    by_length: dict[int, list[NeedleAnswer]] = {}
    for answer in answers:
        cells.setdefault((answer.length, answer.depth), []).append(answer)
        by_length.setdefault(answer.length, []).append(answer)
    return GridSummary(
        policy=policy,
        cells={place: _tally(group) for place, group in cells.items()},
        by_length={length: _tally(group) for length, group in by_length.items()},
        total=_tally(answers),
        ttft_ms={
            length: fmean(answer.ttft_ms for answer in group) for length, group in by_length.items()
        },
        tile_density=fmean(answer.tile_density for answer in answers),
    )


def _tally(answers: Sequence[NeedleAnswer]) -> Tally:
    return Tally(sum(answer.passed for answer in answers), len(answers))
