"""The picture of grids: colours and figures stand at their length and depth, under their policy."""

import struct
import sys
from itertools import pairwise, product

import numpy as np
import pytest

from nanovllm import BackendUnavailableError, ConfigError
from nanovllm.eval.heat_map import FOUND, MISSED, NOT_RUN, check_picture, draw
from nanovllm.eval.needle_grid import NeedleAnswer
from nanovllm.eval.needle_summary import summarise

LENGTHS, DEPTHS = [1024, 1500, 4096], [0.0, 0.5]
PLACES = list(product(LENGTHS, DEPTHS))
SPARSE = "XATTN_BSA:estimator=row,guard=0.4,min_len=0,stride=16,threshold=0.9"
HEAD = 96  # pixels at the top, with the colour bar


def answers(policy="FULL", num_found=(), *, skipped=(), num_repeats=4, places=PLACES):
    """Return answers of which all passed, but at the places in `num_found` only so many."""
    found = dict(num_found)
    return [
        NeedleAnswer(
            policy=policy,
            length=length,
            depth=depth,
            repeat=repeat,
            value="1234567",
            answer="",
            passed=repeat < found.get((length, depth), num_repeats),
            ttft_ms=1.0,
            tile_density=1.0 if policy == "FULL" else 0.43,
        )
        for length, depth in places
        if (length, depth) not in skipped
        for repeat in range(num_repeats)
    ]


@pytest.fixture
def picture(tmp_path):
    """Return a function that draws answers and returns the pixels, `[height, width, 4]`."""
    image = pytest.importorskip("matplotlib.image")

    def pixels(*groups):
        path = tmp_path / "map.png"
        draw(summarise([answer for group in groups for answer in group]), path)
        return image.imread(path)

    return pixels


@pytest.fixture
def figure(tmp_path, monkeypatch):
    """Return a function that draws answers and returns the figure instead of writing it."""
    module = pytest.importorskip("matplotlib.figure")
    drawn = []
    monkeypatch.setattr(module.Figure, "savefig", lambda self, *args, **kwargs: drawn.append(self))

    def make(*groups):
        draw(summarise([answer for group in groups for answer in group]), tmp_path / "map.png")
        return drawn[-1]

    return make


def is_color(pixels, color):
    """Return which pixels below the head have a colour, `[height, width]`."""
    wanted = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    mask = np.abs(pixels[..., :3] - wanted).max(-1) < 0.5 / 255
    mask[:HEAD] = False
    return mask


def middle(mask):
    """Return x and y of the middle of the one block that a colour fills."""
    y, x = np.nonzero(mask)
    area = (np.ptp(x) + 1) * (np.ptp(y) + 1)
    assert len(x) > 0.9 * area, "not one block"
    return x.mean(), y.mean()


def panels(figure):
    """Return the axes that hold cells."""
    return [axes for axes in figure.axes if axes.get_xlabel()]


def written(axes, columns, rows):
    """Return the figures in the cells, by the labels that they stand above and beside."""

    def nearest(position, ticks, labels):
        return labels[min(range(len(ticks)), key=lambda i: abs(ticks[i] - position))].get_text()

    return {
        (
            nearest(text.get_position()[0], axes.get_xticks(), columns),
            nearest(text.get_position()[1], axes.get_yticks(), rows),
        ): text.get_text()
        for text in axes.texts
    }


# Cells


def test_a_missed_needle_is_drawn_at_its_length_and_depth(picture):
    """One cell at a time: longer is to the right, deeper is below, and sparse is beside dense."""
    seen = {
        (panel, length, depth): middle(
            is_color(
                picture(
                    answers("FULL", {(length, depth): 0} if panel == 0 else {}),
                    answers(SPARSE, {(length, depth): 0} if panel == 1 else {}),
                ),
                MISSED,
            )
        )
        for panel in (0, 1)
        for length, depth in PLACES
    }
    for panel in (0, 1):
        for depth in DEPTHS:
            steps = [
                seen[panel, b, depth][0] - seen[panel, a, depth][0] for a, b in pairwise(LENGTHS)
            ]
            assert steps == pytest.approx([steps[0]] * len(steps), abs=1)
            assert steps[0] > 100
        for length in LENGTHS:
            (x, y), (x_below, y_below) = (seen[panel, length, depth] for depth in DEPTHS)
            assert x == pytest.approx(x_below, abs=1)
            assert y_below - y > 40
    for length, depth in PLACES:
        assert seen[1, length, depth][0] - seen[0, length, depth][0] > 700
        assert seen[1, length, depth][1] == pytest.approx(seen[0, length, depth][1], abs=1)


