"""Words, numbers and codes that a sample draws at random. The word lists are our own."""

from functools import cache
from pathlib import Path
from random import Random
from uuid import UUID

_DIRECTORY = Path(__file__).parent / "words"


@cache
def word_list(name: str) -> tuple[str, ...]:
    """Return the words of `adjectives`, `nouns` or `verbs`.

    No word of any list is part of another, so that none is found where it does not stand.
    """
    return tuple((_DIRECTORY / f"{name}.txt").read_text(encoding="utf-8").split())


def all_words() -> list[str]:
    """Return the words of all lists."""
    return [word for name in ("adjectives", "nouns", "verbs") for word in word_list(name)]


def draw_pairs(random: Random, count: int) -> list[str]:
    """Return different pairs of adjective and noun, such as `amber-falcon`."""
    adjectives, nouns = word_list("adjectives"), word_list("nouns")
    picks = random.sample(range(len(adjectives) * len(nouns)), count)
    return [f"{adjectives[i // len(nouns)]}-{nouns[i % len(nouns)]}" for i in picks]


def draw_numbers(random: Random, count: int, num_digits: int = 7) -> list[str]:
    """Return different numbers of `num_digits` digits."""
    least = 10 ** (num_digits - 1)
    return [str(number) for number in random.sample(range(least, 10 * least), count)]


def draw_uuids(random: Random, count: int) -> list[str]:
    """Return random UUIDs."""
    return [str(UUID(int=random.getrandbits(128), version=4)) for _ in range(count)]
