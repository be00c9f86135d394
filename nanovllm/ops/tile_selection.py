"""The selection of key tiles by their masses."""

import torch

from nanovllm.ops.xattn import find_blocks_chunked


def select_tiles(
    masses: torch.Tensor,
    threshold: float | torch.Tensor,
    q_tile0: int,
    peaks: torch.Tensor | None = None,
    gamma: float | None = None,
) -> torch.Tensor:
    """Return which key tiles each query tile keeps.

    The first key tile and the one on the diagonal are kept in any case, and their mass counts
    first. The others follow by descending mass, the lower index first among equals; one is kept if
    the mass before it is less than `threshold` of the row's, which is the sum of all of its masses
    up to the diagonal. Nothing above the diagonal is kept.

    Args:
        masses: fp32 `[num_q_heads, q_tiles, k_tiles]`, none negative; the last axis is contiguous,
            as of `peaks`.
        threshold: one for all, or fp32 `[num_q_heads]` on the masses' device; from 1 on every tile
            up to the diagonal is kept.
        q_tile0: absolute index of the first query tile.
        peaks, gamma: keep also the tiles whose peak is more than gamma (the guard); fp32, like
            `masses`. Both or neither.

    Returns:
        bool, like `masses`. Does not synchronise.

    Raises:
        ValueError: shapes or dtypes that do not fit, or one of `peaks` and `gamma` alone.
    """
    _check(masses, threshold, peaks, gamma)
    if masses.is_cuda:
        from nanovllm.ops.kernels import tile_selection as kernels

        return kernels.select_tiles(masses, threshold, q_tile0, peaks, gamma)
    mask = find_blocks_chunked(masses[None], q_tile0, threshold, None, False)[0]
    if peaks is None or gamma is None:
        return mask
    column = torch.arange(masses.shape[2])
    diagonal = q_tile0 + torch.arange(masses.shape[1])[:, None]
    return mask | ((peaks > gamma) & (column <= diagonal))


def _check(
    masses: torch.Tensor,
    threshold: float | torch.Tensor,
    peaks: torch.Tensor | None,
    gamma: float | None,
) -> None:
    if (peaks is None) != (gamma is None):
        raise ValueError("one of peaks and gamma without the other")
    for name, x in (("masses", masses), ("peaks", masses if peaks is None else peaks)):
        fits = x.dim() == 3 and x.shape == masses.shape and x.dtype == torch.float32
        if not fits or (x.shape[2] > 1 and x.stride(2) != 1):
            raise ValueError(
                f"{name} of shape {list(x.shape)}, {x.dtype} and strides {x.stride()}; needed is "
                "float32 [num_q_heads, q_tiles, k_tiles], contiguous in the last axis"
            )
    if isinstance(threshold, torch.Tensor) and threshold.shape not in ((), masses.shape[:1]):
        raise ValueError(f"threshold of shape {list(threshold.shape)} for {len(masses)} heads")
