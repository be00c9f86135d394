"""The mass of attention that each tile is estimated to hold, for both estimators, in one pass.

The keys are cut into blocks, and every row of scores is reduced block by block to

    lse = log2 sum exp(score)                       over the block
    share[tile] = sum exp(score) over the tile / sum exp(score) over the block

and then forgotten. A tile's part of the whole row is `share * 2 ** (lse - row's lse)`, as where
attention over parts of the keys is merged. So keys are read once, in pieces if need be, and the
result is that of the softmax over all of them. `ops.xattn` has XAttention's own stages, which keep
the scores.
"""

from collections.abc import Sequence
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F

from nanovllm.ops.block_sparse import TILE

_LOG2_E = 1.4426950408889634

# What the torch form takes at a time, in tokens on absolute positions. A matrix product may round
# by its shape; these are filled up with zeros, so it has one shape however the input is cut.
_PIECE_TOKENS = 1024
_BLOCK_TOKENS = 2048


class TileShares(NamedTuple):
    """One piece of the keys as every row of scores sees it, block by block.

    A row is a query group for the group estimator, a query token for the row estimator. Blocks
    that lie wholly after a row are not set, and no one may read them.
    """

    shares: torch.Tensor
    """`[num_q_heads, rows, blocks, tiles_per_block]`, fp32 or, on CUDA, a half type: each tile's
    sum of exponentials, over `2 ** base`; 0 where the row sees nothing of the tile, and
    after the last tile."""
    base: torch.Tensor
    """fp32 `[num_q_heads, rows, blocks]`; may be expanded along the blocks."""
    lse: torch.Tensor
    """`[num_q_heads, rows]`: each row's LSE over the piece, to base 2; `-inf` where it sees
    nothing. fp32 on CUDA, fp64 on CPU."""
    k_offset: int
    """Absolute position of the piece's first key."""
    num_tiles: int
    """Key tiles of the piece; the last block may have room for more."""


