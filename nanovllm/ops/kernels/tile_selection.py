"""Selection of key tiles, one program a row, by bisection instead of a sort."""

import torch
import triton
import triton.language as tl

_LAST_BIT = 30  # the highest bit of a finite fp32 that is not negative
_COLUMNS_PER_WARP = 1024


@triton.jit
def _select_kernel(
    masses_ptr,
    peaks_ptr,
    threshold_ptr,
    mask_ptr,
    gamma,
    q_tile0,
    num_rows,
    num_columns,
    masses_head_stride,
    masses_row_stride,
    peaks_head_stride,
    peaks_row_stride,
    COLUMNS: tl.constexpr,
    LAST_BIT: tl.constexpr,
    HAS_GUARD: tl.constexpr,
):
    head = tl.program_id(0) // num_rows
    row = (tl.program_id(0) % num_rows).to(tl.int64)
    diagonal = q_tile0 + tl.program_id(0) % num_rows
    column = tl.arange(0, COLUMNS)
    seen = (column < num_columns) & (column <= diagonal)
    forced = ((column == 0) | (column == diagonal)) & seen
    at = head.to(tl.int64) * masses_head_stride + row * masses_row_stride
    mass = tl.load(masses_ptr + at + column, mask=seen, other=0.0)
    threshold = tl.load(threshold_ptr + head)

    # Sums in fp64, rounded to fp32: as good as exact, so no order of summation moves a tile.
    wide = mass.to(tl.float64)
    free = tl.where(forced, 0.0, wide)
    need = tl.sum(wide, 0).to(tl.float32) * threshold
    first = tl.sum(tl.where(forced, wide, 0.0), 0)
    # Numbers that are not negative are ordered like their bits; -1 comes before all.
    bits = tl.where(
        seen & (column != 0) & (column != diagonal), mass.to(tl.int32, bitcast=True), -1
    )

    # Find, bit by bit, the greatest number that with all greater masses is enough. All masses
    # above it are needed, none below it, and of those equal to it the first few.
    cut = tl.full((), 0, tl.int32)
    for i in range(LAST_BIT + 1):
        trial = cut + (1 << (LAST_BIT - i))
        from_trial = first + tl.sum(tl.where(bits >= trial, free, 0.0), 0)
        cut = tl.where(from_trial.to(tl.float32) >= need, trial, cut)
    before = first + tl.sum(tl.where(bits > cut, free, 0.0), 0)
    ties = bits == cut
    rank = tl.cumsum(ties.to(tl.int32), 0) - ties.to(tl.int32)
    before += rank.to(tl.float64) * cut.to(tl.float32, bitcast=True).to(tl.float64)
    keep = forced | (bits > cut) | (ties & (before.to(tl.float32) < need))
    keep = tl.where(threshold >= 1, seen, keep)
    if HAS_GUARD:
        at = head.to(tl.int64) * peaks_head_stride + row * peaks_row_stride
        keep |= tl.load(peaks_ptr + at + column, mask=seen, other=0.0) > gamma
    keep &= seen
    at = tl.program_id(0).to(tl.int64) * num_columns
    tl.store(mask_ptr + at + column, keep.to(tl.int8), mask=column < num_columns)


def select_tiles(
    masses: torch.Tensor,
    threshold: float | torch.Tensor,
    q_tile0: int,
    peaks: torch.Tensor | None = None,
    gamma: float | None = None,
) -> torch.Tensor:
    """See `ops.tile_selection.select_tiles`."""
    num_heads, num_rows, num_columns = masses.shape
    if not isinstance(threshold, torch.Tensor):
        # Filled on the device; a copy from the host would wait.
        threshold = torch.full((), threshold, dtype=torch.float32, device=masses.device)
    mask = torch.empty(masses.shape, dtype=torch.int8, device=masses.device)
    columns = triton.next_power_of_2(num_columns)
    guard = masses if peaks is None else peaks
    _select_kernel[(num_heads * num_rows,)](
        masses,
        guard,
        threshold.float().expand(num_heads).contiguous(),
        mask,
        0.0 if gamma is None else gamma,
        q_tile0,
        num_rows,
        num_columns,
        *masses.stride()[:2],
        *guard.stride()[:2],
        COLUMNS=columns,
        LAST_BIT=_LAST_BIT,
        HAS_GUARD=peaks is not None,
        num_warps=max(1, min(16, columns // _COLUMNS_PER_WARP)),
    )
    return mask.view(torch.bool)
