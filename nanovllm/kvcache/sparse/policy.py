"""The plug-in that decides which attention is computed."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch

from nanovllm.kvcache.attention_batch import DecodeBatch
from nanovllm.kvcache.page_budget import PageBudget
from nanovllm.kvcache.paged_layer import PagedLayer
from nanovllm.kvcache.resident import LayerKV
from nanovllm.kvcache.source import KVPiece, KVSource
from nanovllm.ops.attention import flash_attn_with_lse, merge_attention_outputs
from nanovllm.ops.backends import AttentionBackend, TileBackend
from nanovllm.ops.paged_attention import decode_attention_with_lse


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """What a policy may look at when it selects blocks for one sequence's chunk in one layer."""

    layer_id: int
    query: torch.Tensor
    """The chunk's queries, `[q_len, num_q_heads, head_dim]`, rotary embedding applied."""
    num_history_tokens: int
    """Tokens of the sequence before the chunk."""
    block_size: int
    """Tokens in a KV block."""
    softmax_scale: float
    backend: AttentionBackend
    """Dense attention kernel."""
    tile_backend: TileBackend | None = None
    """Tile-sparse attention kernel, for policies that `works_on_tiles`."""
    is_prefill: bool = True
    """False if the chunk is one token that was generated."""


class SparsePolicy(ABC):
    """Decides which KV blocks, and within them which attention, a step computes.

    A subclass says which phases it serves. For prefill it selects blocks; reading and attending
    to them is written here once, for every place where the KV cache may lie. For decode it
    overrides `compute_decode` for a cache on the device, and `compute_chunked_decode`, or
    `attend_to_pages` if it chooses pages, for one in host memory. A policy holds no tensors of a
    sequence between calls.
    """

    supports_prefill: ClassVar[bool]
    supports_decode: ClassVar[bool]
    works_on_tiles: ClassVar[bool] = False
    """Whether a prefill is to have a layer's whole context together on the device, and chunks that
    end where a tile of the attention mask does, unless the prompt ends there."""
    pages: PageBudget | None = None
    """How many pages decode attends to, if it chooses pages; `attend_to_pages` then serves a cache
    in host memory."""

    @classmethod
    def from_config(cls, config: Any) -> Self:
        """Make the policy that the options, a `nanovllm.config.Config`, ask for."""
        return cls()

    @abstractmethod
    def select_blocks(
        self, available_blocks: Seq[int], source: KVSource, ctx: PolicyContext
    ) -> Seq[int]:
        """Return those of `available_blocks`, in their order, that the chunk attends to.

        Args:
            available_blocks: ids of the full KV blocks of the history, oldest first.
            source: where their keys can be read.
            ctx: the chunk and its layer.
        """

    def compute_chunked_prefill(self, source: KVSource, ctx: PolicyContext) -> torch.Tensor:
        """Attend one sequence's chunk to the selected blocks and, causally, to itself.

        Args:
            source: the layer's keys and values, the chunk's own among them, wherever they lie.
            ctx: the chunk and its layer.

        Returns:
            `[q_len, num_q_heads, head_dim]` of the query's dtype. Does not synchronise.
        """
        selected = self.select_blocks(source.available_blocks, source, ctx)
        return attend_to_pieces(source.pieces(selected), ctx)

    def compute_chunked_decode(self, source: KVSource, ctx: PolicyContext) -> torch.Tensor:
        """Attend one token to its sequence, of which a part is in host memory.

        Arguments and result as for `compute_chunked_prefill`, with one query.
        """
        raise NotImplementedError(f"{type(self).__name__} has no decode phase")

    def attend_to_pages(
        self, query: torch.Tensor, layer: PagedLayer, softmax_scale: float
    ) -> torch.Tensor:
        """Attend one token of each sequence to pages of that sequence's cache, wherever they lie.

        Arguments and result as for `compute_decode`. Its launches depend on shapes only.
        """
        raise NotImplementedError(f"{type(self).__name__} does not choose pages")

    def fetch_ahead(self, query: torch.Tensor, layer: PagedLayer, softmax_scale: float) -> None:
        """Bring some pages to the device that queries much like these will want.

        Called if `pages` says so; arguments as for `attend_to_pages`. Does not synchronise.
        """
        raise NotImplementedError(f"{type(self).__name__} fetches nothing ahead")

    def compute_decode(
        self,
        query: torch.Tensor,
        layer_kv: LayerKV,
        batch: DecodeBatch,
        softmax_scale: float,
    ) -> torch.Tensor:
        """Attend one token of each sequence to that sequence's cache.

        Args:
            query: `[num_seqs, num_q_heads, head_dim]`.
            layer_kv: the layer's cache, the tokens' own keys and values already stored.
            batch: where each sequence's tokens lie.
            softmax_scale: factor of the logits.

        Returns:
            `[num_seqs, num_q_heads, head_dim]` of the query's dtype. Does not synchronise.
        """
        raise NotImplementedError(f"{type(self).__name__} has no decode phase")

    def stats(self) -> dict[str, Any]:
        """Return what was selected since the last reset; empty if that is not counted."""
        return {}

    def reset_stats(self) -> None:  # noqa: B027  a policy that counts nothing has nothing to do
        """Count anew."""


def attend_to_pieces(pieces: Iterable[KVPiece], ctx: PolicyContext) -> torch.Tensor:
    """Attend a chunk to a sequence that comes in pieces; the part of each is merged by its LSE.

    Returns:
        `[q_len, num_q_heads, head_dim]` of the query's dtype; sums of several pieces are in fp32.
    """
    merged = None
    for piece in pieces:
        part = _attend(piece, ctx)
        if merged is None:
            merged = part
            continue
        out, lse = merged
        merged = merge_attention_outputs(out.float(), lse, *part)
    if merged is None:
        raise ValueError("no piece to attend to")
    return merged[0][0].to(ctx.query.dtype)


def _attend(piece: KVPiece, ctx: PolicyContext) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output `[1, q_len, num_q_heads, head_dim]` and LSE `[1, num_q_heads, q_len]`."""
    if not ctx.is_prefill:
        out, lse = decode_attention_with_lse(ctx.query, piece.keys, piece.values, ctx.softmax_scale)
        return out[None], lse[..., None]
    # What a piece holds of the history lies before the chunk, whatever was left out, so that
    # bottom-right causality masks it rightly.
    return flash_attn_with_lse(
        ctx.query[None],
        piece.keys[None],
        piece.values[None],
        softmax_scale=ctx.softmax_scale,
        causal=piece.holds_chunk,
        backend=ctx.backend,
    )
