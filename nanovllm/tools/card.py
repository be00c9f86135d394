"""The card that pictures for the docs are drawn on: opaque, so that it reads alike on any page.

Needs matplotlib, the extra `plots`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from nanovllm.errors import BackendUnavailableError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 1800
"""Pixels of a picture, twice what a page shows, so that it is sharp on dense screens."""
DPI = 200
PAD = 52
"""Pixels between the card's edge and what stands on it."""
CARD, TEXT, SOFT, GRID = "#ffffff", "#1f2328", "#59636e", "#e6eaef"
"""Colours of the card, of text, of less important text, and of lines behind a chart."""
BIG, NORMAL, SMALL = 9.5, 8.5, 7.5
"""Sizes of text, in points."""

_EDGE = "#d1d9e0"


def require_matplotlib() -> None:
    """Raise `BackendUnavailableError`, which names the extra, if there is no matplotlib."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BackendUnavailableError(
            "drawing needs matplotlib: pip install 'nanovllm[plots]'"
        ) from error


def card_style() -> AbstractContextManager[None]:
    """Return a context for drawing and saving in which the same picture is the same file."""
    from matplotlib import rc_context

    return rc_context({"font.family": "DejaVu Sans", "svg.hashsalt": "nanovllm"})


def new_card(height: int) -> Figure:
    """Return a figure of `WIDTH` by `height` pixels that holds an empty card."""
    from matplotlib.figure import Figure
    from matplotlib.patches import FancyBboxPatch
    from matplotlib.transforms import Affine2D

    figure = Figure(figsize=(WIDTH / DPI, height / DPI), dpi=DPI, facecolor="none")
    card = FancyBboxPatch(
        (2, 2),
        WIDTH - 4,
        height - 4,
        boxstyle="round,pad=0,rounding_size=16",
        facecolor=CARD,
        edgecolor=_EDGE,
        linewidth=2 * 72 / DPI,
        # In pixels of `DPI`, whatever a format takes for one.
        transform=Affine2D().scale(1 / DPI) + figure.dpi_scale_trans,
        zorder=-1,
    )
    figure.add_artist(card)
    return figure


def add_axes(figure: Figure, left: int, top: int, width: int, height: int) -> Axes:
    """Return plain axes whose upper left corner is `left`, `top` pixels from the picture's."""
    total = figure.get_figheight() * DPI
    bottom = total - top - height
    axes = figure.add_axes((left / WIDTH, bottom / total, width / WIDTH, height / total))
    axes.tick_params(length=0, labelsize=SMALL, labelcolor=SOFT, pad=5)
    axes.spines[:].set_visible(False)
    axes.set_facecolor("none")
    return axes


def draw_heading(figure: Figure, y: float, title: str, more: str) -> None:
    """Write a bold title at the left and more behind it, at `y` of the figure's height."""
    style = {"fontsize": BIG, "fontweight": "bold", "color": TEXT, "va": "center"}
    end = figure.text(PAD / WIDTH, y, title, style).get_window_extent().x1
    figure.text((end + 28) / WIDTH, y, more, fontsize=NORMAL, color=SOFT, va="center")
