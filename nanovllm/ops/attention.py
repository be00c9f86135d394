"""Dense attention with LSE, and the merging of attention over disjoint sets of keys."""

from functools import lru_cache

import torch

from nanovllm.ops import reference
from nanovllm.ops.backends import AttentionBackend, resolve_backend


def flash_attn_with_lse(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    backend: AttentionBackend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend queries to keys and return the output and the log-sum-exp of the logits.

    Args:
        query: `[batch, q_len, num_q_heads, head_dim]`.
        key, value: `[batch, k_len, num_kv_heads, head_dim]`, `num_q_heads` a multiple of
            `num_kv_heads`; heads are shared, never expanded.
        softmax_scale: factor of the logits; None means `head_dim ** -0.5`.
        causal: hide keys after a query. With fewer queries than keys the last query is aligned
            with the last key, so that a chunk sees its history.
        backend: kernel to use; None takes the best one for the query's device.

    Returns:
        Output like `query`, and the LSE, fp32 `[batch, num_q_heads, q_len]`. Does not synchronise.

    Raises:
        ValueError: `causal` with more queries than keys, which would leave rows with no key.
    """
    q_len, k_len = query.shape[1], key.shape[1]
    if causal and q_len > k_len:
        raise ValueError(f"causal attention of {q_len} queries over only {k_len} keys")
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    backend = backend or _default_backend(query.device, query.dtype, query.shape[-1])
    if not causal or q_len == 1:
        return backend.attend(query, key, value, scale, False)
    if q_len == k_len or backend.masks_bottom_right:
        return backend.attend(query, key, value, scale, True)
    history = k_len - q_len
    out, lse = merge_attention_outputs(
        *backend.attend(query, key[:, :history], value[:, :history], scale, False),
        *backend.attend(query, key[:, history:], value[:, history:], scale, True),
    )
    return out, lse


def merge_attention_outputs(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge attention over two disjoint sets of keys into attention over their union.

    Args:
        out_a, out_b: `[batch, q_len, num_heads, head_dim]`, the last axis contiguous, the other
            strides free; their dtypes may differ.
        lse_a, lse_b: fp32 `[batch, num_heads, q_len]` of any strides; `-inf` where a set held no
            key, and then its output may hold anything, NaN too.

    Returns:
        Output of `out_a`'s dtype and LSE, computed in fp32; a row with no key in either set is 0,
        and its LSE `-inf`. Associative and commutative to rounding (FlashAttention, section 3.1,
        the rescaling of the softmax). Does not synchronise.
    """
    if out_a.is_cuda:
        from nanovllm.ops.kernels import merge

        return merge.merge_attention_outputs(out_a, lse_a, out_b, lse_b)
    return reference.merge_attention_outputs(out_a, lse_a, out_b, lse_b)


@lru_cache
def _default_backend(device: torch.device, dtype: torch.dtype, head_dim: int) -> AttentionBackend:
    return resolve_backend("auto", device, dtype, head_dim)
