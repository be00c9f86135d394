"""What one policy kept, gathered by layer and query head, and the figures of it."""

from dataclasses import dataclass
from typing import Self

import torch

from nanovllm.eval.recall.dense_tile import TileRecall
from nanovllm.metrics.density import DensityStats

LOW = 0.8
"""Rows that keep less than this share of their mass are counted."""
LOWEST_PART = 0.01
"""The part of the rows whose mean tells how bad it gets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """What a policy kept of the attention in some layers and heads. All but the error in [0, 1]."""

    tile_density: float
    """Tiles computed / causal tiles, of whole prompts."""
    kept: float
    """Mean over the rows of the share of the true attention mass that their kept tiles hold."""
    oracle_kept: float
    """The most that `kept` could be with as many key tiles for each query tile and head."""
    lowest_kept: float
    """Mean share of the `LOWEST_PART` of the rows that keep least, at least one row."""
    low_rows: float
    """Share of the rows that keep less than `LOW`."""
    output_error: float
    """`rms(kept output - dense output) / rms(dense output)`, over all rows and dimensions."""

    @classmethod
    def of(cls, recall: TileRecall, tile_density: float) -> Self:
        """Summarise rows, of any heads and query tiles. Waits for the device."""
        kept = recall.kept.flatten().double().sort().values
        return cls(
            tile_density=tile_density,
            kept=float(kept.mean()),
            oracle_kept=float(recall.oracle.double().mean()),
            lowest_kept=float(kept[: max(1, int(len(kept) * LOWEST_PART))].mean()),
            low_rows=float((kept < LOW).double().mean()),
            output_error=float((recall.error.sum() / recall.output.sum()).sqrt()),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class RecallSummary:
    """The figures of one policy."""

    total: Figures
    """Of all measured layers: the output error pools them, so layers of large outputs count
    more."""
    by_layer: dict[int, Figures]
    by_head: dict[tuple[int, int], Figures]
    """By layer and query head."""


class Recall:
    """Gathers what one policy kept. Nothing waits for the device but `summary`."""

    def __init__(self) -> None:
        self.density = DensityStats()
        """Of all query tiles, measured or not."""
        self._tiles: dict[int, list[TileRecall]] = {}

    def add(self, layer_id: int, tile: TileRecall) -> None:
        """Add a query tile of one layer."""
        self._tiles.setdefault(layer_id, []).append(tile)

    def summary(self) -> RecallSummary:
        """Return the figures. Waits for the device.

        Raises:
            ValueError: nothing was added, or not of every layer whose density was counted.
        """
        if not self._tiles:
            raise ValueError("no query tile was measured")
        density = self.density.summary()
        layers = {layer: _join(self._tiles[layer]) for layer in sorted(self._tiles)}
        heads = density["tile_density_by_head"]
        return RecallSummary(
            total=Figures.of(_stack(list(layers.values())), density["tile_density"]),
            by_layer={
                layer: Figures.of(recall, share)
                for (layer, recall), share in zip(
                    layers.items(), density["tile_density_by_layer"], strict=True
                )
            },
            by_head={
                (layer, head): Figures.of(_head(recall, head), share)
                for (layer, recall), shares in zip(layers.items(), heads, strict=True)
                for head, share in enumerate(shares)
            },
        )


def _join(tiles: list[TileRecall]) -> TileRecall:
    """Return the rows of several query tiles of one layer together, on the host, sums in fp64."""
    kept, oracle, error, output = zip(*tiles, strict=True)
    return TileRecall(
        kept=torch.cat(kept, 1).cpu(),
        oracle=torch.cat(oracle, 1).cpu(),
        error=torch.stack(error).double().sum(0).cpu(),
        output=torch.stack(output).double().sum(0).cpu(),
    )


def _stack(layers: list[TileRecall]) -> TileRecall:
    """Return the heads of all layers together."""
    return TileRecall(*map(torch.cat, zip(*layers, strict=True)))


def _head(layer: TileRecall, head: int) -> TileRecall:
    return TileRecall(*(part[head : head + 1] for part in layer))