def estimate_tiles(
    query: torch.Tensor,
    key: torch.Tensor,
    q_offset: int,
    estimator: str,
    stride: int,
    softmax_scale: float | None = None,
    *,
    with_peaks: bool = False,
    chunk_size: int = 16384,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the estimated mass of each tile, causal, and on request its peak.

    `"group"` is XAttention's estimate (section 2.1), the softmax over the antidiagonal sums of
    groups: a query tile's masses add up to the number of its groups. `"row"` is ours: every query
    row has its own softmax over the keys of its antidiagonals, and the masses, the mean over the
    tile's rows, add up to 1. `xattn_reference` defines both. A tile's mass is the same to the last
    bit whatever `chunk_size` is, and wherever the caller cuts the queries at tile borders.

    Args:
        query: `[q_len, num_q_heads, head_dim]`, fp32, fp16 or bf16. The last axis is contiguous,
            as of `key`; the other strides are free.
        key: `[q_offset + q_len, num_kv_heads, head_dim]`, of the query's dtype: all keys up to the
            last query. Each head serves `num_q_heads / num_kv_heads` query heads.
        q_offset: absolute position of the first query, a multiple of 128.
        estimator: `"group"` or `"row"`.
        stride: tokens a group, divides 128.
        softmax_scale: factor of the logits, positive; None means `head_dim ** -0.5`.
        with_peaks: return also the greatest share that any one row puts into the tile (for
            `"group"`, any one query group).
        chunk_size: queries that are estimated at a time, a multiple of 128; bounds the scratch, of
            `2 * num_q_heads * chunk_size / row_tokens * k_len / 128` bytes on CUDA and twice that
            on CPU, where `row_tokens` is `stride` for `"group"` and 1 for `"row"`.

    Returns:
        Masses and peaks (or None), fp32 `[num_q_heads, q_tiles, k_tiles]`; 0 above the diagonal.
        Does not synchronise.

    Raises:
        ValueError: shapes, dtypes, offsets or sizes that do not fit.
    """
    q_len, num_q_heads, _ = query.shape
    if len(key) != q_offset + q_len:
        raise ValueError(f"{len(key)} keys, but the last query is at {q_offset + q_len - 1}")
    if chunk_size <= 0 or chunk_size % TILE:
        raise ValueError(f"chunk_size={chunk_size} is no positive multiple of {TILE}")

    def estimate(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        start, end = q_offset + first, q_offset + last
        piece = tile_shares(
            query[first:last], key[:end], start, 0, estimator, stride, softmax_scale
        )
        return merge_tile_shares([piece], start, estimator, stride, with_peaks=with_peaks)

    if q_len <= chunk_size:
        return estimate(0, q_len)
    shape = num_q_heads, _tiles(q_len), _tiles(len(key))
    masses = torch.zeros(shape, dtype=torch.float32, device=query.device)
    peaks = torch.zeros_like(masses) if with_peaks else None
    for first in range(0, q_len, chunk_size):
        last = min(first + chunk_size, q_len)
        chunk_masses, chunk_peaks = estimate(first, last)
        part = (slice(None), slice(first // TILE, _tiles(last)), slice(_tiles(q_offset + last)))
        masses[part] = chunk_masses
        if peaks is not None and chunk_peaks is not None:
            peaks[part] = chunk_peaks
    return masses, peaks


def tile_shares(
    query: torch.Tensor,
    key: torch.Tensor,
    q_offset: int,
    k_offset: int,
    estimator: str,
    stride: int,
    softmax_scale: float | None = None,
) -> TileShares:
    """Stage 1: return the tile shares and the LSEs of one piece of the keys.

    Arguments, errors and synchronisation as of `estimate_tiles`, and

    Args:
        key: `[k_len, num_kv_heads, head_dim]`. Pieces may come in any order and must cover the
            keys up to the last query; those after it add nothing.
        k_offset: absolute position of the first key, a multiple of 128. A piece of no whole number
            of tiles ends at or after the last query.
    """
    _check_inputs(query, key, softmax_scale)
    _check_positions(len(query), len(key), q_offset, k_offset, estimator, stride)
    args = query, key, q_offset, k_offset, estimator, stride, softmax_scale
    if query.is_cuda:
        from nanovllm.ops.kernels import tile_estimate as kernels

        return kernels.tile_shares(*args)
    return _torch_tile_shares(*args)


def merge_tile_shares(
    pieces: Sequence[TileShares],
    q_offset: int,
    estimator: str,
    stride: int,
    *,
    with_peaks: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stage 2: return the masses and peaks of the tiles of all pieces.

    Arguments and results as of `estimate_tiles`, `k_tiles` up to the last piece's end, and

    Args:
        pieces: what stage 1 returned for the same queries and each piece of the keys, at least one.
    """
    if not pieces:
        raise ValueError("no pieces of the keys to merge")
    if pieces[0].shares.is_cuda:
        from nanovllm.ops.kernels import tile_merge

        return tile_merge.merge_tile_shares(
            pieces, q_offset, estimator, stride, with_peaks=with_peaks
        )
    return _torch_merge(pieces, q_offset, estimator, stride, with_peaks)


def score_scale(softmax_scale: float | None, head_dim: int, estimator: str, stride: int) -> float:
    """Return the factor of a score in an exponent of base 2."""
    scale: float = head_dim**-0.5 if softmax_scale is None else softmax_scale
    return scale * _LOG2_E / (stride if estimator == "group" else 1)


def empty_masses(
    pieces: Sequence[TileShares], row_tokens: int, with_peaks: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return masses of 0 for all tiles of the pieces, and peaks of 0 or None."""
    num_heads, rows = pieces[0].lse.shape
    k_tiles = max(piece.k_offset // TILE + piece.num_tiles for piece in pieces)
    shape = num_heads, _tiles(rows * row_tokens), k_tiles
    masses = torch.zeros(shape, dtype=torch.float32, device=pieces[0].lse.device)
    return masses, torch.zeros_like(masses) if with_peaks else None


def _torch_tile_shares(
    query: torch.Tensor,
    key: torch.Tensor,
    q_offset: int,
    k_offset: int,
    estimator: str,
    stride: int,
    softmax_scale: float | None,
) -> TileShares:
    scale = score_scale(softmax_scale, query.shape[2], estimator, stride)
    # Fast in bf16 on CPUs with AMX; fp16 is slower than fp32 there.
    dtype = torch.bfloat16 if query.dtype == torch.bfloat16 else torch.float32
    q_len, num_heads, _ = query.shape
    num_kv_heads = key.shape[1]
    residues = stride if estimator == "row" else 1
    start = q_offset // _PIECE_TOKENS * _PIECE_TOKENS
    front = q_offset - start
    queries = _query_rows(query.to(dtype), front, num_kv_heads, estimator, stride)
    num_pieces, groups = len(queries), _PIECE_TOKENS // stride
    num_blocks, tiles = -(-len(key) // _BLOCK_TOKENS), _BLOCK_TOKENS // TILE
    column = torch.arange(_BLOCK_TOKENS // stride).view(tiles, -1).T.reshape(-1)

    # Rows in the order of tokens: [num_kv_heads, heads of each, pieces, groups, residues].
    rows = num_kv_heads, num_heads // num_kv_heads, num_pieces, groups, residues
    shares = torch.zeros(*rows, num_blocks, tiles)
    lse = torch.full((*rows, num_blocks), float("-inf"))
    for block in range(num_blocks):
        at = block * _BLOCK_TOKENS
        keys = _key_columns(key[at : at + _BLOCK_TOKENS].to(dtype), estimator, stride)
        first = max(0, (k_offset + at - start) // _PIECE_TOKENS)
        for piece in range(first, num_pieces):
            scores = (queries[piece] @ keys.mT).float()
            # [num_kv_heads, residues, heads of each, groups, columns]
            scores = scores.view(num_kv_heads, residues, rows[1], groups, -1)
            ahead = start + piece * _PIECE_TOKENS - (k_offset + at)
            left = -(-(len(key) - at) // stride)
            if ahead < _BLOCK_TOKENS or left < len(column):
                limit = _visible_groups(ahead // stride, groups, residues).clamp(max=left)
                scores.masked_fill_(column >= limit[:, None, :, None], float("-inf"))
            block_shares, block_lse = _reduce_block(scores, scale, tiles)
            shares[:, :, piece, :, :, block] = block_shares.permute(0, 2, 3, 1, 4)
            lse[:, :, piece, :, :, block] = block_lse.permute(0, 2, 3, 1)
    row_tokens = stride // residues
    mine = slice(front // row_tokens, -(-(front + q_len) // row_tokens))
    lse = lse.view(num_heads, -1, num_blocks)[:, mine]
    shares = shares.view(num_heads, -1, num_blocks, tiles)[:, mine]
    return TileShares(shares, lse, _row_lse(lse), k_offset, _tiles(len(key)))


def _query_rows(
    query: torch.Tensor, front: int, num_kv_heads: int, estimator: str, stride: int
) -> torch.Tensor:
    """Return the rows that meet each key matrix, `[pieces, num_kv_heads * residues, rows, dim]`."""
    end = front + len(query)
    q = F.pad(query, (0, 0, 0, 0, front, -end % _PIECE_TOKENS))
    groups = _PIECE_TOKENS // stride
    # [pieces, groups, stride, num_kv_heads, heads of each, head_dim]
    q = q.view(len(q) // _PIECE_TOKENS, groups, stride, num_kv_heads, -1, q.shape[2])
    if estimator == "row":
        return q.permute(0, 3, 2, 4, 1, 5).flatten(3, 4).flatten(1, 2)
    return q.flip(2).permute(0, 3, 4, 1, 2, 5).flatten(4, 5).flatten(2, 3)


def _key_columns(key: torch.Tensor, estimator: str, stride: int) -> torch.Tensor:
    """Return a block's keys, `[num_kv_heads * residues, columns, dim]`.

    The columns are ordered by their place inside the tile, and then by tile: so a tile's sum is
    one over a leading axis, which is faster.
    """
    k = F.pad(key, (0, 0, 0, 0, 0, _BLOCK_TOKENS - len(key)))
    # [tiles, groups of a tile, stride, num_kv_heads, head_dim]
    k = k.view(-1, TILE // stride, stride, *k.shape[1:])
    if estimator == "row":
        return k.flip(2).permute(3, 2, 1, 0, 4).flatten(2, 3).flatten(0, 1)
    return k.permute(3, 1, 0, 2, 4).flatten(3, 4).flatten(1, 2)


def _visible_groups(ahead: int, groups: int, residues: int) -> torch.Tensor:
    """Return how many of a block's key groups each row sees, `[residues, groups]`.

    A row's sampled key in its own group is at or before the row for half of the residues.
    """
    residue = torch.arange(residues)[:, None]
    own_is_hidden = (residues - 1 - residue > residue).long()
    return ahead + 1 + torch.arange(groups) - own_is_hidden


def _reduce_block(
    scores: torch.Tensor, scale: float, tiles: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tiles' shares and the LSE of `scale * scores` over the last axis; overwrites."""
    row_max = scores.amax(-1, keepdim=True) * scale
    shift = row_max.masked_fill(row_max == float("-inf"), 0.0)
    weights = torch.add(-shift, scores, alpha=scale, out=scores).exp2_()
    sums = weights.unflatten(-1, (-1, tiles)).sum(-2)
    total = sums.sum(-1)
    return sums / total.clamp(min=1e-30)[..., None], row_max.squeeze(-1) + total.log2()


def _torch_merge(
    pieces: Sequence[TileShares], q_offset: int, estimator: str, stride: int, with_peaks: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    row_tokens = stride if estimator == "group" else 1
    tile_rows = TILE // row_tokens
    masses, peaks = empty_masses(pieces, row_tokens, with_peaks)
    total = reduce(torch.logaddexp2, [piece.lse for piece in pieces])
    shift = total.masked_fill(total == float("-inf"), 0.0)
    num_counted = F.pad((total > float("-inf")).float(), (0, -total.shape[1] % tile_rows))
    num_counted = num_counted.unflatten(1, (-1, tile_rows)).sum(-1, keepdim=True).clamp(min=1)
    for piece in pieces:
        weights = (piece.base - shift[..., None]).exp2().float()
        # [num_q_heads, rows, tiles]
        parts = (piece.shares * weights[..., None]).flatten(2)
        parts = F.pad(parts[..., : piece.num_tiles], (0, 0, 0, -parts.shape[1] % tile_rows))
        parts = parts.unflatten(1, (-1, tile_rows))
        first = piece.k_offset // TILE
        columns = slice(first, first + piece.num_tiles)
        if peaks is not None:
            peaks[..., columns] = parts.amax(2)
        sums = _sum_halves(parts)
        masses[..., columns] = sums if estimator == "group" else sums / num_counted
    return masses, peaks


def _row_lse(lse: torch.Tensor) -> torch.Tensor:
    """Return the LSE over all blocks, added in their order: more hidden ones change no bit.

    In fp64, as the weights are: how PyTorch rounds an exponential depends on the tensor's length,
    in the last bit.
    """
    lse = lse.double()
    row_max = lse.amax(-1)
    shift = row_max.masked_fill(row_max == float("-inf"), 0.0)
    weights = (lse - shift[..., None]).exp2()
    return row_max + reduce(torch.add, weights.unbind(-1)).log2()


def _sum_halves(parts: torch.Tensor) -> torch.Tensor:
    """Return the sum over axis 2, a power of two; no other axis changes its order."""
    while parts.shape[2] > 1:
        half = parts.shape[2] // 2
        parts = parts[:, :, :half] + parts[:, :, half:]
    return parts.squeeze(2)


def _tiles(num_tokens: int) -> int:
    return -(-num_tokens // TILE)


def _check_inputs(query: torch.Tensor, key: torch.Tensor, softmax_scale: float | None) -> None:
    fits = query.dim() == key.dim() == 3 and query.shape[2] == key.shape[2]
    if not fits or query.shape[1] % key.shape[1] or query.dtype != key.dtype:
        raise ValueError(
            f"a query of shape {list(query.shape)} and {query.dtype} does not fit a key of "
            f"{list(key.shape)} and {key.dtype}"
        )
    if not len(query) or not len(key):
        raise ValueError(f"{len(query)} queries and {len(key)} keys; at least one of each")
    if query.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ValueError(f"{query.dtype}; allowed are float32, float16 and bfloat16")
    if query.stride(2) != 1 or key.stride(2) != 1:
        raise ValueError(
            f"query and key of strides {query.stride()} and {key.stride()}; not 1 last"
        )
    if softmax_scale is not None and softmax_scale <= 0:
        raise ValueError(f"softmax_scale={softmax_scale} is not positive")


def _check_positions(
    q_len: int, k_len: int, q_offset: int, k_offset: int, estimator: str, stride: int
) -> None:
    if estimator not in ("group", "row"):
        raise ValueError(f"estimator={estimator!r}; allowed are 'group' and 'row'")
    if stride <= 0 or TILE % stride:
        raise ValueError(f"stride={stride} does not divide {TILE}")
    for name, offset in (("q_offset", q_offset), ("k_offset", k_offset)):
        if offset < 0 or offset % TILE:
            raise ValueError(f"{name}={offset} is no multiple of {TILE}")
    if k_len % TILE and k_offset + k_len < q_offset + q_len:
        raise ValueError(
            f"keys {k_offset} to {k_offset + k_len - 1} end inside a tile, before the last query, "
            f"{q_offset + q_len - 1}"
        )
