"""The picture of a study: its points, and that it is drawn."""

import struct
import sys
from xml.etree import ElementTree

import pytest
from ruler_answers import NOTHING_SHARED, SPARSE, full, sparse

from nanovllm import BackendUnavailableError, ConfigError
from nanovllm.eval.ruler.panels import panels_of
from nanovllm.eval.ruler.plot import draw
from nanovllm.eval.ruler.statistics import mean_difference
from nanovllm.eval.ruler.summary import summarise


def many():
    """A study of each way to write a policy, at two lengths."""
    rows = "XATTN_BSA:estimator=row,stride=16,threshold=0.8"
    labels = [SPARSE, f"{rows},guard=1", "XATTN_BSA:estimator=group,dense_layers=1", "STREAMING"]
    answers = {"FULL": full([1] * 8) + full([1] * 8, length=2048)}
    for i, label in enumerate(labels, 1):
        scores, policy = [0] * i + [1] * (8 - i), {"policy": label, "tile_density": i / 8}
        answers[label] = sparse(scores, **policy) + sparse([1] * 8, length=2048, **policy)
    return summarise(answers)


def test_points_lie_at_density_and_difference():
    first, second = panels_of(many())
    assert (first.lengths, second.lengths) == ((1024, 1024), (2048, 2048))
    assert [(point.family, point.label, point.guarded) for point in first.points] == [
        ("row, stride 16", "0.9, guard 0.5", True),
        ("row, stride 16", "0.8", False),
        ("group, stride 8", "0.95, dense_layers 1", False),
        ("STREAMING", "STREAMING", False),
    ]
    assert [point.tile_density for point in first.points] == [1 / 8, 2 / 8, 3 / 8, 4 / 8]
    assert [point.difference.value for point in first.points] == [-12.5, -25, -37.5, -50]
    assert [point.difference.value for point in second.points] == [0] * 4
    interval = mean_difference([-1] + [0] * 7)
    assert first.points[0].difference.low == pytest.approx(100 * interval.low)
    assert first.points[0].difference.high == pytest.approx(100 * interval.high)


def test_picture_is_a_png_of_its_size_and_the_same_again(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    one, two = tmp_path / "one.png", tmp_path / "two.png"
    draw(many(), one)
    draw(many(), two)
    assert one.read_bytes() == two.read_bytes()
    width, height = struct.unpack(">II", one.read_bytes()[16:24])
    pixels = image.imread(one)
    assert pixels.shape == (height, width, 4)
    assert width == 1800
    assert pixels[0, 0, 3] == 0, "what is outside the card's corners is transparent"
    assert pixels[20:-20, 20:-20, 3].min() == 1, "the card is opaque"


def test_picture_grows_with_its_panels(tmp_path):
    pytest.importorskip("matplotlib")

    def height(num_lengths):
        lengths = [1024 * (i + 1) for i in range(num_lengths)]
        study = summarise(
            {
                "FULL": [answer for length in lengths for answer in full([1], length=length)],
                SPARSE: [answer for length in lengths for answer in sparse([1], length=length)],
            }
        )
        draw(study, tmp_path / "plot.png")
        return struct.unpack(">I", (tmp_path / "plot.png").read_bytes()[20:24])[0]

    assert height(2) < height(1) < height(3) == height(4)


def test_picture_is_an_svg_of_the_same_shape(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.svg"
    draw(many(), path)
    left, top, width, _ = map(float, ElementTree.parse(path).getroot().get("viewBox").split())
    assert (left, top, width) == (0, 0, 1800 * 72 / 200)
    first = path.read_bytes()
    draw(many(), path)
    assert path.read_bytes() == first


def test_other_pictures_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"plot\.pdf: the name must end in \.png or \.svg"):
        draw(many(), tmp_path / "plot.pdf")


def test_without_matplotlib_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendUnavailableError, match=r"nanovllm\[plots\]"):
        draw(many(), tmp_path / "plot.png")


@pytest.mark.parametrize("answers", NOTHING_SHARED)
def test_nothing_to_draw_is_refused(answers, tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw(summarise(answers), tmp_path / "plot.png")
