"""Labels keep clear of each other and of what is drawn, as far as there is room."""

import pytest

from nanovllm.tools.label_place import Box, place_labels

BOUNDS = Box(0, 0, 1000, 500)
SIZE = (60, 20)


def test_boxes_share_area():
    box = Box(0, 0, 10, 10)
    assert box.overlap(Box(5, 8, 20, 20)) == 10
    assert box.overlap(Box(10, 0, 20, 10)) == 0
    assert box.overlap(Box(20, 20, 30, 30)) == 0


@pytest.mark.parametrize(
    ("place", "nearest"), [((-5, 5), (0, 5)), ((5, 50), (5, 10)), ((3, 4), (3, 4))]
)
def test_nearest_place_of_a_box(place, nearest):
    assert Box(0, 0, 10, 10).nearest(*place) == nearest


def test_a_lone_label_is_to_the_right():
    (box,) = place_labels([(500, 250)], [SIZE], [], BOUNDS)
    assert box == pytest.approx((518, 240, 578, 260))


def test_labels_stay_within_bounds():
    corners = [(0, 0), (1000, 0), (0, 500), (1000, 500)]
    for box in place_labels(corners, [SIZE] * 4, [], BOUNDS):
        assert box.overlap(BOUNDS) == pytest.approx(60 * 20)


def test_labels_avoid_obstacles_and_each_other():
    points = [(500 + 25 * i, 250) for i in range(6)]
    obstacles = [Box(x - 8, y - 8, x + 8, y + 8) for x, y in points]
    boxes = place_labels(points, [SIZE] * 6, obstacles, BOUNDS)
    everything = [*obstacles, *boxes]
    for i, box in enumerate(everything):
        assert sum(map(box.overlap, everything[i + 1 :])) == 0


def test_a_full_picture_still_has_a_place_for_each():
    boxes = place_labels([(500, 250)] * 100, [SIZE] * 100, [BOUNDS], BOUNDS)
    assert len(boxes) == 100
