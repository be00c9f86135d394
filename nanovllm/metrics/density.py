"""How much of the attention mask was computed, and how many KV blocks that took."""

from typing import Any

import torch


class DensityStats:
    """Counts chosen tiles by layer and head, and chosen KV blocks, without waiting.

    Counts of tiles stay on the device until they are asked for.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self.num_chunks = 0
        self._num_available = 0
        self._num_selected: torch.Tensor | int = 0
        # By layer: tiles computed of each head, on the device, and causal tiles of one head.
        self._kept: dict[int, torch.Tensor | int] = {}
        self._causal: dict[int, int] = {}
        self._num_heads = 0

    def add(self, layer_id: int, tiles: torch.Tensor, num_causal: int) -> None:
        """Count a chunk in one layer.

        Args:
            layer_id: the layer.
            tiles: bool `[num_q_heads, num_q_tiles, num_k_tiles]`, the last of either for the same
                tokens. Those after their queries do not count.
            num_causal: tiles of one head that hold a visible key.
        """
        visible = tiles.tril(tiles.shape[2] - tiles.shape[1])
        self._add(layer_id, len(tiles), visible.flatten(1).sum(1), num_causal)

    def add_dense(self, layer_id: int, num_heads: int, num_causal: int) -> None:
        """Count a chunk of which a layer computes everything."""
        self._add(layer_id, num_heads, num_causal, num_causal)

    def add_blocks(self, num_available: int, num_selected: torch.Tensor | int) -> None:
        """Count a chunk's KV blocks: those of its history, and those of them that it reads."""
        self.num_chunks += 1
        self._num_available += num_available
        self._num_selected = self._num_selected + num_selected

    def summary(self) -> dict[str, Any]:
        """Return what `TilePolicy.get_density_stats` documents. Waits for the device."""
        selected = int(self._num_selected)
        layers = sorted(self._causal)
        by_head = [
            (torch.as_tensor(self._kept[layer]).expand(self._num_heads) / self._causal[layer])
            .double()
            .tolist()
            for layer in layers
        ]
        by_layer = [sum(heads) / len(heads) for heads in by_head]
        causal = [self._causal[layer] for layer in layers]
        kept = sum(density * count for density, count in zip(by_layer, causal, strict=True))
        return {
            "total_available_blocks": self._num_available,
            "total_selected_blocks": selected,
            "num_chunks": self.num_chunks,
            "overall_density": selected / self._num_available if self._num_available else 1.0,
            "tile_density": kept / sum(causal) if causal else 1.0,
            "tile_density_by_layer": by_layer,
            "tile_density_by_head": by_head,
        }

    def describe(self) -> str:
        """Return the summary as lines of text. Waits for the device."""
        stats = self.summary()
        lines = [
            f"Block density: {stats['overall_density']:.1%} "
            f"({stats['total_selected_blocks']} of {stats['total_available_blocks']} blocks, "
            f"{stats['num_chunks']} chunks, first layer)",
            f"Tile density:  {stats['tile_density']:.1%}",
        ]
        for layer, heads in enumerate(stats["tile_density_by_head"]):
            mean = stats["tile_density_by_layer"][layer]
            lines.append(
                f"  layer {layer:3d}: {mean:6.1%}, heads {min(heads):.1%} to {max(heads):.1%}"
            )
        return "\n".join(lines)

    def _add(
        self, layer_id: int, num_heads: int, kept: torch.Tensor | int, num_causal: int
    ) -> None:
        self._num_heads = num_heads
        self._kept[layer_id] = self._kept.get(layer_id, 0) + kept
        self._causal[layer_id] = self._causal.get(layer_id, 0) + num_causal
