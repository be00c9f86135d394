"""Draws which tiles of the attention mask were kept. Needs matplotlib, the extra `plots`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from nanovllm.ops.block_sparse import TILE, causal_tiles
from nanovllm.tools.card import (
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

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_COLUMNS = 5
"""Panels that fit beside each other with their titles."""

# Lengths are in pixels.
_GUTTER, _MIN_GAP, _MAX_SIDE = 76, 28, 600
_HEAD, _TITLE, _ROW_GAP, _TICKS = 92, 42, 30, 78
_CHART_HEAD, _CHART = 88, 220
_FUTURE, _SKIPPED, _KEPT = "#f6f8fa", "#d4dde8", "#0b5cad"
_SHOWN_BAR, _OTHER_BAR, _SPREAD, _NEEDLE = "#5b9bdb", "#c5d9ef", "#2a333d", "#bc4c00"


@dataclass(frozen=True, slots=True)
class Selection:
    """The tiles that one prefill kept."""

    label: str
    """What was run, in a few words."""
    num_tokens: int
    tiles: dict[tuple[int, int], torch.Tensor]
    """By layer and query head: which tiles were kept, bool `[num_tiles, num_tiles]` on the host,
    query tiles by key tiles."""
    density_by_head: list[list[float]]
    """Tile density of each head of each layer, in [0, 1]."""
    needle: range | None = None
    """Tokens of the fact that the prompt asks for, if it is known where that stands."""

    @property
    def density(self) -> float:
        """Tile density of the whole prefill."""
        return float(np.mean(self.density_by_head))


def draw(selection: Selection, path: str | Path) -> None:
    """Write a PNG: a panel for each layer (column) and head (row), and the density by layer.

    Args:
        selection: holds every combination of the layers and heads that it holds any tiles of.
        path: where to; overwritten if it exists.

    Raises:
        BackendUnavailableError: matplotlib is not installed.
    """
    require_matplotlib()
    layers = list(dict.fromkeys(layer for layer, _ in selection.tiles))
    heads = list(dict.fromkeys(head for _, head in selection.tiles))
    num_tiles = -(-selection.num_tokens // TILE)
    side, gap = _panel_size(len(layers), num_tiles)
    height = _HEAD + len(heads) * (_TITLE + side + _ROW_GAP) - _ROW_GAP + _TICKS
    height += _CHART_HEAD + _CHART + _TICKS
    with card_style():
        figure = new_card(height)
        _draw_head(figure, height, selection)
        for row, head in enumerate(heads):
            top = _HEAD + row * (_TITLE + side + _ROW_GAP) + _TITLE
            for column, layer in enumerate(layers):
                left = PAD + _GUTTER + column * (side + gap)
                axes = add_axes(figure, left, top, side, side)
                _draw_panel(axes, selection, layer, head)
                _label_axes(axes, selection, last_row=head == heads[-1], first=column == 0)
        top = height - _TICKS - _CHART
        axes = add_axes(figure, PAD + _GUTTER, top, WIDTH - 2 * PAD - _GUTTER, _CHART)
        _draw_densities(axes, selection.density_by_head, layers)
        y = 1 - (top - _CHART_HEAD // 2) / height
        draw_heading(figure, y, "By layer", "bar: mean of the heads; line: lowest to highest head")
        # Without the version of matplotlib in it, the same picture is the same file.
        figure.savefig(path, format="png", metadata={"Software": None})


def _panel_size(num_columns: int, num_tiles: int) -> tuple[int, int]:
    """Return a panel's side and the gap between two; a tile is whole pixels if it is one or more.

    What the last column leaves goes into the gaps, so that panels end where the chart below does.
    """
    room = WIDTH - 2 * PAD - _GUTTER
    side = min(_MAX_SIDE, (room - (num_columns - 1) * _MIN_GAP) // num_columns)
    if side >= num_tiles:
        side -= side % num_tiles
    gap = (room - num_columns * side) // max(1, num_columns - 1)
    return side, min(gap, 3 * _MIN_GAP)


def _draw_head(figure: Figure, height: int, selection: Selection) -> None:
    """Write what the picture says, and what the colours mean."""
    y = 1 - 54 / height
    draw_heading(figure, y, f"{selection.density:.0%} of the causal tiles kept", selection.label)
    legend = [("s", _KEPT, "kept"), ("s", _SKIPPED, "skipped")]
    if selection.needle is not None:
        legend.append(("^", _NEEDLE, "needle"))
    right = float(WIDTH - PAD)
    for marker, color, word in reversed(legend):
        text = figure.text(
            right / WIDTH, y, word, fontsize=NORMAL, color=SOFT, va="center", ha="right"
        )
        right = text.get_window_extent().x0 - 22
        _mark(figure, right / WIDTH, y, marker, color)
        right -= 44


def _mark(figure: Figure, x: float, y: float, marker: str, color: str) -> None:
    from matplotlib.lines import Line2D

    size = 6.5 if marker == "s" else 6
    figure.add_artist(
        Line2D([x], [y], marker=marker, markersize=size, color=color, markeredgewidth=0)
    )


def _draw_panel(axes: Axes, selection: Selection, layer: int, head: int) -> None:
    from matplotlib.colors import to_rgb

    tiles = selection.tiles[layer, head]
    visible = causal_tiles(selection.num_tokens, selection.num_tokens, 0, 0, tiles.device)
    # 0 what no query sees, 1 skipped, 2 kept. [num_tiles, num_tiles]
    kind = (visible.int() + (tiles & visible).int()).numpy()
    palette = np.array([to_rgb(color) for color in (_FUTURE, _SKIPPED, _KEPT)])
    end = len(tiles) * TILE
    # Several tiles in a pixel are averaged; one over several pixels stays sharp.
    axes.imshow(palette[kind], extent=(0, end, end, 0), aspect="auto", interpolation_stage="rgba")
    above = axes.transAxes.transform((0, 1))[1] + 12
    y = axes.transAxes.inverted().transform((0, above))[1]
    for x, text, align, color, weight in (
        (0, f"layer {layer}, head {head}", "left", TEXT, "normal"),
        (1, f"{selection.density_by_head[layer][head]:.0%}", "right", _KEPT, "bold"),
    ):
        axes.text(
            x,
            y,
            text,
            ha=align,
            color=color,
            fontsize=NORMAL,
            fontweight=weight,
            transform=axes.transAxes,
        )


def _label_axes(axes: Axes, selection: Selection, *, last_row: bool, first: bool) -> None:
    ends = [0, selection.num_tokens]
    labels = [_tokens(end) for end in ends]
    axes.set_xticks(ends, labels if last_row else [])
    axes.set_yticks(ends, labels if first else [])
    left, right = axes.get_xticklabels()
    left.set_horizontalalignment("left")
    right.set_horizontalalignment("right")
    top, bottom = axes.get_yticklabels()
    top.set_verticalalignment("top")
    bottom.set_verticalalignment("bottom")
    if first:
        axes.set_ylabel("query token", fontsize=SMALL, color=SOFT, labelpad=-8)
    if last_row:
        axes.set_xlabel("key token", fontsize=SMALL, color=SOFT, labelpad=-3)
    if selection.needle is not None:
        # Where the needle's tile column is, just below the panel.
        middle = (selection.needle[0] // TILE + selection.needle[-1] // TILE + 1) / 2 * TILE
        axes.plot(
            [middle],
            [-0.028],
            marker="^",
            markersize=5,
            color=_NEEDLE,
            markeredgewidth=0,
            transform=axes.get_xaxis_transform(),
            clip_on=False,
        )


def _tokens(count: int) -> str:
    """Return a position as a few characters; long ones are rounded."""
    if count >= 10_000 or (count and count % 1024 == 0):
        return f"{count / 1024:.0f}K"
    return f"{count:,}"


def _draw_densities(
    axes: Axes, density_by_head: Sequence[Sequence[float]], shown: Sequence[int]
) -> None:
    """Draw a bar for each layer, its heads' mean, and a line from the lowest to the highest."""
    num_layers = len(density_by_head)
    means = [float(np.mean(heads)) for heads in density_by_head]
    colors = [_SHOWN_BAR if layer in shown else _OTHER_BAR for layer in range(num_layers)]
    # Two thirds of the room, but no blocks where layers are few.
    width = min(0.66, 0.04 * num_layers)
    axes.bar(range(num_layers), means, width=width, color=colors, zorder=2)
    axes.vlines(
        range(num_layers),
        [min(heads) for heads in density_by_head],
        [max(heads) for heads in density_by_head],
        color=_SPREAD,
        linewidth=1.1,
        zorder=3,
    )
    axes.set_xlim(-0.5, num_layers - 0.5)
    axes.set_ylim(0, 1)
    step = -(-num_layers // 40)
    axes.set_xticks(range(0, num_layers, step))
    axes.set_yticks([0, 0.5, 1], ["0", "50%", "100%"])
    axes.yaxis.grid(True, color=GRID, linewidth=0.7, zorder=0)
    axes.set_xlabel("layer", fontsize=SMALL, color=SOFT, labelpad=3)
