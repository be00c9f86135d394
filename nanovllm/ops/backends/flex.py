"""Tile-sparse attention by PyTorch's `flex_attention`, compiled by Triton for any CUDA GPU."""

from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import cast

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from nanovllm.ops.backends.base import TILE, TileBackend


class FlexTiles(TileBackend):
    """`flex_attention` with a block mask; compiled at first use (seconds) for a shape of heads."""

    name = "flex"

    def reasons_against(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
        reasons = []
        if device.type != "cuda":
            reasons.append(f"needs a CUDA device, not {device.type}")
        if dtype not in (torch.float16, torch.bfloat16, torch.float32):
            reasons.append(f"needs float16, bfloat16 or float32, not {dtype}")
        if not 16 <= head_dim <= 256:
            reasons.append(f"needs a head_dim from 16 to 256, not {head_dim}")
        if find_spec("triton") is None:
            reasons.append("Triton is not installed: pip install triton")
        return reasons

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tiles: torch.Tensor,
        diagonal: int,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from nanovllm.ops.kernels.tile_lists import tile_lists

        lists = tile_lists(tiles, diagonal)
        # Both lists get one shape: some versions walk the second by the strides of the first.
        diagonal_index = torch.empty_like(lists.full_index)
        diagonal_index[..., :1] = lists.diagonal_index
        # [1, num_heads, length, head_dim]
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        counts = [t[None] for t in (lists.diagonal_count, lists.full_count)]
        indices = [t[None] for t in (diagonal_index, lists.full_index)]
        for tensor in (q, k, v, *counts, *indices):
            torch._dynamo.maybe_mark_dynamic(tensor, 2)
        for tensor in indices:
            torch._dynamo.maybe_mark_dynamic(tensor, 3)
        out, lse = _compiled()(q, k, v, *counts, *indices, softmax_scale)
        return out[0].transpose(0, 1).contiguous(), lse[0]


@cache
def _compiled() -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    # With `fullgraph` too many recompilations are an error, not a silent fall to slow code.
    return torch.compile(_attend, fullgraph=True)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    diagonal_count: torch.Tensor,
    full_count: torch.Tensor,
    diagonal_index: torch.Tensor,
    full_index: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = BlockMask.from_kv_blocks(
        diagonal_count,
        diagonal_index,
        full_count,
        full_index,
        BLOCK_SIZE=TILE,
        mask_mod=_not_after_query,
        seq_lengths=(query.shape[2], key.shape[2]),
        compute_q_blocks=False,  # only the backward pass reads them
    )
    out, aux = flex_attention(
        query,
        key,
        value,
        block_mask=mask,
        scale=softmax_scale,
        enable_gqa=True,
        # Its kernel for short queries shares the lists among the heads of a group.
        kernel_options={"FORCE_USE_FLEX_ATTENTION": True},
        return_aux=AuxRequest(lse=True),
    )
    return out, cast(torch.Tensor, aux.lse)


def _not_after_query(
    batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
) -> torch.Tensor:
    """Mask the diagonal tile: it starts at one position for queries and keys, whatever offset."""
    return key % TILE <= query % TILE
