"""The antidiagonal estimate in three kernels: group scores, softmax statistics, block sums."""

import torch
import triton
import triton.language as tl

_SCORES_IN_FLIGHT = 4096  # what a program of the softmax kernels holds at a time


@triton.jit
def _score_kernel(
    q_ptr,
    k_ptr,
    out_ptr,
    q_len,
    k_len,
    num_rows,
    num_columns,
    chunk_start,
    key_start,
    q_batch_stride,
    q_head_stride,
    q_token_stride,
    k_batch_stride,
    k_head_stride,
    k_token_stride,
    NUM_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_STEP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
    PRECISION: tl.constexpr,
):
    num_column_tiles = tl.cdiv(num_columns, COLUMNS)
    first_row = tl.program_id(0) // num_column_tiles * ROWS
    first_column = tl.program_id(0) % num_column_tiles * COLUMNS
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    step_dims = tl.arange(0, DIM_STEP)
    q_head = q_ptr + batch * q_batch_stride + head.to(tl.int64) * q_head_stride
    k_head = k_ptr + batch * k_batch_stride + (head // GROUP).to(tl.int64) * k_head_stride

    acc = tl.zeros((ROWS, COLUMNS), tl.float32)
    steps = STRIDE
    if IS_CAUSAL:
        # Above the diagonal nothing is read, and the mask below writes the -inf.
        seen = key_start + first_column < chunk_start + first_row + ROWS
        steps = tl.where(seen, STRIDE, 0)
    for i in range(steps):
        q_token = row * STRIDE + (STRIDE - 1 - i)
        k_token = column * STRIDE + i
        q_row = q_head + q_token.to(tl.int64)[:, None] * q_token_stride
        k_row = k_head + k_token.to(tl.int64)[:, None] * k_token_stride
        # Hopper's tensor cores cut off what they add to an fp32 sum: 4096 products in one sum were
        # off by 5e-6. So each token's products have a sum of their own.
        products = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first_dim in range(0, DIM, DIM_STEP):
            dims = first_dim + step_dims
            inside = (dims < DIM)[None, :]
            q = tl.load(q_row + dims[None, :], mask=(q_token < q_len)[:, None] & inside, other=0.0)
            k = tl.load(k_row + dims[None, :], mask=(k_token < k_len)[:, None] & inside, other=0.0)
            products = tl.dot(q, tl.trans(k), products, input_precision=PRECISION)
        acc += products
    if IS_CAUSAL:
        hidden = (key_start + column)[None, :] > (chunk_start + row)[:, None]
        acc = tl.where(hidden, float("-inf"), acc)

    at = (batch * NUM_HEADS + head) * num_rows + row.to(tl.int64)
    inside = (row < num_rows)[:, None] & (column < num_columns)[None, :]
    tl.store(out_ptr + at[:, None] * num_columns + column[None, :], acc, mask=inside)


@triton.jit
def _partial_stats_kernel(
    scores_ptr,
    max_ptr,
    sum_ptr,
    num_rows,
    num_columns,
    chunk_start,
    key_start,
    scale,
    batch_stride,
    head_stride,
    row_stride,
    NUM_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    first_row = tl.program_id(0) * ROWS
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    row = first_row + tl.arange(0, ROWS)
    exists = row < num_rows
    scores = scores_ptr + batch * batch_stride + head * head_stride
    scores += row.to(tl.int64)[:, None] * row_stride

    end = num_columns
    if IS_CAUSAL:
        end = tl.minimum(end, chunk_start + first_row + ROWS - key_start)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    for start in range(0, end, SEGMENT):
        column = start + tl.arange(0, SEGMENT)
        seen = exists[:, None] & (column < num_columns)[None, :]
        if IS_CAUSAL:
            seen &= (key_start + column)[None, :] <= (chunk_start + row)[:, None]
        x = tl.load(scores + column[None, :], mask=seen, other=float("-inf")) * scale
        new_max = tl.maximum(row_max, tl.max(x, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp(row_max - shift) + tl.sum(tl.exp(x - shift[:, None]), 1)
        row_max = new_max

    at = (batch * NUM_HEADS + head) * num_rows + row
    tl.store(max_ptr + at, row_max, mask=exists)
    tl.store(sum_ptr + at, row_sum, mask=exists)


@triton.jit
def _block_sum_kernel(
    scores_ptr,
    max_ptr,
    sum_ptr,
    out_ptr,
    num_counted,
    num_rows,
    num_columns,
    num_column_blocks,
    chunk_start,
    key_start,
    scale,
    batch_stride,
    head_stride,
    row_stride,
    NUM_HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    SEGMENT: tl.constexpr,
    IS_CAUSAL: tl.constexpr,
):
    num_segments = tl.cdiv(num_columns, SEGMENT)
    row_block = tl.program_id(0) // num_segments
    segment = tl.program_id(0) % num_segments
    head = tl.program_id(1).to(tl.int64)
    batch = tl.program_id(2).to(tl.int64)
    column = segment * SEGMENT + tl.arange(0, SEGMENT)
    scores = scores_ptr + batch * batch_stride + head * head_stride + column[None, :]
    stats = (batch * NUM_HEADS + head) * num_rows

    first = row_block * BLOCK
    end = tl.minimum(first + BLOCK, num_counted)
    if IS_CAUSAL:  # rows that see the segment's first column
        first = tl.maximum(first, key_start + segment * SEGMENT - chunk_start)
    sums = tl.zeros((SEGMENT // BLOCK,), tl.float32)
    for start in range(first, end, ROWS):
        row = start + tl.arange(0, ROWS)
        counts = row < end
        seen = counts[:, None] & (column < num_columns)[None, :]
        if IS_CAUSAL:
            seen &= (key_start + column)[None, :] <= (chunk_start + row)[:, None]
        row_max = tl.load(max_ptr + stats + row, mask=counts, other=0.0)
        row_sum = tl.load(sum_ptr + stats + row, mask=counts, other=0.0)
        # A row without keys has the maximum -inf and the sum 0: all of its weights are 0.
        shift = tl.where(row_max == float("-inf"), 0.0, row_max)
        divisor = tl.where(row_sum > 0, row_sum, 1.0)
        at = scores + row.to(tl.int64)[:, None] * row_stride
        x = tl.load(at, mask=seen, other=float("-inf")) * scale
        weights = tl.exp(x - shift[:, None]) / divisor[:, None]
        sums += tl.sum(tl.reshape(tl.sum(weights, 0), (SEGMENT // BLOCK, BLOCK)), 1)

    block = segment * (SEGMENT // BLOCK) + tl.arange(0, SEGMENT // BLOCK)
    num_row_blocks = tl.cdiv(num_rows, BLOCK)
    at = ((batch * NUM_HEADS + head) * num_row_blocks + row_block) * num_column_blocks + block
    tl.store(out_ptr + at, sums, mask=block < num_column_blocks)


def flat_group_gemm_fuse_reshape(
    query: torch.Tensor,
    key: torch.Tensor,
    stride: int,
    chunk_start: int,
    chunk_end: int,
    is_causal: bool = True,
    *,
    key_start: int = 0,
) -> torch.Tensor:
    """See `ops.xattn.flat_group_gemm_fuse_reshape`."""
    batch, num_heads, q_len, dim = query.shape
    k_len = key.shape[2]
    num_rows, num_columns = chunk_end - chunk_start, triton.cdiv(k_len, stride)
    scores = torch.empty(
        batch, num_heads, num_rows, num_columns, dtype=torch.float32, device=query.device
    )
    tile = 64 if query.dtype == torch.float32 else 128
    num_tiles = triton.cdiv(num_rows, tile) * triton.cdiv(num_columns, tile)
    _score_kernel[(num_tiles, num_heads, batch)](
        query,
        key,
        scores,
        q_len,
        k_len,
        num_rows,
        num_columns,
        chunk_start,
        key_start,
        *query.stride()[:3],
        *key.stride()[:3],
        NUM_HEADS=num_heads,
        GROUP=num_heads // key.shape[1],
        STRIDE=stride,
        DIM=dim,
        # The largest power of two in the dimension, so that 80 and 96 are not filled up to 128.
        DIM_STEP=max(16, min(64, dim & -dim)),
        ROWS=tile,
        COLUMNS=tile,
        IS_CAUSAL=is_causal,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=8,
    )
    return scores


def softmax_compute_partial_stats(
    scores: torch.Tensor,
    segment_size: int,
    chunk_start: int,
    scale: float,
    is_causal: bool = True,
    *,
    key_start: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.xattn.softmax_compute_partial_stats`."""
    batch, num_heads, num_rows, num_columns = scores.shape
    row_max, row_sum = (
        torch.empty(batch, num_heads, num_rows, dtype=torch.float32, device=scores.device)
        for _ in range(2)
    )
    rows = max(1, _SCORES_IN_FLIGHT // segment_size)
    _partial_stats_kernel[(triton.cdiv(num_rows, rows), num_heads, batch)](
        scores,
        row_max,
        row_sum,
        num_rows,
        num_columns,
        chunk_start,
        key_start,
        scale,
        *scores.stride()[:3],
        NUM_HEADS=num_heads,
        ROWS=rows,
        SEGMENT=segment_size,
        IS_CAUSAL=is_causal,
        num_warps=4,
    )
    return row_max, row_sum


def softmax_normalize_and_block_sum(
    scores: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    reshaped_block_size: int,
    segment_size: int,
    chunk_start: int,
    real_q_len: int,
    scale: float,
    is_causal: bool = True,
    *,
    key_start: int = 0,
) -> torch.Tensor:
    """See `ops.xattn.softmax_normalize_and_block_sum`."""
    batch, num_heads, num_rows, num_columns = scores.shape
    row_blocks = triton.cdiv(num_rows, reshaped_block_size)
    column_blocks = triton.cdiv(num_columns, reshaped_block_size)
    sums = torch.empty(
        batch, num_heads, row_blocks, column_blocks, dtype=torch.float32, device=scores.device
    )
    num_segments = triton.cdiv(num_columns, segment_size)
    _block_sum_kernel[(row_blocks * num_segments, num_heads, batch)](
        scores,
        row_max.contiguous(),
        row_sum.contiguous(),
        sums,
        min(num_rows, real_q_len - chunk_start),
        num_rows,
        num_columns,
        column_blocks,
        chunk_start,
        key_start,
        scale,
        *scores.stride()[:3],
        NUM_HEADS=num_heads,
        BLOCK=reshaped_block_size,
        ROWS=max(1, min(reshaped_block_size, _SCORES_IN_FLIGHT // segment_size)),
        SEGMENT=segment_size,
        IS_CAUSAL=is_causal,
        num_warps=4,
    )
    return sums
