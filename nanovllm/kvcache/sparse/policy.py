"""The plug-in that decides which attention is computed."""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from nanovllm.kvcache.attention_batch import DecodeBatch, PrefillSegment
from nanovllm.kvcache.resident import LayerKV
from nanovllm.ops.attention import flash_attn_with_lse
from nanovllm.ops.backends import AttentionBackend


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


class SparsePolicy(ABC):
    """Decides which KV blocks, and within them which attention, a step computes.

    A subclass says which phases it serves. For prefill it selects blocks; reading and attending
    to them is written here once. For decode it overrides `compute_decode`. A policy holds no
    tensors of a sequence between calls.
    """

    supports_prefill: bool
    supports_decode: bool

    @abstractmethod
    def select_blocks(
        self, available_blocks: Seq[int], source: LayerKV, ctx: PolicyContext
    ) -> Seq[int]:
        """Return those of `available_blocks`, in their order, that the chunk attends to.

        Args:
            available_blocks: ids of the full KV blocks of the history, oldest first.
            source: where their keys can be read.
            ctx: the chunk and its layer.
        """

    def compute_prefill(
        self, layer_kv: LayerKV, segment: PrefillSegment, ctx: PolicyContext
    ) -> torch.Tensor:
        """Attend one sequence's chunk to the selected blocks and, causally, to itself.

        Args:
            layer_kv: the layer's cache, the chunk's own keys and values already stored.
            segment: where the sequence's tokens lie.
            ctx: what `select_blocks` is given, the chunk's queries among it.

        Returns:
            `[q_len, num_q_heads, head_dim]` of the query's dtype. Does not synchronise.
        """
        available = segment.history_blocks
        selected = self.select_blocks(available, layer_kv, ctx)
        everything = len(selected) == len(available)
        keys, values = layer_kv.read(segment.slots if everything else segment.slots_of(selected))
        # The selected history lies before the chunk, so bottom-right causality masks it rightly.
        out, _ = flash_attn_with_lse(
            ctx.query[None],
            keys[None],
            values[None],
            softmax_scale=ctx.softmax_scale,
            causal=True,
            backend=ctx.backend,
        )
        return out[0]

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
