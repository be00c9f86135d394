"""The small ops between matrix products: one fused Triton kernel each on CUDA, torch elsewhere."""

import torch
import torch.nn.functional as F

from nanovllm.ops import reference


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Return `x / rms(x) * weight` over the last axis, computed in fp32, in `x`'s dtype.

    `x`: `[..., n]`; `weight`: `[n]`. (Zhang and Sennrich, 2019.)
    """
    if x.is_cuda:
        from nanovllm.ops.kernels import elementwise

        return elementwise.rms_norm(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `rms_norm(x + residual)` and `x + residual`. May overwrite `x` and `residual`."""
    if x.is_cuda:
        from nanovllm.ops.kernels import elementwise

        return elementwise.add_rms_norm(x, residual, weight, eps)
    residual = residual.add_(x)
    return F.rms_norm(residual, weight.shape, weight, eps), residual


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Return `silu(gate) * up` for `gate_up`, `[n, 2 * m]` with the gate first: `[n, m]`."""
    if gate_up.is_cuda:
        from nanovllm.ops.kernels import elementwise

        return elementwise.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Apply rotary embedding in place and return `x`.

    `x`: `[n, num_heads, head_dim]`, pairs `(i, i + head_dim / 2)`; `cos`, `sin`: fp32
    `[n, head_dim / 2]`. (Su et al., 2021; half-split layout of Hugging Face checkpoints.)
    """
    if x.is_cuda:
        from nanovllm.ops.kernels import elementwise

        return elementwise.rotate_(x, cos, sin)
    return x.copy_(reference.rotate(x, cos, sin))
