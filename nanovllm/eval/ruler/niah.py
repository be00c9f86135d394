"""Needles in a haystack: values of keys, hidden in text, and a question about some of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from nanovllm.eval.haystack import NOISE
from nanovllm.eval.ruler.draft import Draft, Materials
from nanovllm.eval.ruler.words import draw_numbers, draw_pairs, draw_uuids

Hay = Literal["noise", "prose", "needles"]
Kind = Literal["number", "code"]

_INTRODUCTION = (
    "Somewhere in the text below, secret {kind}s are given away. Read it with care and remember "
    "them: at the end there is a question about them.\n\n"
)
_NEEDLE = "The secret {kind} for {key} is {value}."
_QUESTION_ONE = "\n\nWhat is the secret {kind} for {keys} that the text above gives away?"
_QUESTION_ALL = "\n\nWhat are all the secret {kind}s for {keys} that the text above gives away?"
_PREFIX_ONE = " The secret {kind} for {keys} that the text gives away is"
_PREFIX_ALL = " The secret {kind}s for {keys} that the text gives away are"

# No sentence or line takes fewer, so a length divided by it is more of them than fit.
_LEAST_TOKENS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Niah:
    """A needle task. RULER's differ in these numbers only."""

    hay: Hay = "prose"
    """What surrounds the needles: sentences that repeat, prose, or other needles, a line each."""
    word_keys: bool = True
    """Whether keys are pairs of words; else UUIDs."""
    values: Kind = "number"
    """Seven digits, or a UUID."""
    num_keys: int = 1
    """Keys in the text that the hay has not of itself."""
    num_values: int = 1
    """Values of each key."""
    num_asked: int = 1
    """Keys that are asked for."""

    def __call__(self, materials: Materials) -> Draft:
        """Return the draft of a sample."""
        return NiahDraft(self, materials)


class NiahDraft(Draft):
    """Needles at fixed shares of a text of any length."""

    def __init__(self, task: Niah, materials: Materials) -> None:
        random = materials.random
        num_lines = materials.length // _LEAST_TOKENS if task.hay == "needles" else 0
        num_needles = task.num_keys * task.num_values
        draw_keys = draw_pairs if task.word_keys else draw_uuids
        draw_values = draw_numbers if task.values == "number" else draw_uuids
        keys = draw_keys(random, task.num_keys + num_lines)
        values = draw_values(random, num_needles + num_lines)
        of_key = [keys[i // task.num_values] for i in range(num_needles)] + keys[task.num_keys :]
        needles = [
            _NEEDLE.format(kind=task.values, key=key, value=value)
            for key, value in zip(of_key, values, strict=True)
        ]
        asked = keys[: task.num_asked]
        self.outputs = values[: task.num_asked * task.num_values]
        many = len(self.outputs) > 1
        words = {"kind": task.values, "keys": _enumerate(asked)}
        self.answer_prefix = (_PREFIX_ALL if many else _PREFIX_ONE).format(**words)
        self._head = _INTRODUCTION.format(**words)
        self._tail = (_QUESTION_ALL if many else _QUESTION_ONE).format(**words)
        # The first is asked for and lies where it should; the others lie anywhere.
        depths = [materials.depth, *(random.random() for _ in needles[1:num_needles])]
        gap = "\n" if task.hay == "needles" else " "
        self._needles = sorted(
            (depth, gap + needle) for depth, needle in zip(depths, needles, strict=False)
        )
        if task.hay == "needles":
            self._hay = ["\n" + needle for needle in needles[num_needles:]]
        elif task.hay == "prose":
            self._hay = materials.prose.excerpt(random, materials.length // _LEAST_TOKENS)
        else:
            self._hay = noise(materials.length // _LEAST_TOKENS)
        self.max_units = len(self._hay)

    def pieces(self, num_units: int) -> list[str]:
        return [self._head, *insert(self._hay[:num_units], self._needles), self._tail]


def noise(count: int) -> list[str]:
    """Return `count` sentences that repeat, each with a space before it."""
    return [" " + sentence for sentence in NOISE] * (count // len(NOISE) + 1)


def insert(units: Sequence[str], needles: Sequence[tuple[float, str]]) -> list[str]:
    """Return the units with each needle at its depth, a share of the units. The first unit of the
    result loses the space or line break before it.

    Args:
        units: sentences or lines.
        needles: depth in [0, 1] and text of each, in the order of depth.
    """
    pieces: list[str] = []
    done = 0
    for depth, needle in needles:
        place = round(depth * len(units))
        pieces += units[done:place]
        pieces.append(needle)
        done = place
    pieces += units[done:]
    pieces[0] = pieces[0].lstrip()
    return pieces


def _enumerate(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
