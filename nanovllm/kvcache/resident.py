"""The KV cache in the memory of the device that computes: paged, one tensor for all layers."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nanovllm.kvcache.attention_batch import SlotIndex
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.page_budget import PageBudget
from nanovllm.ops.page_index import PageIndex


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer's keys and values, each `[num_blocks, block_size, num_kv_heads, head_dim]`."""

    keys: torch.Tensor
    values: torch.Tensor
    page_index: PageIndex | None = None
    """Where decode chooses pages, what is known of their keys."""

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
        pages: how decode divides a context into pages, if it does.
    """

    def __init__(
        self,
        layout: KVLayout,
        num_blocks: int,
        device: torch.device,
        pages: PageBudget | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = layout.block_size
        shape = (2, layout.num_layers, num_blocks + 1, layout.block_size, *layout.token_shape)
        data = torch.empty(shape, dtype=layout.dtype, device=device)
        self.num_bytes = data.nbytes
        indices: Sequence[PageIndex | None] = [None] * layout.num_layers
        if pages is not None:
            index = layout.empty_page_index(num_blocks + 1, pages, device)
            self.num_bytes += index.num_bytes
            indices = index.layers()
        self.layers = [LayerKV(*kv) for kv in zip(*data, indices, strict=True)]

    @property
    def scrap_block(self) -> int:
        """The id of the block that no sequence owns."""
        return self.num_blocks
