"""Triton kernels of `ops.elementwise`: one pass over memory each, fp32 inside."""

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, n, eps, ADD: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, BLOCK)
    inside = cols < n
    x = tl.load(x_ptr + row * n + cols, mask=inside, other=0.0)
    if ADD:
        # Rounded as the residual stream is stored: the norm sees what the next layer adds to.
        x = (x.to(tl.float32) + tl.load(residual_ptr + row * n + cols, mask=inside, other=0.0)).to(
            x.dtype
        )
        tl.store(residual_ptr + row * n + cols, x, mask=inside)
    x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / n + eps)
    weight = tl.load(weight_ptr + cols, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row * n + cols, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside
    )


def _launch_rms_norm(x, residual, weight, eps):
    out = torch.empty_like(x)
    n = x.shape[-1]
    block = triton.next_power_of_2(n)
    _rms_norm_kernel[(x.numel() // n,)](
        x,
        residual if residual is not None else x,
        weight,
        out,
        n,
        eps,
        ADD=residual is not None,
        BLOCK=block,
        num_warps=min(16, max(1, block // 512)),
    )
    return out


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `ops.elementwise.rms_norm`."""
    return _launch_rms_norm(x.contiguous(), None, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.elementwise.add_rms_norm`; `residual` is overwritten with the sum."""
    return _launch_rms_norm(x, residual, weight, eps), residual


@triton.jit
def _silu_and_mul_kernel(gate_up_ptr, out_ptr, m, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < m
    gate = tl.load(gate_up_ptr + row * 2 * m + cols, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + row * 2 * m + m + cols, mask=inside, other=0.0).to(tl.float32)
    silu = gate / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * m + cols, (silu * up).to(out_ptr.dtype.element_ty), mask=inside)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `ops.elementwise.silu_and_mul`; `gate_up` is contiguous."""
    n, m = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(n, m, dtype=gate_up.dtype, device=gate_up.device)
    block = min(1024, triton.next_power_of_2(m))
    _silu_and_mul_kernel[(n, triton.cdiv(m, block))](gate_up, out, m, BLOCK=block, num_warps=4)
    return out


@triton.jit
def _rotate_and_store_kernel(
    heads_ptr,
    key_ptr,
    value_ptr,
    slot_ptr,
    cos_ptr,
    sin_ptr,
    row_stride,
    block_stride,
    token_stride,
    head_stride,
    NUM_Q_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    col = tl.arange(0, COLS)
    in_row = col < HALF
    is_query = head < NUM_Q_HEADS
    is_value = head >= NUM_Q_HEADS + NUM_KV_HEADS
    is_key = (head >= NUM_Q_HEADS) & (head < NUM_Q_HEADS + NUM_KV_HEADS)
    exists = head < NUM_Q_HEADS + 2 * NUM_KV_HEADS

    source = heads_ptr + row * row_stride + head[:, None] * (2 * HALF) + col[None, :]
    inside = exists[:, None] & in_row[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(cos_ptr + row * HALF + col, mask=in_row, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * HALF + col, mask=in_row, other=0.0)[None, :]
    # Values are stored as they are.
    cos = tl.where(is_value[:, None], 1.0, cos)
    sin = tl.where(is_value[:, None], 0.0, sin)
    dtype = heads_ptr.dtype.element_ty
    out_first = (first * cos - second * sin).to(dtype)
    out_second = (second * cos + first * sin).to(dtype)

    to_query = is_query[:, None] & in_row[None, :]
    tl.store(source, out_first, mask=to_query)
    tl.store(source + HALF, out_second, mask=to_query)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    place = slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * token_stride
    to_key = is_key[:, None] & in_row[None, :]
    kv_head = (head - NUM_Q_HEADS).to(tl.int64)
    target = key_ptr + place + kv_head[:, None] * head_stride + col[None, :]
    tl.store(target, out_first, mask=to_key)
    tl.store(target + HALF, out_second, mask=to_key)
    to_value = (is_value & exists)[:, None] & in_row[None, :]
    target = value_ptr + place + (kv_head - NUM_KV_HEADS)[:, None] * head_stride + col[None, :]
    tl.store(target, out_first, mask=to_value)
    tl.store(target + HALF, out_second, mask=to_value)


def rotate(query: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """See `ops.elementwise.rotate`: heads that are all queries, and none to store."""
    nothing = query[:0, None, :0]
    rotate_and_store(query, nothing, nothing, query, cos, sin)


def rotate_and_store(
    heads: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
) -> None:
    """See `ops.elementwise.rotate_and_store`; rows of `heads` may lie apart."""
    n, num_heads, head_dim = heads.shape
    num_kv_heads = key_cache.shape[2]
    heads_per_program = 8
    _rotate_and_store_kernel[(n, triton.cdiv(num_heads, heads_per_program))](
        heads,
        key_cache,
        value_cache,
        slot_mapping,
        cos,
        sin,
        heads.stride(0),
        *key_cache.stride()[:3],
        NUM_Q_HEADS=num_heads - 2 * num_kv_heads,
        NUM_KV_HEADS=num_kv_heads,
        HALF=head_dim // 2,
        BLOCK_SIZE=key_cache.shape[1],
        HEADS=heads_per_program,
        COLS=triton.next_power_of_2(head_dim // 2),
        num_warps=1,
    )
