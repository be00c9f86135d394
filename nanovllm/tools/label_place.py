"""Finds places for the labels of points, so that they cover neither each other nor what is drawn.

All lengths are in pixels, x to the right and y upwards.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

_DISTANCES = (18, 36, 60, 90)
_NUM_DIRECTIONS = 16


class Box(NamedTuple):
    """A rectangle."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: "Box") -> float:
        """Return the area that two boxes share."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(0.0, width) * max(0.0, height)

    def nearest(self, x: float, y: float) -> tuple[float, float]:
        """Return the place in the box that is nearest to another."""
        return min(max(x, self.left), self.right), min(max(y, self.bottom), self.top)


def place_labels(
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    obstacles: Sequence[Box],
    bounds: Box,
) -> list[Box]:
    """Return a box for the label of each point.

    One after the other takes, of 64 places around its point, the best for itself: the nearest that
    covers nothing, or little. So the order counts, and where points are dense labels may touch.

    Args:
        points: x and y of each.
        sizes: width and height of each point's label.
        obstacles: what labels should not cover.
        bounds: where they should stay.
    """
    taken = list(obstacles)
    for (x, y), size in zip(points, sizes, strict=True):
        places = list(_places(x, y, *size))
        costs = [_cost(box, distance, taken, bounds) for distance, box in places]
        taken.append(places[costs.index(min(costs))][1])
    return taken[len(obstacles) :]


def _places(x: float, y: float, width: float, height: float) -> Iterator[tuple[float, Box]]:
    """Yield distances from the point and places there, from its right on around it."""
    for distance in _DISTANCES:
        for i in range(_NUM_DIRECTIONS):
            angle = 2 * math.pi * i / _NUM_DIRECTIONS
            left = x - width / 2 + math.cos(angle) * (distance + width / 2)
            bottom = y - height / 2 + math.sin(angle) * (distance + height / 2)
            yield distance, Box(left, bottom, left + width, bottom + height)


def _cost(box: Box, distance: float, taken: Sequence[Box], bounds: Box) -> float:
    """Return what a place costs: a pixel of distance as much as a square pixel that it covers."""
    outside = box.overlap(box) - box.overlap(bounds)
    return distance + outside + sum(map(box.overlap, taken))
