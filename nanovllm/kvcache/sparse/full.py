"""Dense attention as a policy: everything is selected."""

from collections.abc import Sequence as Seq

import torch

from nanovllm.kvcache.attention_batch import DecodeBatch
from nanovllm.kvcache.resident import LayerKV
from nanovllm.kvcache.source import KVSource
from nanovllm.kvcache.sparse.policy import PolicyContext, SparsePolicy, attend_to_pieces
from nanovllm.ops.paged_attention import gathered_decode_attention, paged_decode_attention


class FullAttentionPolicy(SparsePolicy):
    """Attends to every token: the truth that other policies are measured against."""

    supports_prefill = True
    supports_decode = True

    def select_blocks(
        self, available_blocks: Seq[int], source: KVSource, ctx: PolicyContext
    ) -> Seq[int]:
        """Return all of `available_blocks`."""
        return available_blocks

    def compute_decode(
        self,
        query: torch.Tensor,
        layer_kv: LayerKV,
        batch: DecodeBatch,
        softmax_scale: float,
    ) -> torch.Tensor:
        """Attend each token to the whole of its sequence."""
        if batch.slots is not None:
            gathered = [layer_kv.read(slots) for slots in batch.slots]
            return gathered_decode_attention(query, gathered, softmax_scale)
        return paged_decode_attention(
            query,
            layer_kv.keys,
            layer_kv.values,
            batch.block_tables,
            batch.context_lens,
            softmax_scale,
        )

    def compute_chunked_decode(self, source: KVSource, ctx: PolicyContext) -> torch.Tensor:
        """Attend a token to the whole of its sequence."""
        return attend_to_pieces(source.pieces(source.available_blocks), ctx)
