"""What a study found as one picture for the docs. Needs matplotlib, the extra `plots`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm.errors import ConfigError
from nanovllm.eval.ruler.panels import Panel, panels_of
from nanovllm.eval.ruler.report import length_text
from nanovllm.eval.ruler.summary import MARGIN, StudySummary
from nanovllm.tools.card import (
    CARD,
    DPI,
    GRID,
    NORMAL,
    PAD,
    SMALL,
    SOFT,
    TEXT,
    WIDTH,
    add_axes,
    card_style,
    draw_heading,
    new_card,
    require_matplotlib,
)
from nanovllm.tools.label_place import Box, place_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import ColorType

    _Styles = Mapping[str, tuple[str, str]]

SUFFIXES = (".png", ".svg")
"""Kinds of pictures."""

# Lengths are in pixels.
_GUTTER, _GAP, _HEAD, _TITLE, _TICKS, _FOOT = 74, 40, 196, 50, 84, 24
_LARGE, _MEDIUM = 760, 600
_RADIUS, _HALF_LINE = 8, 3
_ZERO, _BAND = "#8c96a1", "#eaf1f8"
# Colour and marker of a family.
_STYLES = (
    ("#0b5cad", "o"),
    ("#c2570c", "s"),
    ("#1a7f64", "D"),
    ("#8e3b86", "^"),
    ("#8a6d1a", "v"),
    ("#3a8fb7", "P"),
    ("#a8324a", "X"),
    ("#59636e", "h"),
)


def check_plot(path: Path) -> None:
    """Raise unless a picture of this name can be drawn.

    Raises:
        ConfigError: the name does not end in one of `SUFFIXES`.
        BackendUnavailableError: matplotlib is not installed.
    """
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"picture {path}: the name must end in {' or '.join(SUFFIXES)}")
    require_matplotlib()


def draw(study: StudySummary, path: Path) -> None:
    """Write a picture, 1800 pixels wide: a panel for each length, in it a point for each policy.

    Across is the tile density; up is the mean difference of the score to the base, over all tasks,
    with its 95% interval. The ends of the axes are alike in all panels.

    Args:
        study: at least two policies that answered a prompt in common.
        path: where to; overwritten if it exists. Its suffix tells the kind: `.png` or `.svg`.

    Raises:
        ConfigError: there is nothing to draw, or no such kind of picture.
        BackendUnavailableError: matplotlib is not installed.
    """
    check_plot(path)
    panels = panels_of(study)
    if not panels:
        raise ConfigError("nothing to draw: no two policies answered the same prompt")
    num_columns = min(2, len(panels))
    side = _LARGE if num_columns == 1 else _MEDIUM
    width = (WIDTH - 2 * PAD - num_columns * _GUTTER - (num_columns - 1) * _GAP) // num_columns
    row_height = _TITLE + side + _TICKS
    height = _HEAD + -(-len(panels) // num_columns) * row_height + _FOOT
    styles, (xlim, ylim) = _styles(panels), _limits(panels)
    with card_style():
        figure = new_card(height)
        _draw_head(figure, height, study.policies[0].label, styles)
        for i, panel in enumerate(panels):
            row, column = divmod(i, num_columns)
            left = PAD + _GUTTER + column * (width + _GAP + _GUTTER)
            axes = add_axes(figure, left, _HEAD + row * row_height + _TITLE, width, side)
            axes.set(xlim=xlim, ylim=ylim)
            _draw_panel(axes, panel, styles)
            _draw_labels(figure, axes, panel, styles)
        _save(figure, path)


def _save(figure: Figure, path: Path) -> None:
    """Write the picture, without version and date, so that the same picture is the same file."""
    unwanted = ("Software",) if path.suffix == ".png" else ("Creator", "Date")
    figure.savefig(path, format=path.suffix[1:], metadata=dict.fromkeys(unwanted))


def _styles(panels: Sequence[Panel]) -> _Styles:
    families = dict.fromkeys(point.family for panel in panels for point in panel.points)
    return dict(zip(families, cycle(_STYLES), strict=False))


def _limits(panels: Sequence[Panel]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return the ends of both axes, with room around all points and their intervals."""
    points = [point for panel in panels for point in panel.points]
    densities = [point.tile_density for point in points]
    ends = [end for point in points for end in (point.difference.low, point.difference.high)]
    return _widened(densities, 0.15, 0.01), _widened([*ends, -100 * MARGIN, 0], 0.05, 0)


def _widened(values: Sequence[float], share: float, least: float) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = max(least, share * (high - low))
    return low - room, high + room


