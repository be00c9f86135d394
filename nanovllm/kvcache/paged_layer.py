"""A layer of the KV cache as decode reads it that attends to chosen pages."""

from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from nanovllm.kvcache.attention_batch import DecodeBatch
from nanovllm.kvcache.page_budget import PageBudget
from nanovllm.kvcache.resident import LayerKV
from nanovllm.ops.page_index import PageIndex
from nanovllm.ops.pages import top_pages


class LocatedPages(NamedTuple):
    """Chosen pages, and memory on the device that holds them."""

    keys: torch.Tensor
    """`[num_slots, page_size, num_kv_heads, head_dim]`, strides free; values too."""
    values: torch.Tensor
    tables: torch.Tensor
    """int32 `[num_seqs, num_kv_heads, num_chosen]`: where each page lies, in the order of the
    sequence."""
    lens: torch.Tensor
    """int32 `[num_seqs]`: tokens that the pages hold."""


class PagedLayer(ABC):
    """One layer of the sequences of a decode step, whose new keys and values are stored."""

    index: PageIndex
    """What is known of the keys of each page, by the page's place among the cache's blocks."""
    block_tables: torch.Tensor
    """int32 `[num_seqs, max_blocks]`."""
    context_lens: torch.Tensor
    """int32 `[num_seqs]`, the new token included."""
    block_size: int

    @abstractmethod
    def locate(self, scores: torch.Tensor, budget: PageBudget) -> LocatedPages:
        """Choose the pages of greatest score and bring them to the device if need be.

        Args:
            scores: fp32 `[num_seqs, num_kv_heads, queries of a KV head, max_pages]`.
            budget: how many. Does not synchronise.
        """


class ResidentPages(PagedLayer):
    """A layer of the paged cache on the device: pages are parts of its blocks."""

    def __init__(self, layer_kv: LayerKV, batch: DecodeBatch) -> None:
        assert layer_kv.page_index is not None
        self.index = layer_kv.page_index
        self.block_tables, self.context_lens = batch.block_tables, batch.context_lens
        self.block_size = layer_kv.keys.shape[1]
        self._layer_kv = layer_kv

    def locate(self, scores: torch.Tensor, budget: PageBudget) -> LocatedPages:
        tables, lens = top_pages(
            scores,
            self.context_lens,
            budget.page_size,
            min(budget.num_pages, scores.shape[3]),
            budget.num_recent,
            self.block_tables,
            self.block_size,
            budget.num_dense,
        )
        caches = self._layer_kv.keys, self._layer_kv.values
        keys, values = (x.view(-1, budget.page_size, *x.shape[2:]) for x in caches)
        return LocatedPages(keys, values, tables, lens)
