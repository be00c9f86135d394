"""Endless prose that says nothing: sentences of a small grammar, free to ship."""

from collections.abc import Iterator
from random import Random

_WHO = (
    "The harbour master",
    "An old clockmaker",
    "The night train's conductor",
    "My neighbour's youngest daughter",
    "A retired geologist",
    "The baker on the corner",
    "The second violinist",
    "A tired ferryman",
    "The village schoolteacher",
    "Our former landlord",
    "The botanist from the north",
    "A travelling piano tuner",
    "The librarian with the grey scarf",
    "One of the lighthouse keepers",
    "The surveyor's apprentice",
    "A woman selling chestnuts",
)
_DID = (
    "repaired the green shutters",
    "counted the geese above the reservoir",
    "wrote a long letter and never sent it",
    "argued about the price of copper",
    "planted two rows of late beans",
    "forgot an umbrella under the bench",
    "painted the railing a paler blue",
    "drew a map of the footpaths",
    "listened to the rain on the tin roof",
    "carried a basket of pears up the hill",
    "waited for the fog to lift",
    "polished the brass handles once more",
    "told the story of the frozen canal",
    "borrowed a ladder and a length of rope",
    "measured the shadow of the old chimney",
    "fed the sparrows near the fountain",
)
_WHEN = (
    "before the market opened",
    "while the kettle was warming",
    "on the first dry day of spring",
    "after the last guest had left",
    "in the quiet hour before supper",
    "as the bells of the chapel rang",
    "during the long strike at the mill",
    "when the river was at its lowest",
    "because nobody else would do it",
    "without a word to the others",
    "and nobody thought it strange",
    "although the wind had turned",
    "just as in the years before",
    "for no reason that I could see",
)


def sentences(seed: int) -> Iterator[str]:
    """Yield sentences without end, the same for the same seed; they hold no digits."""
    random = Random(seed)
    while True:
        parts = (random.choice(_WHO), random.choice(_DID), random.choice(_WHEN))
        yield f"{parts[0]} {parts[1]} {parts[2]}. "
