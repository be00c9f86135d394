"""What grids of needles found as one picture. Needs matplotlib, the extra `plots`."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanovllm.errors import ConfigError
from nanovllm.eval.needle_grid import depth_text
from nanovllm.eval.needle_summary import GridSummary, Tally
from nanovllm.tools.card import (
    CARD,
    DPI,
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

MISSED, FOUND, NOT_RUN = "#c2570c", "#0b5cad", "#f0f3f6"
"""Colours of a cell in which no needle, every needle, or no prompt was."""

# Lengths are in pixels.
_GUTTER, _GAP, _HEAD, _TITLE, _LINE, _TICKS, _FOOT = 118, 56, 96, 62, 34, 84, 22
_MIN_CELL_WIDTH_OF_TWO, _MIN_CELL_HEIGHT, _MAX_CELL_HEIGHT = 60, 46, 104
_SPACE, _ROUNDING, _BAR = 6, 8, 200
# About what a character of a title, and of the label of a length, takes across.
_CHARACTER, _LENGTH_LABEL = 12.5, 84
_HALF = "#f3eee4"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where the panels are: all of one size, with the same lengths and depths."""

    lengths: Sequence[int]
    depths: Sequence[float]
    num_panels: int
    num_columns: int
    num_title_lines: int

    @property
    def width(self) -> int:
        """Of the cells of a panel."""
        gaps = (self.num_columns - 1) * _GAP
        return (WIDTH - 2 * PAD - _GUTTER - gaps) // self.num_columns

    @property
    def cell_width(self) -> float:
        return self.width / len(self.lengths)

    @property
    def cell_height(self) -> int:
        return int(min(max(0.6 * self.cell_width, _MIN_CELL_HEIGHT), _MAX_CELL_HEIGHT))

    @property
    def title_height(self) -> int:
        return _TITLE + _LINE * self.num_title_lines

    @property
    def row_height(self) -> int:
        return self.title_height + self.cell_height * len(self.depths) + _TICKS

    @property
    def height(self) -> int:
        """Of the picture."""
        return _HEAD + -(-self.num_panels // self.num_columns) * self.row_height + _FOOT


def check_picture(path: Path) -> None:
    """Raise unless a picture of this name can be drawn.

    Raises:
        ConfigError: the name does not end in `.png`.
        BackendUnavailableError: matplotlib is not installed.
    """
    if path.suffix != ".png":
        raise ConfigError(f"picture {path}: the name must end in .png")
    require_matplotlib()


def draw(summaries: Sequence[GridSummary], path: Path) -> None:
    """Write a PNG, 1800 pixels wide: a panel for each policy, two beside each other.

    Lengths go across, depths down, the colour is the share of needles found, and a cell in which
    one was missed says how many percent were found. The panels' lengths and depths are alike: those
    that any of the policies has.

    Args:
        summaries: at least one.
        path: where to; overwritten if it exists.

    Raises:
        ConfigError: there is nothing to draw, or the name does not end in `.png`.
        BackendUnavailableError: matplotlib is not installed.
    """
    check_picture(path)
    if not summaries:
        raise ConfigError("nothing to draw: no needle was looked for")
    layout = _layout(summaries)
    with card_style():
        figure = new_card(layout.height)
        _draw_head(figure, layout, any(_has_gaps(summary, layout) for summary in summaries))
        for i, summary in enumerate(summaries):
            row, column = divmod(i, layout.num_columns)
            left = PAD + _GUTTER + column * (layout.width + _GAP)
            top = _HEAD + row * layout.row_height
            _draw_title(figure, left, top, summary, layout)
            height = layout.cell_height * len(layout.depths)
            axes = add_axes(figure, left, top + layout.title_height, layout.width, height)
            axes.set(xlim=(0, layout.width), ylim=(height, 0))
            _draw_cells(axes, summary, layout)
            _label_axes(axes, layout, first=column == 0)
        # Without the version of matplotlib in it, the same picture is the same file.
        figure.savefig(path, format="png", metadata={"Software": None})


def _layout(summaries: Sequence[GridSummary]) -> _Layout:
    lengths = sorted({length for summary in summaries for length in summary.lengths})
    depths = sorted({depth for summary in summaries for depth in summary.depths})
    layout = _Layout(lengths, depths, len(summaries), num_columns=2, num_title_lines=1)
    if len(summaries) == 1 or layout.cell_width < _MIN_CELL_WIDTH_OF_TWO:
        layout = replace(layout, num_columns=1)
    num_lines = max(len(_option_lines(summary, layout.width)) for summary in summaries)
    return replace(layout, num_title_lines=max(1, num_lines))


def _option_lines(summary: GridSummary, width: int) -> list[str]:
    """Return a policy's options in lines that leave a part of `width` pixels free."""
    options = summary.policy.partition(":")[2].replace(",", ", ")
    return textwrap.wrap(options, int(0.6 * width / _CHARACTER), break_long_words=False)


def _has_gaps(summary: GridSummary, layout: _Layout) -> bool:
    """Return whether a cell of the panel was not run."""
    return len(summary.cells) < len(layout.lengths) * len(layout.depths)


def _colors() -> Colormap:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("found", [MISSED, _HALF, FOUND])


def _draw_head(figure: Figure, layout: _Layout, has_gaps: bool) -> None:
    """Write what the picture says, and what the colours mean."""
    middle = _HEAD * 9 // 16
    y = 1 - middle / layout.height
    draw_heading(figure, y, "Needles found", "by length of the prompt and depth of the needle")

    def entry(right: int, width: int, words: str) -> tuple[Axes, int]:
        """Write words that end at `right`; return axes before them, and where those begin."""
        style = {"fontsize": NORMAL, "color": SOFT, "va": "center", "ha": "right"}
        text = figure.text(right / WIDTH, y, words, style)
        left = int(text.get_window_extent().x0) - 16 - width
        axes = add_axes(figure, left, middle - 12, width, 24)
        axes.set(xticks=[], yticks=[])
        return axes, left

    axes, left = entry(WIDTH - PAD, _BAR, "100% found")
    axes.imshow([[i / 255 for i in range(256)]], cmap=_colors(), aspect="auto")
    zero = figure.text((left - 16) / WIDTH, y, "0%", fontsize=NORMAL, color=SOFT)
    zero.set(va="center", ha="right")
    if has_gaps:
        axes, _ = entry(int(zero.get_window_extent().x0) - 56, 24, "not run")
        axes.set_facecolor(NOT_RUN)


def _draw_title(figure: Figure, left: int, top: int, summary: GridSummary, layout: _Layout) -> None:
    """Write above a panel which policy it is, and what it found and computed."""
    first, second, right = top + 22, top + 28 + _LINE, left + layout.width
    bold = {"fontsize": NORMAL, "color": TEXT, "fontweight": "bold", "va": "center"}
    soft = {"fontsize": SMALL, "color": SOFT, "va": "center"}

    def write(x: int, y: int, text: str, style: Mapping[str, Any], align: str = "left") -> None:
        figure.text(x / WIDTH, 1 - y / layout.height, text, ha=align, **style)

    write(left, first, summary.policy.partition(":")[0], bold)
    write(right, first, f"{summary.total} found", bold, "right")
    for i, line in enumerate(_option_lines(summary, layout.width)):
        write(left, second + i * _LINE, line, soft)
    count, density = summary.total.num_prompts, summary.tile_density
    write(right, second, f"n = {count:,}, {density:.0%} of tiles computed", soft, "right")


def _draw_cells(axes: Axes, summary: GridSummary, layout: _Layout) -> None:
    from matplotlib.patches import FancyBboxPatch

    colors = _colors()
    width, height = layout.cell_width - _SPACE, layout.cell_height - _SPACE
    for row, depth in enumerate(layout.depths):
        for column, length in enumerate(layout.lengths):
            tally = summary.cells.get((length, depth))
            x, y = column * layout.cell_width + _SPACE / 2, row * layout.cell_height + _SPACE / 2
            color = NOT_RUN if tally is None else colors(tally.share)
            axes.add_patch(
                FancyBboxPatch(
                    (x, y),
                    width,
                    height,
                    boxstyle=f"round,pad=0,rounding_size={_ROUNDING}",
                    facecolor=color,
                    linewidth=0,
                )
            )
            if tally is not None and tally.share < 1:
                _write_share(axes, x + width / 2, y + height / 2, tally, width)


def _write_share(axes: Axes, x: float, y: float, tally: Tally, width: float) -> None:
    axes.text(
        x,
        y,
        str(tally),
        ha="center",
        va="center_baseline",
        fontsize=min(SMALL, width / len(str(tally)) * 72 / DPI),
        color=TEXT if 0.1 < tally.share < 0.9 else CARD,
    )


def _label_axes(axes: Axes, layout: _Layout, *, first: bool) -> None:
    step = math.ceil(_LENGTH_LABEL / layout.cell_width)
    columns = range(0, len(layout.lengths), step)
    axes.set_xticks(
        [(column + 0.5) * layout.cell_width for column in columns],
        [_length_text(layout.lengths[column]) for column in columns],
    )
    axes.set_xlabel("tokens of the prompt", fontsize=SMALL, color=SOFT, labelpad=3)
    rows = [(row + 0.5) * layout.cell_height for row in range(len(layout.depths))]
    axes.set_yticks(rows, list(map(depth_text, layout.depths)) if first else [""] * len(rows))
    if first:
        axes.set_ylabel("needle depth", fontsize=SMALL, color=SOFT, labelpad=5)


def _length_text(length: int) -> str:
    return f"{length // 1024}K" if length % 1024 == 0 else f"{length:,}"
