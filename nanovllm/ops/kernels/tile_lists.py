"""Lists of the kept key tiles of each query tile, as tile-sparse attention kernels read them."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

_COLUMNS = 1024  # tiles that a program looks at a time, by four warps: 8 a thread


class TileLists(NamedTuple):
    """For each (head, query tile) the key tiles without a mask, and the one with a causal mask."""

    full_count: torch.Tensor
    """int32 `[num_q_heads, num_q_tiles]`: key tiles to compute whole."""
    full_index: torch.Tensor
    """int32 `[num_q_heads, num_q_tiles, num_k_tiles]`: the first `full_count` are their numbers, in
    ascending order; what follows is undefined."""
    diagonal_count: torch.Tensor
    """int32 `[num_q_heads, num_q_tiles]`: 1 where the diagonal tile is kept, else 0."""
    diagonal_index: torch.Tensor
    """int32 `[num_q_heads, num_q_tiles, 1]`: the diagonal tile, 0 where there is none."""


@triton.jit(do_not_specialize=["diagonal"])
def _tile_lists_kernel(
    tiles_ptr,
    count_ptr,
    index_ptr,
    diagonal_count_ptr,
    diagonal_index_ptr,
    num_columns,
    diagonal,
    head_stride,
    row_stride,
    column_stride,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    at = head * tl.num_programs(0) + row
    tiles = tiles_ptr + head * head_stride + row.to(tl.int64) * row_stride
    on_diagonal = row + diagonal
    exists = (on_diagonal >= 0) & (on_diagonal < num_columns)
    own = tl.load(tiles + on_diagonal.to(tl.int64) * column_stride, mask=exists, other=0)
    tl.store(diagonal_count_ptr + at, (own != 0).to(tl.int32))
    tl.store(diagonal_index_ptr + at, tl.where(exists, on_diagonal, 0))
    end = tl.minimum(num_columns, tl.maximum(on_diagonal, 0))
    index = index_ptr + at * num_columns
    count = 0
    for start in range(0, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        tile = tl.load(tiles + column.to(tl.int64) * column_stride, mask=column < end, other=0)
        kept = (tile != 0).to(tl.int32)
        tl.store(index + count + tl.cumsum(kept, 0) - 1, column, mask=tile != 0)
        count += tl.sum(kept, 0)
    tl.store(count_ptr + at, count)


def tile_lists(tiles: torch.Tensor, diagonal: int | None) -> TileLists:
    """List the kept key tiles of each query tile.

    Args:
        tiles: bool `[num_q_heads, num_q_tiles, num_k_tiles]` of any strides.
        diagonal: key tile `i + diagonal` holds the tokens of query tile i. It gets a list of its
            own, since its keys need a mask, and tiles after it are left out. None lists all.

    Returns:
        The lists, on the device of `tiles`. Does not synchronise with the host.
    """
    num_heads, num_rows, num_columns = tiles.shape
    full_count = torch.empty(num_heads, num_rows, dtype=torch.int32, device=tiles.device)
    full_index = full_count.new_empty(num_heads, num_rows, num_columns)
    diagonal_count = torch.empty_like(full_count)
    diagonal_index = full_count.new_empty(num_heads, num_rows, 1)
    _tile_lists_kernel[(num_rows, num_heads)](
        tiles.view(torch.uint8),
        full_count,
        full_index,
        diagonal_count,
        diagonal_index,
        num_columns,
        num_columns if diagonal is None else diagonal,
        *tiles.stride(),
        COLUMNS=max(16, min(_COLUMNS, triton.next_power_of_2(num_columns))),
        num_warps=4,
    )
    return TileLists(full_count, full_index, diagonal_count, diagonal_index)
