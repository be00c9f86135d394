"""Tables of answers: by task and length, and of two policies on the same prompts."""

from collections.abc import Iterable, Sequence

from nanovllm.errors import ConfigError
from nanovllm.eval.ruler.answers import Answer
from nanovllm.eval.ruler.scoring import PASS_SCORE
from nanovllm.eval.ruler.statistics import mean_difference, mean_score, sign_test

_Group = tuple[str, int]


def describe(answers: Sequence[Answer]) -> str:
    """Return a table of one policy's answers: a line for each task and length."""
    rows = [("task", "length", "n", "score [95%]", "passed", "density", "TTFT ms")]
    for (task, length), group in _grouped(answers).items():
        passed = sum(answer.score >= PASS_SCORE for answer in group) / len(group)
        rows.append(
            (
                task,
                str(length),
                str(len(group)),
                str(mean_score([answer.score for answer in group])),
                f"{passed:.0%}",
                f"{_mean(answer.tile_density for answer in group):.3f}",
                f"{_mean(answer.ttft_ms for answer in group):.0f}",
            )
        )
    return _table(rows)


def describe_pairs(base: Sequence[Answer], other: Sequence[Answer]) -> str:
    """Return a table of what `other` gains over `base` on the prompts that both answered.

    Columns: both mean scores; the mean difference with its 95% interval; prompts with a higher and
    a lower score; the p value of the exact sign test; tile density of `other`; its time to the
    first token as a multiple of `base`'s.

    Raises:
        ConfigError: a sample of the same number had another prompt.
    """
    names = ("task", "length", "n", "base", "this", "difference [95%]", "wins", "losses")
    rows = [(*names, "p", "density", "TTFT x")]
    others = _grouped(other)
    for (task, length), group in _grouped(base).items():
        by_index = {answer.index: answer for answer in others.get((task, length), [])}
        pairs = [(answer, by_index[answer.index]) for answer in group if answer.index in by_index]
        if not pairs:
            continue
        if any(before.prompt != after.prompt for before, after in pairs):
            raise ConfigError(
                f"{task} at length {length}: the two policies answered different prompts"
            )
        gains = [after.score - before.score for before, after in pairs]
        wins, losses = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        rows.append(
            (
                task,
                str(length),
                str(len(pairs)),
                f"{_mean(before.score for before, _ in pairs):.3f}",
                f"{_mean(after.score for _, after in pairs):.3f}",
                str(mean_difference(gains)),
                str(wins),
                str(losses),
                f"{sign_test(wins, losses):.3f}",
                f"{_mean(after.tile_density for _, after in pairs):.3f}",
                f"{_ratio(pairs):.2f}",
            )
        )
    return _table(rows)


def _grouped(answers: Iterable[Answer]) -> dict[_Group, list[Answer]]:
    groups: dict[_Group, list[Answer]] = {}
    for answer in answers:
        groups.setdefault((answer.task, answer.length), []).append(answer)
    return groups


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values)


def _ratio(pairs: Sequence[tuple[Answer, Answer]]) -> float:
    return sum(after.ttft_ms for _, after in pairs) / sum(before.ttft_ms for before, _ in pairs)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return the rows with aligned columns, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
