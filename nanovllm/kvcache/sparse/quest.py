"""Quest: decode attends to the pages whose keys may match the query best."""

from collections.abc import Sequence as Seq
from typing import Any, Self

import torch

from nanovllm.kvcache.attention_batch import DecodeBatch
from nanovllm.kvcache.paged_layer import PageBudget, PagedLayer, ResidentPages
from nanovllm.kvcache.resident import LayerKV
from nanovllm.kvcache.source import KVSource
from nanovllm.kvcache.sparse.policy import PolicyContext, SparsePolicy
from nanovllm.ops.pages import page_attention, score_pages

_RECENT_TOKENS = 256


class QuestPolicy(SparsePolicy):
    """Chooses pages by a bound of their logits (Tang et al., 2024), for each KV head.

    Of each page the least and the greatest value of each channel of its keys are known, and no
    logit of a query there exceeds `sum_d max(q_d min_d, q_d max_d)`. A KV head attends to the pages
    of greatest bound, and to the first page and the newest tokens always. Where it serves several
    query heads, a page counts by the greatest share that one of them gives it in a softmax of its
    bounds. With room for all pages that is dense attention.

    Args:
        token_budget: tokens of a context that a KV head attends to, in whole pages.
        page_size: tokens of a page, a power of two from 16 to 128.
        num_dense_tokens: contexts up to this length are attended to densely.
    """

    supports_prefill = False
    supports_decode = True
    pages: PageBudget

    def __init__(
        self, token_budget: int = 4096, page_size: int = 64, num_dense_tokens: int = 0
    ) -> None:
        num_pages = -(-token_budget // page_size)
        self.pages = PageBudget(
            page_size=page_size,
            num_pages=num_pages,
            # Of the smallest budgets half is left to choose.
            num_recent=min(_RECENT_TOKENS // page_size, num_pages // 2),
            num_dense=-(-num_dense_tokens // page_size),
        )

    @classmethod
    def from_config(cls, config: Any) -> Self:
        topk_blocks = config.sparse_topk_blocks
        return cls(
            token_budget=(
                config.decode_token_budget
                if topk_blocks is None
                else topk_blocks * config.block_size
            ),
            page_size=config.decode_page_size,
            num_dense_tokens=config.sparse_threshold_blocks * config.block_size,
        )

    def select_blocks(
        self, available_blocks: Seq[int], source: KVSource, ctx: PolicyContext
    ) -> Seq[int]:
        """Return all: pages, not blocks, are chosen."""
        return available_blocks

    def compute_decode(
        self,
        query: torch.Tensor,
        layer_kv: LayerKV,
        batch: DecodeBatch,
        softmax_scale: float,
    ) -> torch.Tensor:
        return self.attend_to_pages(query, ResidentPages(layer_kv, batch), softmax_scale)

    def attend_to_pages(
        self, query: torch.Tensor, layer: PagedLayer, softmax_scale: float
    ) -> torch.Tensor:
        scores = score_pages(
            query,
            layer.bounds,
            layer.block_tables,
            layer.context_lens,
            softmax_scale,
            self.pages.page_size,
            layer.block_size,
        )
        chosen = layer.locate(scores, self.pages)
        return page_attention(
            query, chosen.keys, chosen.values, chosen.tables, chosen.lens, softmax_scale
        )
