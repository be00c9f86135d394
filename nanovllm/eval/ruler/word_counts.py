"""Counting words: the ten common ones of a list, and the three most frequent of a coded text."""

import math
from itertools import islice
from random import Random

from nanovllm.eval.ruler.draft import Draft, Materials
from nanovllm.eval.ruler.words import all_words, draw_pairs

NUM_COMMON = 10
NUM_FREQUENT = 3
ZETA_EXPONENT = 2.0

_LIST = (
    "Below is a numbered list of words. Ten of them are repeated more often than all others. Find "
    "these ten.\n\n"
)
_LIST_QUESTION = "\n\nWhich ten words are repeated most often in the list above?"
_LIST_PREFIX = " The ten words that are repeated most often are:"
_CODED = (
    "Below is a text in a secret code. Count how often each coded word occurs; the dots stand for "
    "nothing.\n\n"
)
_CODED_QUESTION = (
    "\n\nWhich three coded words occur most often in the text above? Leave out the dots, and give "
    "the words without explanation."
)
_CODED_PREFIX = " The three coded words that occur most often are:"
_DOTS = "..."
_SYLLABLES = [first + second for first in "bdfgklmnprstvz" for second in "aeiou"]


class CommonWordsDraft(Draft):
    """Ten words, each many times, among others, each a few times; after a small example of it.

    A unit of filler is one other word. From 4,096 tokens on, the common words come 30 times and the
    others three times; below, where that has no room, 10 times and once.
    """

    def __init__(self, materials: Materials) -> None:
        random = materials.random
        roomy = materials.length >= 4096
        self._repeats, example_repeats = ((30, 3), (10, 3)) if roomy else ((10, 1), (3, 1))
        example_others = 20 if roomy else 10
        words = _draw_words(materials, self._repeats[1], example_others + 2 * NUM_COMMON)
        example, words = words[: NUM_COMMON + example_others], words[NUM_COMMON + example_others :]
        self._common, self._others = words[:NUM_COMMON], words[NUM_COMMON:]
        self._seed = random.random()
        self.answer_prefix = _LIST_PREFIX
        self.outputs = self._common
        self.max_units = len(self._others)
        common, others = example[:NUM_COMMON], example[NUM_COMMON:]
        self._head = [
            _LIST,
            *_list_pieces(common, others, example_repeats, random),
            _LIST_QUESTION,
            "\n" + self.answer_prefix.lstrip() + " ",
            *_numbered(common),
            "\n\n",
            _LIST,
        ]

    def pieces(self, num_units: int) -> list[str]:
        others = self._others[:num_units]
        listed = _list_pieces(self._common, others, self._repeats, Random(self._seed))
        return [*self._head, *listed, _LIST_QUESTION]


class FrequentWordsDraft(Draft):
    """A text of invented words of which the k-th most frequent takes a share of k**-2 / zeta(2).

    The first place is taken by dots; asked for are the next three. A unit of filler is a word.
    """

    def __init__(self, materials: Materials) -> None:
        self._seed = materials.random.random()
        words: dict[str, None] = {}
        while len(words) < 64 + 4 * math.isqrt(materials.length):
            words["".join(materials.random.choices(_SYLLABLES, k=3))] = None
        self._words = [_DOTS, *words]
        self.outputs = list(islice(words, NUM_FREQUENT))
        self.answer_prefix = _CODED_PREFIX

    def pieces(self, num_units: int) -> list[str]:
        words = [" " + word for word in self._coded_text(num_units)]
        if words:
            words[0] = words[0].lstrip()
        return [_CODED, *words, _CODED_QUESTION]

    def _coded_text(self, num_words: int) -> list[str]:
        scale = num_words / (math.pi**2 / 6)
        text: list[str] = []
        rank = 1
        while (count := int(scale * rank**-ZETA_EXPONENT)) > 0:
            text += [self._words[rank - 1]] * count
            rank += 1
        # What rounding left over goes to words that occur once.
        text += self._words[rank - 1 : rank - 1 + num_words - len(text)]
        Random(self._seed).shuffle(text)
        return text


def _draw_words(materials: Materials, repeats: int, extra: int) -> list[str]:
    """Return more different words than a list of `materials.length` tokens holds.

    Words, if there are enough; else pairs of words.
    """
    for draw, supply in ((_draw_singles, len(all_words())), (draw_pairs, None)):
        some = draw(materials.random, 256)
        pieces = [piece for word in some for piece in (f" {materials.length // 8}.", f" {word}")]
        entry_tokens = materials.count(pieces) / len(some)
        needed = extra + int(materials.length / entry_tokens / repeats)
        if supply is None or needed <= supply:
            return draw(materials.random, needed)
    raise AssertionError("there are always enough pairs")


def _draw_singles(random: Random, count: int) -> list[str]:
    return random.sample(all_words(), count)


def _list_pieces(
    common: list[str], others: list[str], repeats: tuple[int, int], random: Random
) -> list[str]:
    words = common * repeats[0] + others * repeats[1]
    random.shuffle(words)
    return _numbered(words)


def _numbered(words: list[str]) -> list[str]:
    pieces = [piece for i, word in enumerate(words, 1) for piece in (f" {i}.", f" {word}")]
    return ["1.", *pieces[1:]]
