"""Tables in plain text."""

from collections.abc import Sequence


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return the rows with aligned columns, the first to the left, the others to the right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    return "\n".join(
        "  ".join([head.ljust(first), *map(str.rjust, cells, others)]) for head, *cells in rows
    )
