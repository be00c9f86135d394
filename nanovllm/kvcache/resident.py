"""The KV cache in the memory of the device that computes: paged, one tensor for all layers."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from nanovllm.kvcache.attention_batch import SlotIndex
from nanovllm.kvcache.layout import KVLayout


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's keys and values, each `[num_blocks, block_size, num_kv_heads, head_dim]`."""

    keys: torch.Tensor
    values: torch.Tensor
    page_bounds: torch.Tensor | None = None
    """Where decode chooses pages, the bounds of their keys, see `PagedLayer.bounds`."""

    def read(self, slots: SlotIndex) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values at `slots`, `[n, num_kv_heads, head_dim]`; views for a slice."""
        keys, values = self.keys.flatten(0, 1), self.values.flatten(0, 1)
        if isinstance(slots, slice):
            return keys[slots], values[slots]
        return keys.index_select(0, slots), values.index_select(0, slots)


class ResidentKVCache:
    """Keys and values of all layers, `[2, num_layers, num_blocks + 1, block_size, heads, dim]`.

    The block after the last is scrap: rows that only fill up a CUDA graph's batch write there.

    Args:
        layout: shape of the KV cache.
        num_blocks: KV blocks that sequences may have.
        device: where.
        page_size: tokens of a page, if bounds of the pages' keys are to be kept.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        page_size: int | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = layout.block_size
        shape = (2, layout.num_layers, num_blocks + 1, layout.block_size, *layout.token_shape)
        data = torch.empty(shape, dtype=layout.dtype, device=device)
        self.num_bytes = data.nbytes
        bounds: Iterable[torch.Tensor | None] = [None] * layout.num_layers
        if page_size is not None:
            bounds = layout.empty_page_bounds(num_blocks + 1, page_size, device)
            self.num_bytes += bounds.nbytes
        self.layers = [LayerKV(*kv) for kv in zip(*data, bounds, strict=True)]

    @property
    def scrap_block(self) -> int:
        """The id of the block that no sequence owns."""
        return self.num_blocks
