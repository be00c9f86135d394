"""Matrix times one vector: reads the weight once, at the memory's speed."""

import torch
import triton
import triton.language as tl

_COLS = 2048  # most columns a program holds at a time


@triton.jit
def _gemv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    n,
    k,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    WHOLE: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    acc = tl.zeros((ROWS, COLS), tl.float32)
    for start in range(0, k, COLS):
        col = start + tl.arange(0, COLS)
        pointers = weight_ptr + row.to(tl.int64)[:, None] * k + col[None, :]
        if WHOLE:  # no masks: loads stay wide
            x = tl.load(x_ptr + col).to(tl.float32)
            weight = tl.load(pointers, eviction_policy="evict_first").to(tl.float32)
        else:
            x = tl.load(x_ptr + col, mask=col < k, other=0.0).to(tl.float32)
            inside = (row < n)[:, None] & (col < k)[None, :]
            weight = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        acc += x[None, :] * weight
    out = tl.sum(acc, 1)
    if HAS_BIAS:
        out += tl.load(bias_ptr + row, mask=row < n, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, out.to(out_ptr.dtype.element_ty), mask=row < n)


def gemv_pays(n: int, k: int) -> bool:
    """Return whether `gemv` beats cuBLAS for an `[n, k]` weight, as measured on an H200.

    It does for long rows, which keep a program streaming, and for weights so small that the launch
    decides (docs/experiments.md).
    """
    return k >= _COLS or n * k <= 1 << 22


def gemv(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return `x @ weight.T + bias`, summed in fp32.

    `x`: `[1, k]`; `weight`: `[n, k]`, contiguous; `bias`: `[n]` or None. Returns `[1, n]`.
    """
    n, k = weight.shape
    out = torch.empty(1, n, dtype=x.dtype, device=x.device)
    cols = min(_COLS, k & -k)  # the largest power of two that divides k
    if cols < 512:
        cols = min(_COLS, triton.next_power_of_2(k))
    rows = 1 if k >= _COLS else 4
    _gemv_kernel[(triton.cdiv(n, rows),)](
        x,
        weight,
        bias if bias is not None else weight,
        out,
        n,
        k,
        HAS_BIAS=bias is not None,
        ROWS=rows,
        COLS=cols,
        WHOLE=k % cols == 0 and n % rows == 0,
        num_warps=8,
        num_stages=2,
    )
    return out
