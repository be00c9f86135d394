"""Merging of attention over two disjoint sets of keys, in one pass over memory."""

import torch
import triton
import triton.language as tl

_PROGRAM_ELEMENTS = 2048  # of each output, by four warps: 16 a thread


@triton.jit
def _merge_kernel(
    out_a_ptr,
    lse_a_ptr,
    out_b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    num_rows,
    q_len,
    a_batch_stride,
    a_query_stride,
    a_head_stride,
    lse_a_batch_stride,
    lse_a_head_stride,
    lse_a_query_stride,
    b_batch_stride,
    b_query_stride,
    b_head_stride,
    lse_b_batch_stride,
    lse_b_head_stride,
    lse_b_query_stride,
    NUM_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
):
    # [batch, q_len, num_heads] as one axis: a program is as full for one query as for many.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    head = (row % NUM_HEADS).to(tl.int64)
    query = (row // NUM_HEADS % q_len).to(tl.int64)
    batch = (row // NUM_HEADS // q_len).to(tl.int64)
    dims = tl.arange(0, DIM_PAD)
    inside = exists[:, None] & (dims < DIM)[None, :]

    at = batch * lse_a_batch_stride + head * lse_a_head_stride + query * lse_a_query_stride
    lse_a = tl.load(lse_a_ptr + at, mask=exists, other=0.0)
    at = batch * lse_b_batch_stride + head * lse_b_head_stride + query * lse_b_query_stride
    lse_b = tl.load(lse_b_ptr + at, mask=exists, other=0.0)
    at = batch * a_batch_stride + query * a_query_stride + head * a_head_stride
    a = tl.load(out_a_ptr + at[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    at = batch * b_batch_stride + query * b_query_stride + head * b_head_stride
    b = tl.load(out_b_ptr + at[:, None] + dims[None, :], mask=inside, other=0.0).to(tl.float32)

    peak = tl.maximum(lse_a, lse_b)
    # Without keys on either side both weights are 0, and the LSE is -inf.
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weight_a = tl.exp(lse_a - peak)
    weight_b = tl.exp(lse_b - peak)
    total = weight_a + weight_b
    at = (batch * NUM_HEADS + head) * q_len + query
    tl.store(lse_ptr + at, peak + tl.log(total), mask=exists)

    # A set without keys may bring anything, NaN too: its share, 0 or 0 / 0, keeps that out.
    share_a = (weight_a / total)[:, None]
    share_b = (weight_b / total)[:, None]
    out = tl.where(share_a > 0, a * share_a, 0.0) + tl.where(share_b > 0, b * share_b, 0.0)
    at = row.to(tl.int64)[:, None] * DIM + dims[None, :]
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def merge_attention_outputs(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.attention.merge_attention_outputs`."""
    batch, q_len, num_heads, dim = out_a.shape
    out = torch.empty(out_a.shape, dtype=out_a.dtype, device=out_a.device)
    lse = torch.empty(lse_a.shape, dtype=torch.float32, device=out_a.device)
    num_rows = batch * q_len * num_heads
    dim_pad = triton.next_power_of_2(dim)
    rows = max(1, _PROGRAM_ELEMENTS // dim_pad)
    _merge_kernel[(triton.cdiv(num_rows, rows),)](
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        num_rows,
        q_len,
        *out_a.stride()[:3],
        *lse_a.stride(),
        *out_b.stride()[:3],
        *lse_b.stride(),
        NUM_HEADS=num_heads,
        DIM=dim,
        DIM_PAD=dim_pad,
        ROWS=rows,
        num_warps=4,
    )
    return out, lse
