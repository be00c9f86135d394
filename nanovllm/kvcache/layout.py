"""The shape of a model's KV cache, wherever it lies."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class KVLayout:
    """What one KV block holds."""

    num_layers: int
    block_size: int
    """Tokens in a block."""
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def token_shape(self) -> tuple[int, int]:
        """Shape of one token's keys, or values, in one layer."""
        return self.num_kv_heads, self.head_dim

    @property
    def block_shape(self) -> tuple[int, int, int, int]:
        """Shape of a layer's block in host memory and in slots: K and V, each head-major."""
        return 2, self.num_kv_heads, self.block_size, self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one layer, keys and values."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def layer_block_bytes(self) -> int:
        """Bytes of a block in one layer, keys and values."""
        return self.block_size * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers, keys and values."""
        return self.num_layers * self.layer_block_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def page_bound_bytes(self, page_size: int) -> int:
        """Return the bytes of the bounds of a block's pages over all layers."""
        return self.block_bytes // page_size

    def empty_page_bounds(
        self, num_blocks: int, page_size: int, device: torch.device
    ) -> torch.Tensor:
        """Return room for the bounds of all pages of some blocks, in every layer.

        `[num_layers, num_pages, num_kv_heads, 2, head_dim]`: of each channel of a page's keys the
        least and the greatest value.
        """
        num_pages = num_blocks * self.block_size // page_size
        shape = (self.num_layers, num_pages, self.num_kv_heads, 2, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=device)
