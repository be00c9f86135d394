"""Quest: decode attends to the pages whose keys match the query best, as far as one can tell."""

from collections.abc import Sequence as Seq
from typing import Any, Self, get_args

import torch

from nanovllm.errors import ConfigError
from nanovllm.kvcache.attention_batch import DecodeBatch
from nanovllm.kvcache.page_budget import PageBudget, PageEstimator
from nanovllm.kvcache.paged_layer import PagedLayer, ResidentPages
from nanovllm.kvcache.resident import LayerKV
from nanovllm.kvcache.source import KVSource
from nanovllm.kvcache.sparse.policy import PolicyContext, SparsePolicy
from nanovllm.ops.page_index import score_pages
from nanovllm.ops.pages import page_attention

_RECENT_TOKENS = 256


class QuestPolicy(SparsePolicy):
    """Chooses pages by what is known of their keys (Tang et al., 2024), for each KV head.

    A KV head attends to the pages of greatest score, and to the first page and the newest tokens
    always. Where it serves several query heads, a page counts by the greatest share that one of
    them gives it in a softmax over pages. With room for all pages that is dense attention.

    Args:
        token_budget: tokens of a context that a KV head attends to, in whole pages.
        page_size: tokens of a page, a power of two from 16 to 128.
        num_dense_tokens: contexts up to this length are attended to densely.
        estimator: what a page's score is. `codes`: its attention mass, by keys in 2 bits a channel.
            `bounds`: the greatest logit that a key between the least and the greatest value of each
            channel could have.
        prefetch: with a KV cache in host memory, the share of the budget that is fetched while the
            MLP before a layer is computed, by what its query would be without; 0 to 1.

    Raises:
        ConfigError: no such estimator.
    """

    supports_prefill = False
    supports_decode = True
    pages: PageBudget

    def __init__(
        self,
        token_budget: int = 4096,
        page_size: int = 64,
        num_dense_tokens: int = 0,
        estimator: PageEstimator = "codes",
        prefetch: float = 0.0,
    ) -> None:
        if estimator not in get_args(PageEstimator):
            raise ConfigError(
                f"estimator={estimator!r} is none of {', '.join(get_args(PageEstimator))}"
            )
        num_pages = -(-token_budget // page_size)
        self.pages = PageBudget(
            page_size=page_size,
            num_pages=num_pages,
            # Of the smallest budgets half is left to choose.
            num_recent=min(_RECENT_TOKENS // page_size, num_pages // 2),
            num_dense=-(-num_dense_tokens // page_size),
            num_ahead=round(prefetch * num_pages),
            estimator=estimator,
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
            estimator=config.decode_estimator,
            prefetch=config.decode_prefetch,
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
        chosen = layer.locate(self._score(query, layer, softmax_scale), self.pages)
        return page_attention(
            query, chosen.keys, chosen.values, chosen.tables, chosen.lens, softmax_scale
        )

    def fetch_ahead(self, query: torch.Tensor, layer: PagedLayer, softmax_scale: float) -> None:
        layer.locate(self._score(query, layer, softmax_scale), self.pages.ahead())

    def _score(self, query: torch.Tensor, layer: PagedLayer, softmax_scale: float) -> torch.Tensor:
        return score_pages(
            query,
            layer.index,
            layer.block_tables,
            layer.context_lens,
            softmax_scale,
            self.pages.page_size,
            layer.block_size,
        )
