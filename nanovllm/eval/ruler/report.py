"""What a study found as tables, in plain text and in Markdown."""

from collections.abc import Iterator, Sequence

from nanovllm.eval.ruler.statistics import Estimate
from nanovllm.eval.ruler.summary import GroupSummary, PairSummary, StudySummary
from nanovllm.eval.text_table import text_table

_Row = tuple[str, ...]

_POLICY_HEADER = ("task", "length", "n", "score [95%]", "passed", "density", "TTFT ms")
_PAIR_HEADER = (
    *("task", "length", "n", "base [95%]", "this [95%]", "difference [95%]"),
    *("wins", "losses", "p", "density", "TTFT x"),
)


def as_text(study: StudySummary) -> str:
    """Return a table for each policy, then one for each that is set against the first.

    A policy's columns are: task; length; prompts; mean score with its 95% interval; share of the
    prompts that passed; tile density; median TTFT in milliseconds. A comparison's:
    task; length; prompts; both mean scores; the mean difference; prompts with a higher and with a
    lower score; the p value of the exact sign test; tile density; time to the first token as a
    multiple of the base's. Rows over several tasks are named `all`.
    """
    return "\n\n".join(f"{title}\n{text_table(rows)}" for title, rows in _tables(study, "{}"))


def as_markdown(study: StudySummary) -> str:
    """Return the tables of `as_text` in Markdown, each under a heading."""
    return "\n".join(
        f"## {title}\n\n{_markdown_table(rows)}\n" for title, rows in _tables(study, "`{}`")
    )


def length_text(lengths: tuple[int, int]) -> str:
    """Return the shortest and the longest length as `4096` or `4096-8192`."""
    return "-".join(map(str, dict.fromkeys(lengths)))


def p_text(p_value: float) -> str:
    """Return a p value with three decimals, or that it is less than they can tell."""
    return f"{p_value:.3f}" if p_value >= 0.001 else "<0.001"


def _tables(study: StudySummary, label: str) -> Iterator[tuple[str, list[_Row]]]:
    """Yield titles and rows; `label` is the format of a policy's label in a title."""
    for policy in study.policies:
        yield (
            label.format(policy.label),
            [_POLICY_HEADER, *map(_policy_row, policy.figures.rows)],
        )
    for pair in study.comparisons:
        yield (
            f"{label.format(pair.other)} against {label.format(pair.base)}",
            [_PAIR_HEADER, *map(_pair_row, pair.figures.rows)],
        )


def _policy_row(group: GroupSummary) -> _Row:
    return (
        group.task or "all",
        length_text(group.lengths),
        str(group.num_prompts),
        str(group.score),
        f"{group.passed:.0%}",
        f"{group.tile_density:.3f}",
        f"{group.ttft_ms:.0f}",
    )


def _pair_row(pair: PairSummary) -> _Row:
    return (
        pair.task or "all",
        length_text(pair.lengths),
        str(pair.num_prompts),
        str(pair.base),
        str(pair.other),
        _signed(pair.difference),
        str(pair.wins),
        str(pair.losses),
        p_text(pair.p_value),
        f"{pair.tile_density:.3f}",
        f"{pair.ttft_ratio:.2f}",
    )


def _signed(difference: Estimate) -> str:
    return f"{difference.value:+z.3f} [{difference.low:+z.3f}, {difference.high:+z.3f}]"


def _markdown_table(rows: Sequence[_Row]) -> str:
    """Return the rows as a table whose first column is to the left, the others to the right."""
    header, *body = rows
    rule = (":--", *["--:"] * (len(header) - 1))
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *body))
