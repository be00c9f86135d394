"""How an answer is scored: by the references that stand in it."""

from collections.abc import Sequence
from typing import Literal

Metric = Literal["all", "part"]

PASS_SCORE = 0.5
"""A sample whose score is at least this counts as passed, where samples are counted."""

_CONTROLS = dict.fromkeys((*range(32), 127)) | {ord(space): " " for space in "\t\n\v\f\r"}


def score(answer: str, references: str | Sequence[str], metric: Metric = "all") -> float:
    """Return the share of references that occur in the answer; case does not count.

    Args:
        answer: what the model wrote. Line breaks and tabs count as spaces, other control
            characters are dropped.
        references: what it should say; a lone string is one reference. At least one.
        metric: `all`: the share of references found; `part`: 1 if any is found.
    """
    wanted = [references] if isinstance(references, str) else references
    text = _plain(answer)
    found = [_plain(str(reference)) in text for reference in wanted]
    return float(any(found)) if metric == "part" else sum(found) / len(found)


def _plain(text: str) -> str:
    return text.translate(_CONTROLS).strip().lower()
