"""The shape of a model's KV cache, wherever it lies."""

from dataclasses import dataclass

import torch

from nanovllm.kvcache.page_budget import PageBudget
from nanovllm.ops.page_index import PageIndex, num_words


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

    def page_index_bytes(self, pages: PageBudget) -> int:
        """Return the bytes of the index of a block's pages over all layers."""
        return self.empty_page_index(1, pages, torch.device("meta")).num_bytes

    def empty_page_index(
        self, num_blocks: int, pages: PageBudget, device: torch.device
    ) -> PageIndex:
        """Return room for the index of all pages of some blocks, in every layer."""
        num_pages = num_blocks * self.block_size // pages.page_size
        shape = (self.num_layers, num_pages, self.num_kv_heads)
        bounds = torch.empty(*shape, 2, self.head_dim, dtype=self.dtype, device=device)
        codes = None
        if pages.estimator == "codes":
            words = pages.page_size, num_words(self.head_dim)
            codes = torch.empty(*shape, *words, dtype=torch.int16, device=device)
        return PageIndex(bounds, codes)