def test_figures_stand_in_the_cells_where_one_was_missed(figure):
    first = {(1024, 0.5): 0, (4096, 0.0): 3}
    second = {(1500, 0.0): 1, (4096, 0.5): 2}
    left, right = panels(figure(answers("FULL", first), answers(SPARSE, second)))
    labels = left.get_xticklabels(), left.get_yticklabels()
    assert [label.get_text() for label in labels[0]] == ["1K", "1,500", "4K"]
    assert [label.get_text() for label in labels[1]] == ["0%", "50%"]
    assert written(left, *labels) == {("1K", "50%"): "0%", ("4K", "0%"): "75%"}
    assert written(right, *labels) == {("1,500", "0%"): "25%", ("4K", "50%"): "50%"}
    assert left.get_position().y0 == right.get_position().y0
    assert left.get_position().x1 < right.get_position().x0


def test_colours_go_from_missed_to_found(picture):
    pixels = picture(answers("FULL", dict.fromkeys(PLACES, 0)))
    assert is_color(pixels, MISSED).any()
    cell = np.argwhere(is_color(pixels, MISSED))[0] + [12, 12]
    shades = []
    for num_found in range(5):
        pixels = picture(answers("FULL", dict.fromkeys(PLACES, num_found)))
        shades.append(pixels[tuple(cell)][:3])
    expected = [[int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)] for color in (MISSED, FOUND)]
    assert shades[0] == pytest.approx(expected[0], abs=1 / 255)
    assert shades[4] == pytest.approx(expected[1], abs=1 / 255)
    # Orange loses its red and blue comes up, which all kinds of sight tell apart.
    assert all(b[0] - b[2] < a[0] - a[2] for a, b in pairwise(shades))


def test_cells_that_were_not_run_are_empty(picture):
    place = (1500, 0.5)
    dense = answers("FULL", {place: 0})
    where = middle(is_color(picture(dense, answers(SPARSE)), MISSED))
    empty = is_color(picture(answers("FULL", skipped=[place]), answers(SPARSE)), NOT_RUN)
    assert middle(empty) == pytest.approx(where, abs=1)


def test_the_legend_has_an_entry_for_what_was_not_run_only_if_there_is(figure):
    def words(*groups):
        return [text.get_text() for text in figure(*groups).texts]

    assert "not run" not in words(answers(), answers(SPARSE))
    assert "not run" in words(answers(), answers(SPARSE, skipped=[PLACES[0]]))


# Panels


def test_titles_say_policy_share_and_count(figure):
    drawn = figure(answers(), answers(SPARSE, {(1024, 0.0): 0}, num_repeats=300))
    words = [text.get_text() for text in drawn.texts]
    start = words.index("FULL")
    assert words[start : start + 3] == ["FULL", "100% found", "n = 24, 100% of tiles computed"]
    assert words[start + 3 : start + 5] == ["XATTN_BSA", "83% found"]
    assert words[-1] == "n = 1,800, 43% of tiles computed"
    options = words[start + 5 : -1]
    assert " ".join(options) == SPARSE.partition(":")[2].replace(",", ", ")


def test_titles_do_not_overlap(figure):
    drawn = figure(answers(), answers(SPARSE), answers("STREAMING"))
    boxes = [text.get_window_extent() for text in drawn.texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])
    assert all(0 < box.x0 < box.x1 < 1800 for box in boxes)


def test_panels_of_many_lengths_stand_below_each_other(figure):
    places = [(1000 * i, 0.5) for i in range(1, 25)]
    one, two = panels(figure(answers(places=places), answers(SPARSE, places=places)))
    assert one.get_position().x0 == two.get_position().x0
    assert one.get_position().y0 > two.get_position().y1
    labels = [label.get_window_extent() for label in one.get_xticklabels()]
    assert all(a.x1 < b.x0 for a, b in pairwise(labels))


def test_panels_share_their_axes(figure):
    left, right = panels(figure(answers(places=PLACES[:2]), answers(SPARSE, places=PLACES[2:])))
    for axes in (left, right):
        assert [label.get_text() for label in axes.get_xticklabels()] == ["1K", "1,500", "4K"]
    assert (len(left.patches), len(right.patches)) == (6, 6)


# Files


def test_picture_is_a_png_of_its_size_and_the_same_again(tmp_path, picture):
    pixels = picture(answers(), answers(SPARSE))
    first = (tmp_path / "map.png").read_bytes()
    width, height = struct.unpack(">II", first[16:24])
    assert pixels.shape == (height, width, 4)
    assert width == 1800
    assert pixels[0, 0, 3] == 0, "what is outside the card's corners is transparent"
    assert pixels[20:-20, 20:-20, 3].min() == 1, "the card is opaque"
    picture(answers(), answers(SPARSE))
    assert (tmp_path / "map.png").read_bytes() == first


def test_other_pictures_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"map\.svg: the name must end in \.png"):
        check_picture(tmp_path / "map.svg")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendUnavailableError, match=r"nanovllm\[plots\]"):
        draw(summarise(answers()), tmp_path / "map.png")


def test_nothing_to_draw_is_refused(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw([], tmp_path / "map.png")
