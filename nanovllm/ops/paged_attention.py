"""Decode attention: one query a sequence over its keys and values in a paged cache."""

from collections.abc import Sequence

import torch

from nanovllm.ops.backends.torch_attention import TorchAttention


def paged_decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """Attend each sequence's query to the first `context_lens` tokens of its blocks, on a GPU.

    Args:
        query: `[num_seqs, num_q_heads, head_dim]`.
        key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`.
        block_tables: int32 `[num_seqs, max_blocks]`, the ids of each sequence's blocks in order;
            entries past the context are never read through.
        context_lens: int32 `[num_seqs]`, tokens to attend to, the query's own included; >= 1.
        softmax_scale: factor of the logits.

    Returns:
        `[num_seqs, num_q_heads, head_dim]` of the query's dtype. Does not synchronise, and its
        launch depends on shapes only, so a CUDA graph may hold it.
    """
    from nanovllm.ops.kernels import paged_decode

    return paged_decode.paged_decode_attention(
        query, key_cache, value_cache, block_tables, context_lens, softmax_scale
    )


def gathered_decode_attention(
    query: torch.Tensor,
    keys_and_values: Sequence[tuple[torch.Tensor, torch.Tensor]],
    softmax_scale: float,
) -> torch.Tensor:
    """Attend each sequence's query to keys and values gathered for it, in plain torch.

    Args:
        query: `[num_seqs, num_q_heads, head_dim]`.
        keys_and_values: for each sequence both, `[context_len, num_kv_heads, head_dim]`.
        softmax_scale: factor of the logits.

    Returns:
        `[num_seqs, num_q_heads, head_dim]` of the query's dtype.
    """
    attend = TorchAttention().attend
    outs = [
        attend(query[None, i : i + 1], keys[None], values[None], softmax_scale, False)[0][0]
        for i, (keys, values) in enumerate(keys_and_values)
    ]
    return outs[0] if len(outs) == 1 else torch.cat(outs)
