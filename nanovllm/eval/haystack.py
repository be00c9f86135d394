"""Endless prose that says nothing: sentences of a small grammar, free to ship."""

from collections.abc import Callable, Iterator
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
_WHERE = (
    "Behind the customs house",
    "At the far end of the pier",
    "Two streets from the station",
    "In the attic of the old school",
    "Under the railway arches",
    "On the slope above the vineyards",
    "Beside the weir",
    "In the reading room",
    "Near the ruined brickworks",
    "Along the towpath",
    "In the shade of the plane trees",
    "On the north side of the square",
    "Where the two roads meet",
    "Across the ford",
)
_SCENE = (
    "the air smelled of tar and oranges",
    "nothing had changed for a generation",
    "somebody had left a chair in the grass",
    "the walls were still warm from the day",
    "dogs were asleep in a row",
    "a brass band was tuning up",
    "the paint came off in long curls",
    "the windows were lit until midnight",
    "rain had filled the ruts",
    "swallows went in and out of a broken pane",
    "one could hear the looms",
    "a handcart stood loaded with slates",
    "the lamps were being trimmed",
    "children had chalked a game on the stones",
)
_CLAIM = (
    "a place is best known by its back doors",
    "most plans are lists of what one fears",
    "patience is only attention that has grown older",
    "good tools make quiet workshops",
    "people describe the weather when they mean each other",
    "a map tells more about its maker than about the land",
    "nobody learns a craft from its masterpieces",
    "habits outlive the reasons for them",
    "the shortest way is seldom the one that is remembered",
    "what is repaired twice is kept for ever",
    "a town forgets its floods sooner than its fires",
    "silence costs less than advice",
    "whoever writes things down argues less",
    "small debts make long friendships",
    "every harvest looks certain from the train",
    "the first answer is mostly an echo of the question",
)
_DOUBT = (
    "I have often thought that",
    "My grandmother used to say that",
    "It took me years to see that",
    "The pamphlet claims, rightly or not, that",
    "You will hear it said in every inn that",
    "There is some truth in the saying that",
    "Against all evidence he held that",
    "It would be too simple to conclude that",
    "Nothing in the parish records denies that",
    "Perhaps it is only a way of speaking, but",
)
_SAID = (
    "It will not last",
    "That is none of our business",
    "You should have seen it in the spring",
    "We were promised a bridge",
    "Nobody asked the miller",
    "I would do the same again",
    "There was more salt in it before",
    "Leave the gate as you found it",
    "They always come on foot",
    "It was cheaper to keep the old one",
    "Ask me again after the harvest",
    "The clock is right and the bells are wrong",
)
_HOW = (
    "without looking up",
    "and shut the ledger",
    "in the tone of somebody reading a label",
    "to no one in particular",
    "and laughed for the first time that week",
    "while counting the change",
    "as if it were a matter of arithmetic",
    "and went on with the peeling",
    "through the half-open door",
    "after a long look at the sky",
)
_FORMS: tuple[Callable[[Random], str], ...] = (
    lambda r: f"{r.choice(_WHO)} {r.choice(_DID)} {r.choice(_WHEN)}.",
    lambda r: f"{r.choice(_WHERE)} {r.choice(_SCENE)}.",
    lambda r: f"{r.choice(_DOUBT)} {r.choice(_CLAIM)}.",
    lambda r: f"“{r.choice(_SAID)},” said {_lower(r.choice(_WHO))} {r.choice(_HOW)}.",
    lambda r: (
        f"{r.choice(_WHERE)} {r.choice(_SCENE)}, and {_lower(r.choice(_WHO))} {r.choice(_DID)}."
    ),
    lambda r: f"{r.choice(_WHO)} {r.choice(_DID)}; {r.choice(_CLAIM)}.",
)

NOISE = (
    "The kettle is on.",
    "The bread is fresh.",
    "The road is long and dry.",
    "Off we walk.",
    "Home again before dark.",
)
"""Sentences for text that repeats itself."""


class Prose:
    """Essay-like prose in paragraphs, the same for the same seed; it holds no digits.

    Args:
        seed: chooses the text.
    """

    # An excerpt begins somewhere in the first sentences, so that samples seldom begin alike.
    _NUM_BEGINNINGS = 4096

    def __init__(self, seed: int) -> None:
        self._random = Random(f"prose/{seed}")
        self._units: list[str] = []

    def excerpt(self, random: Random, count: int) -> list[str]:
        """Return `count` sentences in a row from a place that `random` chooses.

        Each begins with the space, or the empty line of a paragraph, that divides it from the one
        before.
        """
        start = random.randrange(self._NUM_BEGINNINGS)
        while len(self._units) < start + count:
            gap = "\n\n" if self._random.random() < 1 / 8 else " "
            self._units.append(gap + self._random.choice(_FORMS)(self._random))
        return self._units[start : start + count]


def sentences(seed: int) -> Iterator[str]:
    """Yield sentences without end, the same for the same seed; they hold no digits."""
    random = Random(seed)
    while True:
        parts = (random.choice(_WHO), random.choice(_DID), random.choice(_WHEN))
        yield f"{parts[0]} {parts[1]} {parts[2]}. "


def _lower(name: str) -> str:
    """Return the name of a person as it stands within a sentence."""
    return name[0].lower() + name[1:]
