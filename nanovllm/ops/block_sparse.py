"""Tile-sparse attention with LSE: causal attention of which only chosen tiles are computed."""

from functools import lru_cache

import torch

from nanovllm.ops.backends import TileBackend, resolve_tile_backend
from nanovllm.ops.backends.base import TILE

__all__ = ["TILE", "block_sparse_attention", "causal_tiles", "num_causal_tiles"]


def block_sparse_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiles: torch.Tensor,
    q_offset: int,
    k_offset: int,
    softmax_scale: float,
    backend: TileBackend | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend causally inside the kept tiles and return the output and the LSE of their logits.

    Query row i stands at absolute position `q_offset + i`, key j at `k_offset + j`. A key after a
    query is hidden whatever `tiles` says; keys that all come before the queries are all visible.

    Args:
        query: `[q_len, num_q_heads, head_dim]`.
        key, value: `[k_len, num_kv_heads, head_dim]`, `num_q_heads` a multiple of `num_kv_heads`;
            heads are shared, never expanded. Any lengths; on all three the last axis is
            contiguous and the other strides are free.
        tiles: bool `[num_q_heads, num_q_tiles, num_k_tiles]` on the query's device: whether the
            tile of `TILE` queries and `TILE` keys is computed. The last ones may be partial.
        q_offset, k_offset: multiples of `TILE`.
        softmax_scale: factor of the logits.
        backend: kernel to use; None takes the best one for the query's device.

    Returns:
        Output like `query`, contiguous, and the LSE, fp32 `[num_q_heads, q_len]`. A row whose tiles
        hold no visible key is 0, and its LSE `-inf`, so that results over disjoint pieces of the
        keys merge with `merge_attention_outputs`. With all tiles kept this is dense attention
        (FlashAttention, section 3.3, block-sparse). Does not synchronise on a GPU.

    Raises:
        ValueError: shapes, offsets or dtypes that do not fit each other.
        BackendUnavailableError: nothing here computes this on the query's device.
    """
    _check(query, key, value, tiles, q_offset, k_offset)
    q_len, num_q_heads, head_dim = query.shape
    backend = backend or _default_backend(query.device, query.dtype, head_dim)
    if q_len == 0 or key.shape[0] == 0:
        lse = query.new_full((num_q_heads, q_len), float("-inf"), dtype=torch.float32)
        return query.new_zeros(query.shape), lse
    diagonal = (q_offset - k_offset) // TILE
    return backend.attend(query, key, value, tiles, diagonal, softmax_scale)


def causal_tiles(
    q_len: int, k_len: int, q_offset: int, k_offset: int, device: torch.device
) -> torch.Tensor:
    """Return which tiles hold a visible key, bool `[num_q_tiles, num_k_tiles]` on `device`.

    Lengths and offsets in tokens, as in `block_sparse_attention`. Does not synchronise.
    """
    q_tiles = torch.arange(-(-q_len // TILE), device=device) + q_offset // TILE
    k_tiles = torch.arange(-(-k_len // TILE), device=device) + k_offset // TILE
    return k_tiles <= q_tiles[:, None]


def num_causal_tiles(q_len: int, q_offset: int) -> int:
    """Return how many tiles hold a key that queries from `q_offset` on see, of one head.

    In tokens; `q_offset` is a multiple of `TILE`, and the keys begin at 0. The sum of
    `causal_tiles(q_len, q_offset + q_len, q_offset, 0)` without a device.
    """
    count = -(-q_len // TILE)
    return count * (q_offset // TILE) + count * (count + 1) // 2


def _check(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    tiles: torch.Tensor,
    q_offset: int,
    k_offset: int,
) -> None:
    q_len, num_q_heads, head_dim = query.shape
    k_len, num_kv_heads, _ = key.shape
    if key.shape != value.shape or key.shape[2] != head_dim or num_q_heads % num_kv_heads:
        raise ValueError(
            f"queries of shape {list(query.shape)} do not fit keys of shape {list(key.shape)} and "
            f"values of shape {list(value.shape)}"
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"dtypes differ: {query.dtype}, {key.dtype}, {value.dtype}")
    for name, offset in (("q_offset", q_offset), ("k_offset", k_offset)):
        if offset < 0 or offset % TILE:
            raise ValueError(f"{name}={offset} is no multiple of {TILE}, the side of a tile")
    fitting = [num_q_heads, -(-q_len // TILE), -(-k_len // TILE)]
    if list(tiles.shape) != fitting or tiles.dtype != torch.bool or tiles.device != query.device:
        raise ValueError(
            f"tiles of shape {list(tiles.shape)}, {tiles.dtype}, on {tiles.device}; "
            f"needed are {fitting}, {torch.bool}, on {query.device}"
        )


@lru_cache
def _default_backend(device: torch.device, dtype: torch.dtype, head_dim: int) -> TileBackend:
    return resolve_tile_backend("auto", device, dtype, head_dim)
