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
        key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, the last axis
            contiguous; the other strides are free, and both tensors' are the same.
        block_tables: int32 `[num_seqs, max_blocks]`, the ids of each sequence's blocks in order,
            or `[num_seqs, num_kv_heads, max_blocks]`, for each KV head its own; the last axis
            contiguous. Entries past the context are never read through.
        context_lens: int32 `[num_seqs]`, tokens to attend to, the query's own included. A sequence
            of 0 gets 0.
        softmax_scale: factor of the logits.

    Returns:
        `[num_seqs, num_q_heads, head_dim]` of the query's dtype. Does not synchronise, and its
        launch depends on shapes only, so a CUDA graph may hold it.

    Raises:
        ValueError: caches of different strides, or with gaps in the last axis.
    """
    from nanovllm.ops.kernels import paged_decode

    _check_strides(key_cache, value_cache)
    return paged_decode.paged_decode_attention(
        query, key_cache, value_cache, block_tables, context_lens, softmax_scale
    )


def paged_decode_attention_with_lse(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do as `paged_decode_attention`, and return the log-sum-exp of the logits too.

    Returns:
        Output `[num_seqs, num_q_heads, head_dim]` of the query's dtype, and the LSE, fp32
        `[num_seqs, num_q_heads]`, to the base e: seen as `[num_seqs, num_q_heads, 1]`, what
        `merge_attention_outputs` takes. A sequence of 0 tokens gets output 0 and LSE `-inf`.
    """
    from nanovllm.ops.kernels import paged_decode

    _check_strides(key_cache, value_cache)
    return paged_decode.paged_decode_attention_with_lse(
        query, key_cache, value_cache, block_tables, context_lens, softmax_scale
    )


def decode_attention_with_lse(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend one sequence's query to keys that lie together, on any device.

    Args:
        query: `[1, num_q_heads, head_dim]`.
        keys, values: `[n, num_kv_heads, head_dim]` with equal strides, n >= 1.
        softmax_scale: factor of the logits.

    Returns:
        Output `[1, num_q_heads, head_dim]` and LSE, fp32 `[1, num_q_heads]`, as from
        `paged_decode_attention_with_lse`. Does not synchronise.
    """
    if not query.is_cuda:
        out, lse = TorchAttention().attend(
            query[None], keys[None], values[None], softmax_scale, False
        )
        return out[0], lse[..., 0]
    from nanovllm.ops.kernels import paged_decode

    _check_strides(keys, values)
    return paged_decode.decode_attention_with_lse(query, keys, values, softmax_scale)


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


def _check_strides(key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    strides = key_cache.stride()
    if strides != value_cache.stride() or strides[-1] != 1:
        raise ValueError(
            f"key_cache of strides {strides} and value_cache of {value_cache.stride()}; "
            "they must be equal and end in 1"
        )
