"""Variable tracking: a chain of assignments, spread over a text, that ends at one number."""

from random import Random
from string import ascii_uppercase

from nanovllm.eval.ruler.draft import Draft, Materials
from nanovllm.eval.ruler.niah import insert, noise
from nanovllm.eval.ruler.words import draw_numbers

NUM_HOPS = 4

_INTRODUCTION = (
    "In the text below, variables are set here and there, some to a number and some to the value "
    "of another variable. Keep track of what each of them holds.\n\n"
)
_STATEMENT = " SET {name} = {value}."
_QUESTION = (
    "\n\nWhich variables hold the value {value} in the end, by themselves or through another "
    "variable? Name all {count} of them."
)
_PREFIX = " The {count} variables that hold the value {value} are:"


class ChainDraft(Draft):
    """A chain in sentences that repeat: a number, and variables that are each set to the last."""

    def __init__(self, materials: Materials) -> None:
        random = materials.random
        names = _draw_names(random, NUM_HOPS + 1)
        [value] = draw_numbers(random, 1, num_digits=5)
        depths = sorted(random.random() for _ in names)
        statements = [
            _STATEMENT.format(name=name, value=source)
            for source, name in zip([value, *names], names, strict=False)
        ]
        self.outputs = names
        self.answer_prefix = _PREFIX.format(count=len(names), value=value)
        self._tail = _QUESTION.format(count=len(names), value=value)
        self._statements = list(zip(depths, statements, strict=True))
        # A sentence takes four tokens or more, so this is more than fits.
        self._hay = noise(materials.length // 4)
        self.max_units = len(self._hay)

    def pieces(self, num_units: int) -> list[str]:
        return [_INTRODUCTION, *insert(self._hay[:num_units], self._statements), self._tail]


def _draw_names(random: Random, count: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < count:
        names["".join(random.choices(ascii_uppercase, k=5))] = None
    return list(names)
