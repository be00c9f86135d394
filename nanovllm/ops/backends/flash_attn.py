"""FlashAttention packages: `flash-attn-4` and `flash-attn`. The only file that imports them.

Both install into the namespace `flash_attn`: FlashAttention-4 as `flash_attn.cute`.
"""

from importlib.util import find_spec

import torch

from nanovllm.ops.backends.base import (
    TILE,
    AttentionBackend,
    TileBackend,
    compute_capability,
    gpu_reasons,
)


class FlashAttention4(AttentionBackend):
    """`flash-attn-4`, CuTe kernels compiled at first use (about 4 s); Hopper and Blackwell."""

    name = "fa4"
    masks_bottom_right = True

    def reasons_against(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
        needed = "needs a Hopper or Blackwell GPU (compute capability 9 or 10)"
        return _reasons_against_fa4(device, dtype, head_dim, (9, 10), needed)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        softmax_scale: float,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from flash_attn.cute.interface import flash_attn_func

        out, lse = flash_attn_func(
            query, key, value, softmax_scale=softmax_scale, causal=causal, return_lse=True
        )[:2]
        return out, lse


class FlashAttention4Tiles(TileBackend):
    """`flash-attn-4` over lists of key tiles; compiled at first use, for Hopper.

    Its kernel takes each list from the end, the tiles of the mask list first, and hides the columns
    past the last key in the first tile of a list alone: ascending lists have the partial tile
    there. A query tile without any key tile gives 0 and `-inf`.
    """

    name = "fa4"

    def reasons_against(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
        # Blackwell's kernel works on two query tiles at a time and refuses lists for single ones.
        # Past a head_dim of 128 Hopper's takes key tiles of 112 or 80 tokens.
        needed = "needs a Hopper GPU (compute capability 9) for tiles of 128 queries"
        return _reasons_against_fa4(device, dtype, head_dim, (9,), needed)

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tiles: torch.Tensor,
        diagonal: int,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q_len, k_len = query.shape[0], key.shape[0]
        # Rows from here on come after the last key and see all of the keys.
        seeing_all = min(q_len, max(0, k_len - diagonal * TILE))
        if seeing_all == 0:
            return _attend_to_tiles(query, key, value, tiles, None, softmax_scale)
        if seeing_all == q_len:
            return _attend_causally(query, key, value, tiles, diagonal, softmax_scale)
        # The causal kernel aligns the last row with the last key, so the rows that see all of the
        # keys are apart; those of them that share a query tile with causal rows are apart again.
        border = -(-seeing_all // TILE)
        results = [
            _attend_causally(
                query[:seeing_all], key, value, tiles[:, :border], diagonal, softmax_scale
            )
        ]
        for start, stop in ((seeing_all, min(border * TILE, q_len)), (border * TILE, q_len)):
            if start < stop:
                of_rows = tiles[:, start // TILE : -(-stop // TILE)]
                rows = query[start:stop]
                results.append(_attend_to_tiles(rows, key, value, of_rows, None, softmax_scale))
        outs, lses = zip(*results, strict=True)
        return torch.cat(outs), torch.cat(lses, dim=1)


def _attend_causally(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiles: torch.Tensor,
    diagonal: int,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend rows of which none comes after the last key."""
    visible = query.shape[0] + diagonal * TILE
    if visible <= 0:
        lse = query.new_full((query.shape[1], query.shape[0]), float("-inf"), dtype=torch.float32)
        return torch.zeros_like(query, memory_format=torch.contiguous_format), lse
    tiles = tiles[:, :, : -(-visible // TILE)]
    return _attend_to_tiles(query, key[:visible], value[:visible], tiles, diagonal, softmax_scale)


def _attend_to_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiles: torch.Tensor,
    diagonal: int | None,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Call the kernel: causally with the last row at the last key, or with `diagonal` None not."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import flash_attn_func

    from nanovllm.ops.kernels.tile_lists import tile_lists

    lists = tile_lists(tiles, diagonal)
    tensors = BlockSparseTensorsTorch(
        mask_block_cnt=lists.diagonal_count[None],
        mask_block_idx=lists.diagonal_index[None],
        full_block_cnt=lists.full_count[None],
        full_block_idx=lists.full_index[None],
        block_size=(TILE, TILE),
    )
    out, lse = flash_attn_func(
        query[None],
        key[None],
        value[None],
        softmax_scale=softmax_scale,
        causal=diagonal is not None,
        pack_gqa=False,  # packing would give the heads of a group one list
        block_sparse_tensors=tensors,
        return_lse=True,
    )[:2]
    return out[0], lse[0]


class FlashAttention2(AttentionBackend):
    """`flash-attn`, compiled from source; Ampere and later."""

    name = "fa2"
    masks_bottom_right = True

    def reasons_against(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
        reasons = gpu_reasons(device, dtype, head_dim, limit=256)
        if not _has_module("flash_attn.flash_attn_interface"):
            reasons.append("flash-attn is not installed: pip install 'nanovllm[flash-attn]'")
        elif not reasons and compute_capability(device)[0] < 8:
            reasons.append("needs compute capability 8 or later")
        return reasons

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        softmax_scale: float,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from flash_attn.flash_attn_interface import flash_attn_func

        out, lse, _ = flash_attn_func(
            query,
            key,
            value,
            softmax_scale=softmax_scale,
            causal=causal,
            return_attn_probs=True,
        )
        return out, lse


def _reasons_against_fa4(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    capabilities: tuple[int, ...],
    needed: str,
) -> list[str]:
    reasons = gpu_reasons(device, dtype, head_dim, limit=128)
    if not _has_module("flash_attn.cute.interface"):
        reasons.append("flash-attn-4 is not installed: pip install 'nanovllm[cuda]'")
    elif not reasons and compute_capability(device)[0] not in capabilities:
        reasons.append(needed)
    return reasons


def _has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
