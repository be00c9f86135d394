"""Means and differences of scores, with what chance alone could make of them."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

_Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_score(scores: Sequence[float]) -> Estimate:
    """Return the mean of scores in [0, 1], with Wilson's score interval (Wilson 1927).

    It is exact enough for right and wrong, and too wide rather than too narrow for shares between,
    which vary less. It is no point where all scores are equal.
    """
    n, mean = len(scores), sum(scores) / len(scores)
    centre = (mean + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(mean * (1 - mean) / n + _Z**2 / (4 * n**2))
    return Estimate(mean, max(0.0, centre - half), min(1.0, centre + half))


def mean_difference(differences: Sequence[float]) -> Estimate:
    """Return the mean of paired differences in [-1, 1], with an adjusted Wald interval.

    Agresti and Min (2005) add half a pair to each cell of the table of right and wrong: here, a
    win, a loss and two halves of a tie. So the interval is no point where no pair differs.
    """
    n = len(differences)
    total, squares = sum(differences), sum(d * d for d in differences) + 1
    centre = total / (n + 2)
    half = _Z * math.sqrt(max(squares - total**2 / (n + 2), 0)) / (n + 2)
    return Estimate(total / n, max(-1.0, centre - half), min(1.0, centre + half))


def sign_test(num_wins: int, num_losses: int) -> float:
    """Return the two-sided p value of the exact sign test; ties are left out.

    For scores of 0 and 1 this is McNemar's exact test.
    """
    n = num_wins + num_losses
    num_outcomes = sum(math.comb(n, k) for k in range(min(num_wins, num_losses) + 1))
    return min(1.0, 2 * num_outcomes / (1 << n))
