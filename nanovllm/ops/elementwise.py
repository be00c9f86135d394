"""The small ops between matrix products: one fused Triton kernel each on CUDA, torch elsewhere."""

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x / rms(x) * weight` over the last axis, computed in fp32, in `x`'s dtype.

    `x`: `[..., n]`; `weight`: `[n]`. (Zhang and Sennrich, 2019.)
    """
    if x.is_cuda:
        from nanovllm.ops.kernels import elementwise

        return elementwise.rms_norm(x, weight, eps)
    return _rms_norm(x, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rms_norm(x + residual)` and `x + residual`. May overwrite `x` and `residual`."""
    if x.is_cuda:
        from nanovllm.ops.kernels import elementwise

        return elementwise.add_rms_norm(x, residual, weight, eps)
    residual = residual.add_(x)
    return _rms_norm(residual, weight, eps), residual


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` for `gate_up`, `[n, 2 * m]` with the gate first: `[n, m]`."""
    if gate_up.is_cuda:
        from nanovllm.ops.kernels import elementwise

        return elementwise.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotate(query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embedding to queries in place, and return them.

    `query`: `[n, num_q_heads, head_dim]`, contiguous; `cos`, `sin`: as for `rotate_and_store`.
    """
    if query.is_cuda:
        from nanovllm.ops.kernels import elementwise

        elementwise.rotate(query, cos, sin)
    else:
        _rotate_(query, cos, sin)
    return query


def rotate_and_store(
    heads: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> torch.Tensor:
    """Apply rotary embedding to queries and keys, and store keys and values in a paged cache.

    Args:
        heads: `[n, num_q_heads + 2 * num_kv_heads, head_dim]`: queries, keys, values. Overwritten:
            the queries are rotated in place, the rest is undefined afterwards.
        key_cache, value_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, the last axis
            contiguous; the other strides are free, and both tensors' are the same.
        slot_mapping: `[n]`, where each token goes: `block_id * block_size + offset`.
        cos, sin: fp32 `[n, head_dim / 2]`, for the pairs `(i, i + head_dim / 2)` (Su et al., 2021;
            the half-split layout of Hugging Face checkpoints).

    Returns:
        The rotated queries, a view of `heads`.
    """
    num_kv_heads = key_cache.shape[2]
    num_q_heads = heads.shape[1] - 2 * num_kv_heads
    if heads.is_cuda:
        from nanovllm.ops.kernels import elementwise

        elementwise.rotate_and_store(heads, key_cache, value_cache, slot_mapping, cos, sin)
    else:
        _rotate_(heads[:, :-num_kv_heads], cos, sin)
        slots = _slots(slot_mapping)
        _store(key_cache, slots, heads[:, num_q_heads:-num_kv_heads])
        _store(value_cache, slots, heads[:, -num_kv_heads:])
    return heads[:, :num_q_heads]


# The forms below take the fewest passes over memory that plain torch allows; each was measured
# against its alternatives (docs/experiments.md).


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    # `wide` is `x` itself if that is in fp32, and `x` must stay.
    normed = wide * scale if wide is x else wide.mul_(scale)
    return normed.mul_(weight.float()).to(x.dtype)


def _rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate `x`, `[n, num_heads, head_dim]`, in place, in fp32."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    rotated_first = (first * cos).addcmul_(second.float(), sin, value=-1)
    rotated_second = (second * cos).addcmul_(first.float(), sin)
    first.copy_(rotated_first)
    second.copy_(rotated_second)


def _slots(slot_mapping: torch.Tensor) -> slice | torch.Tensor:
    """Return the slots as a slice where they follow each other: copying to one is faster."""
    first, last = slot_mapping[0].item(), slot_mapping[-1].item()
    if last - first + 1 == len(slot_mapping) and bool((slot_mapping.diff() == 1).all()):
        return slice(first, last + 1)
    return slot_mapping.long()


def _store(cache: torch.Tensor, slots: slice | torch.Tensor, tokens: torch.Tensor) -> None:
    block_size = cache.shape[1]
    if cache.stride(0) == block_size * cache.stride(1):  # one row of slots in memory too
        cache.flatten(0, 1)[slots] = tokens
        return
    if isinstance(slots, slice):
        block_id, offset = divmod(slots.start, block_size)
        if offset + len(tokens) <= block_size:
            cache[block_id, offset : offset + len(tokens)] = tokens
            return
        slots = torch.arange(slots.start, slots.stop)
    cache[slots // block_size, slots % block_size] = tokens
