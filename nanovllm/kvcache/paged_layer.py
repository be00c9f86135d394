"""A layer of the KV cache as decode reads it that attends to chosen pages."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import torch

from nanovllm.kvcache.attention_batch import DecodeBatch
from nanovllm.kvcache.resident import LayerKV
from nanovllm.ops.pages import num_entries, top_pages


@dataclass(frozen=True, slots=True)
class PageBudget:
    """How much of a context a KV head attends to, in pages of `page_size` tokens."""

    page_size: int
    num_pages: int
    """Pages that a step attends to, at most."""
    num_recent: int
    """Newest pages that are always among them, as the first page is."""
    num_dense: int = 0
    """Pages of a context up to which all are attended to."""

    def num_chosen(self, max_pages: int) -> int:
        """Return the most pages that a step attends to where contexts have up to `max_pages`."""
        return num_entries(min(self.num_pages, max_pages), self.num_dense, max_pages)


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

    bounds: torch.Tensor
    """`[num_pages, num_kv_heads, 2, head_dim]`: least and greatest value of each channel of each
    page's keys, by the page's place among the cache's blocks."""
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
        assert layer_kv.page_bounds is not None
        self.bounds = layer_kv.page_bounds
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
