"""Stage 1 of the tile estimate in kernels: scores that never leave, but as tile shares and LSEs.

Keys, and the queries of the group form, are read by TMA through views of the token-major input, in
which one residue of a run of groups is a box. What lies outside of a view reads as zero.

A block's keys come in the order `[place inside the tile, tile]`. So neighbouring columns of the
scores belong to different tiles, and the sum over a tile needs no exchange between threads.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from nanovllm.ops.block_sparse import TILE
from nanovllm.ops.kernels.tile_merge import row_lse
from nanovllm.ops.tile_estimate import TileShares, score_scale


@dataclass(frozen=True)
class Tuning:
    """Sizes of stage 1; `block_keys` and `num_warps` may change results by rounding."""

    block_rows: int
    """Rows of scores of a program, a power of two; at least 64 for tensor cores."""
    block_keys: int
    """Sampled keys of a block, a power of two; whole tiles: times stride a multiple of 128."""
    num_warps: int
    num_stages: int
    """Loads in flight."""
    group_rows: int = 4
    """Row blocks of each head that go through the keys side by side (group form only)."""


def default_tuning(estimator: str, dtype: torch.dtype, head_dim: int, stride: int) -> Tuning:
    """Return what is fast for inputs of this kind."""
    whole_tile = TILE // stride
    if dtype == torch.float32:  # no tensor cores, and few rows fit the registers
        return Tuning(32, max(32, whole_tile), 4, 2)
    if estimator == "group":
        return Tuning(128, 256, 8, 4)
    # Two programs share an SM, so that one's exponentials overlap the other's products.
    num_warps = 8 if stride < 64 else 4
    return Tuning(128, max(128 if head_dim <= 128 else 64, whole_tile), num_warps, 2)


@triton.jit
def _reduce_block(scores, scale, ROWS: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr):
    """Return tile shares `[ROWS, TILES]` and the LSE of `scale * scores`, `-inf` where hidden."""
    row_max = tl.max(scores, 1) * scale
    shift = tl.where(row_max == float("-inf"), 0.0, row_max)
    # As one operation by name: a row has the same bits with a mask before it and without.
    weights = tl.exp2(tl.fma(scores, scale, -shift[:, None]))
    sums = tl.sum(tl.reshape(weights, (ROWS, KEYS // TILES, TILES)), 1)
    total = tl.sum(sums, 1)
    total = tl.where(row_max == float("-inf"), 1.0, total)
    return sums * (1.0 / total)[:, None], row_max + tl.log2(total)


@triton.jit
def _hide(scores, block, limit, KEYS: tl.constexpr, TILES: tl.constexpr):
    """Return the block's scores, `-inf` from the key `limit` of each row on."""
    n = tl.arange(0, KEYS)
    column = block * KEYS + n % TILES * (KEYS // TILES) + n // TILES
    return tl.where(column[None, :] < limit[:, None], scores, float("-inf"))


@triton.jit
def _group_kernel(
    q_desc,
    k_desc,
    shares_ptr,
    lse_ptr,
    scale,
    num_rows,
    num_columns,
    ahead,
    num_row_blocks,
    num_blocks,
    GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_STEP: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    SPAN: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # The query heads of a KV head, and SPAN row blocks of each, meet a key block side by side.
    pid = tl.program_id(0)
    per_kv_head = num_row_blocks * num_blocks * GROUP
    kv_head = pid // per_kv_head
    pid = pid % per_kv_head
    per_span = SPAN * num_blocks * GROUP
    first_row_block = pid // per_span * SPAN
    span = tl.minimum(num_row_blocks - first_row_block, SPAN)
    pid = pid % per_span
    block = pid // (span * GROUP)
    head = kv_head * GROUP + pid % GROUP
    row_block = first_row_block + pid // GROUP % span

    first_row = row_block * ROWS
    # ahead: groups from the first key to the first query
    if block * KEYS <= ahead + tl.minimum(first_row + ROWS, num_rows) - 1:
        acc = tl.zeros((ROWS, KEYS), tl.float32)
        steps_per_token: tl.constexpr = DIM // DIM_STEP
        for step in range(STRIDE * steps_per_token):
            i = step // steps_per_token
            dim = step % steps_per_token * DIM_STEP
            q = q_desc.load([head, STRIDE - 1 - i, first_row, dim]).reshape(ROWS, DIM_STEP)
            k = k_desc.load([kv_head, i, 0, block * TILES, dim]).reshape(KEYS, DIM_STEP)
            acc = tl.dot(q, k.T, acc, input_precision=PRECISION)

        row = first_row + tl.arange(0, ROWS)
        limit = tl.minimum(ahead + row + 1, num_columns)
        acc = _hide(acc, block, limit, KEYS, TILES)
        shares, lse = _reduce_block(acc, scale, ROWS, KEYS, TILES)
        at = (head.to(tl.int64) * num_rows + row) * num_blocks + block
        exists = row < num_rows
        tl.store(lse_ptr + at, lse, mask=exists)
        to = shares_ptr + at[:, None] * TILES + tl.arange(0, TILES)[None, :]
        tl.store(to, shares.to(tl.float16), mask=exists[:, None])


@triton.jit
def _tile_sums(
    scores, scale, reference, ROWS: tl.constexpr, KEYS: tl.constexpr, TILES: tl.constexpr
):
    """Return each tile's sum of `2 ** (scale * score - reference)`, `[ROWS, TILES]`."""
    weights = tl.exp2(tl.fma(scores, scale, -reference[:, None]))
    sums = tl.sum(tl.reshape(weights, (ROWS, KEYS // TILES, TILES)), 1)
    # A sum that overflows outweighs all others, and makes no NaN when it is divided.
    return tl.minimum(sums, 1e30, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _row_kernel(
    q_ptr,
    k_desc,
    shares_ptr,
    base_ptr,
    lse_ptr,
    scale,
    q_len,
    num_columns,
    ahead,
    num_row_blocks,
    num_blocks,
    q_token_stride,
    q_head_stride,
    GROUP: tl.constexpr,
    STRIDE: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # The groups and the query heads of one KV head and residue are the rows of one matrix.
    pid = tl.program_id(0)
    first_row = pid % num_row_blocks * ROWS
    residue = pid // num_row_blocks % STRIDE
    kv_head = pid // num_row_blocks // STRIDE
    row = first_row + tl.arange(0, ROWS)
    group = row // GROUP
    head = (kv_head * GROUP + row % GROUP).to(tl.int64)
    token = group * STRIDE + residue
    exists = token < q_len
    dims = tl.arange(0, DIM_PAD)
    at = head * q_head_stride + token.to(tl.int64) * q_token_stride
    inside = exists[:, None] & (dims < DIM)[None, :]
    q = tl.load(q_ptr + at[:, None] + dims[None, :], mask=inside, other=0.0)

    # A row's own group is hidden from it if the sampled key there comes later than the row.
    phase = STRIDE - 1 - residue
    own = tl.where(phase > residue, 0, 1)
    limit = tl.minimum(ahead + group + own, num_columns)
    first_limit = tl.minimum(ahead + first_row // GROUP + own, num_columns)
    last_group = tl.minimum((first_row + ROWS - 1) // GROUP, (q_len - 1) // STRIDE)
    num_whole = tl.maximum(first_limit, 0) // KEYS
    num_seen = tl.minimum(tl.cdiv(tl.maximum(ahead + last_group + 1, 0), KEYS), num_blocks)
    row_at = head * q_len + token
    to = shares_ptr + (row_at * num_blocks * TILES)[:, None] + tl.arange(0, TILES)[None, :]

    # All sums of a row refer to its greatest score in the first block, which holds the sink. That
    # costs no look at the other blocks first, and no rescaling: bfloat16 reaches from 2**-126 to
    # 2**127, and scores so far below a greater one weigh nothing.
    k = k_desc.load([kv_head, phase, 0, 0, 0]).reshape(KEYS, DIM_PAD)
    scores = _hide(tl.dot(q, k.T, input_precision=PRECISION), 0, limit, KEYS, TILES)
    reference = tl.max(scores, 1) * scale
    reference = tl.where(reference == float("-inf"), 0.0, reference)
    sums = _tile_sums(scores, scale, reference, ROWS, KEYS, TILES)
    tl.store(to, sums.to(shares_ptr.dtype.element_ty), mask=exists[:, None])
    totals = sums
    for block in tl.range(1, num_whole, num_stages=STAGES):
        k = k_desc.load([kv_head, phase, 0, block * TILES, 0]).reshape(KEYS, DIM_PAD)
        scores = tl.dot(q, k.T, input_precision=PRECISION)
        sums = _tile_sums(scores, scale, reference, ROWS, KEYS, TILES)
        tl.store(to + block * TILES, sums.to(shares_ptr.dtype.element_ty), mask=exists[:, None])
        totals += sums
    for block in tl.range(tl.maximum(num_whole, 1), num_seen, num_stages=1):
        k = k_desc.load([kv_head, phase, 0, block * TILES, 0]).reshape(KEYS, DIM_PAD)
        scores = _hide(tl.dot(q, k.T, input_precision=PRECISION), block, limit, KEYS, TILES)
        sums = _tile_sums(scores, scale, reference, ROWS, KEYS, TILES)
        tl.store(to + block * TILES, sums.to(shares_ptr.dtype.element_ty), mask=exists[:, None])
        totals += sums
    tl.store(base_ptr + row_at, reference, mask=exists)
    tl.store(lse_ptr + row_at, reference + tl.log2(tl.sum(totals, 1)), mask=exists)


def tile_shares(
    query: torch.Tensor,
    key: torch.Tensor,
    q_offset: int,
    k_offset: int,
    estimator: str,
    stride: int,
    softmax_scale: float | None = None,
    tuning: Tuning | None = None,
) -> TileShares:
    """See `ops.tile_estimate.tile_shares`."""
    tuning = tuning or default_tuning(estimator, query.dtype, query.shape[2], stride)
    block_tokens = tuning.block_keys * stride
    if block_tokens % TILE:
        raise ValueError(f"blocks of {tuning.block_keys} keys at stride {stride} cut tiles")
    q_len, num_heads, _ = query.shape
    rows = q_len if estimator == "row" else triton.cdiv(q_len, stride)
    num_blocks, tiles = triton.cdiv(len(key), block_tokens), block_tokens // TILE
    ahead = (q_offset - k_offset) // stride
    scale = score_scale(softmax_scale, query.shape[2], estimator, stride)
    shape, device = (num_heads, rows, num_blocks, tiles), query.device
    args = ahead, stride, scale, tuning
    if estimator == "row":
        # Sums may lie far from the one reference of all blocks: bfloat16 has the range.
        dtype = torch.float32 if query.dtype == torch.float32 else torch.bfloat16
        shares = torch.empty(shape, dtype=dtype, device=device)
        base, lse = torch.empty(2, num_heads, rows, dtype=torch.float32, device=device)
        _launch_row(query, key, shares, base, lse, *args)
        base = base[..., None].expand(shape[:3])
    else:
        # Relative to their block's LSE they lie in [0, 1], where float16 is finer.
        shares = torch.empty(shape, dtype=torch.float16, device=device)
        base = torch.empty(shape[:3], dtype=torch.float32, device=device)
        _launch_group(query, key, shares, base, *args)
        lse = row_lse(base, q_offset - k_offset, stride, block_tokens)
    return TileShares(shares, base, lse, k_offset, triton.cdiv(len(key), TILE))


def _launch_group(query, key, shares, lse, ahead, stride, scale, tuning):
    num_heads, rows, num_blocks, tiles = shares.shape
    num_kv_heads, dim = key.shape[1:]
    # The largest power of two in the dimension, up to the 128 bytes of a swizzle.
    dim_step = min(64, dim & -dim)
    num_row_blocks = triton.cdiv(rows, tuning.block_rows)
    _group_kernel[(num_row_blocks * num_blocks * num_heads,)](
        _describe_queries(query, stride, [1, 1, tuning.block_rows, dim_step]),
        _describe_keys(key, stride, [1, 1, TILE // stride, tiles, dim_step]),
        shares,
        lse,
        scale,
        rows,
        triton.cdiv(len(key), stride),
        ahead,
        num_row_blocks,
        num_blocks,
        GROUP=num_heads // num_kv_heads,
        STRIDE=stride,
        DIM=dim,
        DIM_STEP=dim_step,
        ROWS=tuning.block_rows,
        KEYS=tuning.block_keys,
        TILES=tiles,
        SPAN=tuning.group_rows,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


def _launch_row(query, key, shares, base, lse, ahead, stride, scale, tuning):
    q_len, num_heads, dim = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    num_row_blocks = triton.cdiv(triton.cdiv(q_len, stride) * group, tuning.block_rows)
    dim_pad = triton.next_power_of_2(dim)
    _row_kernel[(num_row_blocks * stride * num_kv_heads,)](
        query,
        _describe_keys(key, stride, [1, 1, TILE // stride, shares.shape[3], dim_pad]),
        shares,
        base,
        lse,
        scale,
        q_len,
        triton.cdiv(len(key), stride),
        ahead,
        num_row_blocks,
        shares.shape[2],
        *query.stride()[:2],
        GROUP=group,
        STRIDE=stride,
        DIM=dim,
        DIM_PAD=dim_pad,
        ROWS=tuning.block_rows,
        KEYS=tuning.block_keys,
        TILES=shares.shape[3],
        STAGES=tuning.num_stages,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
    )


def _describe_queries(query: torch.Tensor, stride: int, box: list[int]) -> TensorDescriptor:
    """Return `[heads, stride, groups, head_dim]`."""
    x, token_step, head_step = _readable(query, stride)
    shape = [x.shape[1], stride, len(x) // stride, x.shape[2]]
    return TensorDescriptor(x, shape, [head_step, token_step, stride * token_step, 1], box)


def _describe_keys(key: torch.Tensor, stride: int, box: list[int]) -> TensorDescriptor:
    """Return `[heads, stride, groups of a tile, tiles, head_dim]`."""
    x, token_step, head_step = _readable(key, TILE)
    shape = [x.shape[1], stride, TILE // stride, len(x) // TILE, x.shape[2]]
    steps = [head_step, token_step, stride * token_step, TILE * token_step, 1]
    return TensorDescriptor(x, shape, steps, box)


def _readable(x: torch.Tensor, multiple: int) -> tuple[torch.Tensor, int, int]:
    """Return `x`, its token stride and its head stride as TMA can read them.

    That is a copy if a stride or the start is none of 16 bytes, or if tokens have to be added, as
    zeros, for a multiple of `multiple`: in the last chunk of a prompt.
    """
    if len(x) % multiple:
        x = F.pad(x, (0, 0, 0, 0, 0, -len(x) % multiple))
    unit = 16 // x.element_size()
    num_tokens, num_heads, head_dim = x.shape
    # The stride of an axis of length 1 means nothing, but it has to be allowed.
    steps = [
        step if size > 1 else unit for step, size in zip(x.stride()[:2], x.shape[:2], strict=True)
    ]
    if x.data_ptr() % 16 or any(step <= 0 or step % unit for step in steps):
        row = triton.cdiv(head_dim, unit) * unit
        x = x.new_empty(num_tokens, num_heads, row)[..., :head_dim].copy_(x)
        steps = [num_heads * row, row]
    return x, steps[0], steps[1]