def _draw_head(figure: Figure, height: int, base: str, styles: _Styles) -> None:
    """Write what the picture says, and what marks and colours mean."""
    more = f"mean difference to {base} over all tasks, in points"
    draw_heading(figure, 1 - 54 / height, "Score by tile density", more)
    x = float(PAD)
    for family, (color, marker) in styles.items():
        _draw_mark(figure, (x + _RADIUS) / WIDTH, 1 - 108 / height, color, marker)
        x = _write(figure, x + 2 * _RADIUS + 14, height - 108, family) + 44
    words = "filled: with guard; hollow: without; line: 95% interval"
    _write(figure, PAD, height - 156, f"{words}; shaded: at most {100 * MARGIN:g} points lost")


def _write(figure: Figure, x: float, y: float, words: str) -> float:
    """Write from `x`, `y` pixels on; return where the words end, in pixels."""
    height = figure.get_figheight() * DPI
    text = figure.text(x / WIDTH, y / height, words, fontsize=SMALL, color=SOFT, va="center")
    return float(text.get_window_extent().x1)


def _draw_mark(figure: Figure, x: float, y: float, color: str, marker: str) -> None:
    from matplotlib.lines import Line2D

    size = 2 * _RADIUS * 72 / DPI
    figure.add_artist(Line2D([x], [y], color=color, marker=marker, markersize=size))


def _draw_panel(axes: Axes, panel: Panel, styles: _Styles) -> None:
    axes.axhspan(-100 * MARGIN, 0, color=_BAND, linewidth=0, zorder=0)
    axes.yaxis.grid(True, color=GRID, linewidth=0.7, zorder=1)
    axes.axhline(0, color=_ZERO, linewidth=1, zorder=2)
    axes.set_title(f"{length_text(panel.lengths)} tokens", loc="left", fontsize=NORMAL, color=TEXT)
    axes.set_xlabel("tile density", fontsize=SMALL, color=SOFT, labelpad=4)
    for point in panel.points:
        color, marker = styles[point.family]
        difference = point.difference
        axes.vlines(point.tile_density, difference.low, difference.high, color, alpha=0.4, zorder=3)
        axes.plot(
            [point.tile_density],
            [difference.value],
            color=color,
            marker=marker,
            markersize=2 * _RADIUS * 72 / DPI,
            markerfacecolor=color if point.guarded else CARD,
            zorder=4,
        )


def _draw_labels(figure: Figure, axes: Axes, panel: Panel, styles: _Styles) -> None:
    """Write a label near each point, in its colour, and draw a thin line between the two."""
    from matplotlib.patheffects import withStroke

    height = figure.get_figheight() * DPI
    halo = [withStroke(linewidth=1.5, foreground=CARD)]
    style = {"fontsize": SMALL, "va": "bottom", "path_effects": halo, "zorder": 2}
    texts = [
        figure.text(0, 0, point.label, style, color=styles[point.family][0])
        for point in panel.points
    ]
    extents = [text.get_window_extent() for text in texts]
    places = [_pixels(axes, point.tile_density, point.difference.value) for point in panel.points]
    boxes = place_labels(
        places,
        [(extent.width, extent.height) for extent in extents],
        _obstacles(axes, panel),
        Box(*axes.bbox.extents),
    )
    for text, box, place in zip(texts, boxes, places, strict=True):
        text.set_position((box.left / WIDTH, box.bottom / height))
        _draw_link(figure, place, box.nearest(*place), text.get_color())


def _draw_link(
    figure: Figure, start: tuple[float, float], end: tuple[float, float], color: ColorType
) -> None:
    """Draw a thin line from the edge of a point's mark to its label, if there is room for one."""
    from matplotlib.lines import Line2D

    height = figure.get_figheight() * DPI
    (x, y), (end_x, end_y) = start, end
    distance = math.hypot(end_x - x, end_y - y)
    if distance > 3 * _RADIUS:
        share = 1.3 * _RADIUS / distance
        xs = [(x + share * (end_x - x)) / WIDTH, end_x / WIDTH]
        ys = [(y + share * (end_y - y)) / height, end_y / height]
        figure.add_artist(Line2D(xs, ys, color=color, linewidth=0.5, zorder=1))


def _obstacles(axes: Axes, panel: Panel) -> list[Box]:
    """Return what labels should not cover: the zero line, and points and their intervals."""
    left, _, right, _ = axes.bbox.extents
    _, zero = _pixels(axes, 0, 0)
    found = [Box(left, zero - _HALF_LINE, right, zero + _HALF_LINE)]
    for point in panel.points:
        x, y = _pixels(axes, point.tile_density, point.difference.value)
        _, low = _pixels(axes, 0, point.difference.low)
        _, high = _pixels(axes, 0, point.difference.high)
        found.append(Box(x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS))
        found.append(Box(x - _HALF_LINE, low, x + _HALF_LINE, high))
    return found


def _pixels(axes: Axes, x: float, y: float) -> tuple[float, float]:
    """Return where a point of the axes lies in the picture, from its lower left corner."""
    across, up = axes.transData.transform((x, y))
    return float(across), float(up)
