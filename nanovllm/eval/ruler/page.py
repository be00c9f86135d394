"""What a study found as one HTML page that needs no other file and no network."""

import math
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from nanovllm.eval.ruler.report import length_text, p_text
from nanovllm.eval.ruler.statistics import Estimate
from nanovllm.eval.ruler.summary import (
    ABLE_SCORE,
    MARGIN,
    SIGNIFICANT_P,
    GroupSummary,
    Pair,
    PairSummary,
    StudySummary,
)

_TEMPLATES = Path(__file__).parent / "templates"
_MAX_CHARACTERS = 300
_SCALE_STEP = 0.05


@dataclass(frozen=True, slots=True)
class Scale:
    """Places differences of scores on a bar whose middle is zero."""

    limit: float
    """The difference at the bar's right end, in (0, 1]."""

    @classmethod
    def over(cls, differences: Iterable[Estimate]) -> "Scale":
        """Return the narrowest scale of whole steps of 5 points that holds all intervals."""
        ends = [abs(end) for each in differences for end in (each.low, each.high)]
        return cls(max(1, math.ceil(max(ends, default=0) / _SCALE_STEP)) * _SCALE_STEP)

    def percent(self, difference: float) -> str:
        """Return how far from the bar's left end a difference lies, as a share of its width."""
        return f"{50 + 50 * difference / self.limit:.2f}%"


@dataclass(frozen=True, slots=True)
class Overview:
    """The policies at one length, or over all."""

    lengths: tuple[int, int]
    """The shortest and the longest, in tokens."""
    base: GroupSummary | None
    """None: the base has no answers here."""
    pairs: Sequence[tuple[str, PairSummary | None]]
    """Each other policy's label and figures. None: no prompt here that both answered."""


def render_page(study: StudySummary, *, command: str, settings: Mapping[str, object]) -> str:
    """Return the page: what was run, the policies at each length, each task, and what differs.

    What the answers say is shown as text, whatever is in it.

    Args:
        study: the figures.
        command: the command line that made them.
        settings: what all answers have in common; those that are None are left out.
    """
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "changed": changed,
        "excerpt": excerpt,
        "lengths": length_text,
        "p": p_text,
        "points": points_text,
        "policy": _split_label,
    }
    shown = list(overviews(study))
    rows = [row for comparison in study.comparisons for row in comparison.figures.rows]
    return environment.get_template("page.html.j2").render(
        study=study,
        base=study.policies[0],
        command=command,
        settings={name: value for name, value in settings.items() if value is not None},
        overviews=shown,
        overview_scale=Scale.over(row.difference for each in shown for _, row in each.pairs if row),
        task_scale=Scale.over(row.difference for row in rows),
        margin=MARGIN,
        significant_p=SIGNIFICANT_P,
        able_score=ABLE_SCORE,
    )


def overviews(study: StudySummary) -> Iterator[Overview]:
    """Yield the policies at each length, the shortest first, and last over all of several."""
    policies = [policy.figures for policy in study.policies]
    pairs = [comparison.figures for comparison in study.comparisons]
    for length in study.lengths:
        yield _overview(
            study,
            [figures.total_at(length) for figures in policies],
            [figures.total_at(length) for figures in pairs],
        )
    if len(study.lengths) > 1:
        yield _overview(
            study, [figures.total for figures in policies], [figures.total for figures in pairs]
        )


def points_text(difference: float) -> str:
    """Return a difference of scores in points, which are hundredths, with its sign."""
    text = f"{100 * difference:+z.1f}".replace("-", "\N{MINUS SIGN}")
    return "0" if text == "+0.0" else text


def excerpt(text: str) -> str:
    """Return the beginning of a text, at most 300 characters and a sign that it was cut."""
    return text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + "…"


def changed(pairs: Iterable[Pair], sign: int) -> list[Pair]:
    """Return the wins (`sign` 1) or losses (-1), the largest first."""
    found = [pair for pair in pairs if pair.gain * sign > 0]
    return sorted(found, key=lambda pair: -abs(pair.gain))


def _overview(
    study: StudySummary,
    policies: Sequence[GroupSummary | None],
    pairs: Sequence[PairSummary | None],
) -> Overview:
    lengths = [length for group in policies if group for length in group.lengths]
    labels = [comparison.other for comparison in study.comparisons]
    return Overview(
        (min(lengths), max(lengths)), policies[0], list(zip(labels, pairs, strict=True))
    )


def _visible(value: object) -> object:
    """Return a text with what HTML cannot hold replaced by a sign; what is no text as it is.

    These are control characters but line breaks and tabs, and halves of surrogate pairs.
    """
    if isinstance(value, Markup) or not isinstance(value, str):
        return value
    return "".join(map(_visible_character, value))


def _visible_character(character: str) -> str:
    if character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs"):
        return character
    code = ord(character)
    return chr(0x2400 + code) if code < 0x20 else "\N{REPLACEMENT CHARACTER}"


def _split_label(label: str) -> tuple[str, str]:
    """Return a policy's name and its options, between which lines can break."""
    name, _, options = label.partition(":")
    return name, options.replace(",", ", ")
