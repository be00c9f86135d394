"""Stage 2 of the tile estimate in kernels: the merge of tile shares over the blocks of keys."""

from collections.abc import Sequence
from functools import reduce

import torch
import triton
import triton.language as tl

from nanovllm.ops.block_sparse import TILE
from nanovllm.ops.tile_estimate import TileShares, empty_masses

_LSE_ROWS = 64
_LSE_STEP = 16  # blocks at a time: part of the order of the sums
_MERGE_ROWS = 8
_MERGE_TILES = 128  # key tiles of one program of the merge


@triton.jit
def _row_lse_kernel(
    lse_ptr,
    total_ptr,
    num_rows,
    num_blocks,
    ahead,
    ROW_TOKENS: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    position = ahead + row * ROW_TOKENS  # tokens from the first key
    at = tl.program_id(1).to(tl.int64) * num_rows + row
    last = ahead + (tl.program_id(0) + 1) * ROWS * ROW_TOKENS - 1
    num_seen = tl.minimum(tl.cdiv(tl.maximum(last + 1, 0), BLOCK_TOKENS), num_blocks)
    row_max = tl.full((ROWS,), float("-inf"), tl.float32)
    row_sum = tl.zeros((ROWS,), tl.float32)
    for first in range(0, num_seen, STEP):
        block = first + tl.arange(0, STEP)
        seen = exists[:, None] & ((block * BLOCK_TOKENS)[None, :] <= position[:, None])
        seen &= (block < num_blocks)[None, :]
        x = tl.load(
            lse_ptr + at[:, None] * num_blocks + block[None, :], mask=seen, other=float("-inf")
        )
        new_max = tl.maximum(row_max, tl.max(x, 1))
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2(row_max - shift) + tl.sum(tl.exp2(x - shift[:, None]), 1)
        row_max = new_max
    row_sum = tl.where(row_max == float("-inf"), 1.0, row_sum)
    tl.store(total_ptr + at, row_max + tl.log2(row_sum), mask=exists)


@triton.jit
def _merge_kernel(
    shares_ptr,
    base_ptr,
    total_ptr,
    masses_ptr,
    peaks_ptr,
    num_rows,
    num_blocks,
    num_tiles,
    ahead,
    num_segments,
    base_row_stride,
    base_block_stride,
    head_stride,
    row_stride,
    ROW_TOKENS: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILES: tl.constexpr,
    IS_MEAN: tl.constexpr,
    WITH_PEAKS: tl.constexpr,
):
    q_tile = tl.program_id(0) // num_segments
    block = tl.program_id(0) % num_segments * BLOCKS + tl.arange(0, BLOCKS)
    head = tl.program_id(1).to(tl.int64)
    tile_rows: tl.constexpr = TILE_TOKENS // ROW_TOKENS
    block_tokens: tl.constexpr = TILES * TILE_TOKENS
    # Tiles after the diagonal are 0 already.
    first_token = tl.program_id(0) % num_segments * BLOCKS * block_tokens
    if first_token < ahead + (q_tile + 1) * TILE_TOKENS:
        tile = block[:, None] * TILES + tl.arange(0, TILES)[None, :]
        sums = tl.zeros((ROWS, BLOCKS, TILES), tl.float32)
        peaks = tl.zeros((ROWS, BLOCKS, TILES), tl.float32)
        counted = tl.zeros((ROWS,), tl.float32)
        for first in range(0, tile_rows, ROWS):
            row = q_tile * tile_rows + first + tl.arange(0, ROWS)
            exists = row < num_rows
            position = ahead + row * ROW_TOKENS  # tokens from the first key
            at = head * num_rows + row
            total = tl.load(total_ptr + at, mask=exists, other=float("-inf"))
            shift = tl.where(total == float("-inf"), 0.0, total)
            seen = exists[:, None] & ((block * block_tokens)[None, :] <= position[:, None])
            seen &= (block < num_blocks)[None, :]
            base_at = at[:, None] * base_row_stride + block[None, :] * base_block_stride
            base = tl.load(base_ptr + base_at, mask=seen, other=float("-inf"))
            weight = tl.exp2(base - shift[:, None])
            at = at[:, None] * num_blocks + block[None, :]
            at = at[:, :, None] * TILES + tl.arange(0, TILES)[None, None, :]
            shares = tl.load(shares_ptr + at, mask=seen[:, :, None], other=0.0)
            part = shares.to(tl.float32) * weight[:, :, None]
            sums += part
            counted += tl.where(total > float("-inf"), 1.0, 0.0)
            if WITH_PEAKS:
                peaks = tl.maximum(peaks, part)
        mass = tl.sum(sums, 0)
        if IS_MEAN:
            mass = mass / tl.maximum(tl.sum(counted, 0), 1.0)
        to = head * head_stride + q_tile.to(tl.int64) * row_stride + tile
        tl.store(masses_ptr + to, mass, mask=tile < num_tiles)
        if WITH_PEAKS:
            tl.store(peaks_ptr + to, tl.max(peaks, 0), mask=tile < num_tiles)


def merge_tile_shares(
    pieces: Sequence[TileShares],
    q_offset: int,
    estimator: str,
    stride: int,
    *,
    with_peaks: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """See `ops.tile_estimate.merge_tile_shares`."""
    row_tokens = stride if estimator == "group" else 1
    masses, peaks = empty_masses(pieces, row_tokens, with_peaks)
    total = reduce(torch.logaddexp2, [piece.lse for piece in pieces])
    for piece in pieces:
        num_heads, num_rows, num_blocks, tiles = piece.shares.shape
        blocks = max(1, _MERGE_TILES // tiles)
        num_segments = triton.cdiv(num_blocks, blocks)
        first = piece.k_offset // TILE
        _merge_kernel[(masses.shape[1] * num_segments, num_heads)](
            piece.shares,
            piece.base,
            total,
            masses[..., first:],
            masses[..., first:] if peaks is None else peaks[..., first:],
            num_rows,
            num_blocks,
            piece.num_tiles,
            q_offset - piece.k_offset,
            num_segments,
            *piece.base.stride()[1:],
            *masses.stride()[:2],
            ROW_TOKENS=row_tokens,
            TILE_TOKENS=TILE,
            ROWS=min(_MERGE_ROWS, TILE // row_tokens),
            BLOCKS=blocks,
            TILES=tiles,
            IS_MEAN=estimator == "row",
            WITH_PEAKS=with_peaks,
            num_warps=4,
        )
    return masses, peaks


def row_lse(
    block_lse: torch.Tensor, ahead: int, row_tokens: int, block_tokens: int
) -> torch.Tensor:
    """Return each row's LSE to base 2, fp32 `[heads, rows]`, from those of its blocks of keys.

    Args:
        block_lse: fp32 `[heads, rows, blocks]`; blocks wholly after a row are not read.
        ahead: tokens from the first key to the first row.
        row_tokens, block_tokens: tokens of a row, and of a block.
    """
    num_heads, num_rows, num_blocks = block_lse.shape
    total = torch.empty(num_heads, num_rows, dtype=torch.float32, device=block_lse.device)
    _row_lse_kernel[(triton.cdiv(num_rows, _LSE_ROWS), num_heads)](
        block_lse,
        total,
        num_rows,
        num_blocks,
        ahead,
        ROW_TOKENS=row_tokens,
        BLOCK_TOKENS=block_tokens,
        ROWS=_LSE_ROWS,
        STEP=_LSE_STEP,
        num_warps=4,
    )
    return total
