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
        # Rounded as the residual stream is stored, so that the norm sees what the next layer adds to.
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
def _rotate_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    row_stride,
    num_heads,
    half,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    cols = tl.arange(0, BLOCK)
    inside = (heads < num_heads)[:, None] & (cols < half)[None, :]
    cos = tl.load(cos_ptr + row * half + cols, mask=cols < half, other=0.0)[None, :]
    sin = tl.load(sin_ptr + row * half + cols, mask=cols < half, other=0.0)[None, :]
    first_ptr = x_ptr + row * row_stride + heads[:, None] * (2 * half) + cols[None, :]
    first = tl.load(first_ptr, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(first_ptr + half, mask=inside, other=0.0).to(tl.float32)
    dtype = x_ptr.dtype.element_ty
    tl.store(first_ptr, (first * cos - second * sin).to(dtype), mask=inside)
    tl.store(first_ptr + half, (second * cos + first * sin).to(dtype), mask=inside)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """See `ops.elementwise.rotate_`; rows of `x` may lie apart, heads and dims are contiguous."""
    n, num_heads, head_dim = x.shape
    half = head_dim // 2
    heads = 8
    _rotate_kernel[(n, triton.cdiv(num_heads, heads))](
        x,
        cos,
        sin,
        x.stride(0),
        num_heads,
        half,
        HEADS=heads,
        BLOCK=triton.next_power_of_2(half),
        num_warps=1,
    )
    return x
