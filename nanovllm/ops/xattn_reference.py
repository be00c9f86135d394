"""The plain-torch truth of tile estimates and tile selection, by their definitions.

All in fp32, fp64 for fp64 inputs. `query` is `[num_q_heads, q_len, head_dim]`, its first row at the
absolute position `q_offset`; `key` is `[num_kv_heads, k_len, head_dim]`, its first row at 0. Query
head h reads KV head `h // (num_q_heads // num_kv_heads)`. Group n holds the positions n * stride to
n * stride + stride - 1. Memory grows with `q_len * k_len`.
"""

import torch
import torch.nn.functional as F

from nanovllm.ops.backends.base import TILE


def group_scores(
    query: torch.Tensor, key: torch.Tensor, q_offset: int, stride: int, causal: bool = True
) -> torch.Tensor:
    """Return the scaled score of each query group a and key group b, `-inf` where a < b.

    score(a, b) = head_dim**-0.5 / stride * sum_i q[a*stride + stride-1-i] . k[b*stride + i]

    (XAttention, section 2.1.) A last group that is not full counts like the others, its missing
    rows as zeros: it alone holds the newest tokens, so without it their tile would have no mass,
    and a query tile of fewer than `stride` rows nothing to choose by.

    Args:
        q_offset: a multiple of `stride`.

    Returns:
        `[num_q_heads, q_groups, k_groups]`.
    """
    q, k = _wide(query, key)
    q, k = (F.pad(x, (0, 0, 0, -x.shape[1] % stride)).unflatten(1, (-1, stride)) for x in (q, k))
    scale: float = q.shape[-1] ** -0.5 / stride
    scores = torch.einsum("haid,hbid->hab", q.flip(2), k) * scale
    a = q_offset // stride + torch.arange(q.shape[1], device=q.device)[:, None]
    b = torch.arange(k.shape[1], device=q.device)
    return scores.masked_fill(b > a, float("-inf")) if causal else scores


def softmax_stats(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's maximum m and `sum exp(score - m)`; `-inf` and 0 where all are `-inf`."""
    row_max = scores.amax(-1)
    shift = row_max.masked_fill(row_max == float("-inf"), 0.0)
    return row_max, (scores - shift[..., None]).exp().sum(-1)


def block_sums(weights: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Sum `[..., q, k]` over blocks of `rows` x `columns`, the last ones filled up with zeros."""
    q, k = weights.shape[-2:]
    whole = F.pad(weights, (0, -k % columns, 0, -q % rows))
    shape = (*weights.shape[:-2], -(-q // rows), rows, -(-k // columns), columns)
    return whole.view(shape).sum((-3, -1))


def tile_masses_group(
    query: torch.Tensor, key: torch.Tensor, q_offset: int, stride: int, tile: int = TILE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each tile's mass by XAttention: the softmax of the group scores, summed over the tile.

    A query tile's masses add up to the number of its groups.

    Args:
        q_offset: a multiple of `tile`, which is one of `stride`.

    Returns:
        Masses, and the greatest share that any one query group puts into the tile, both
        `[num_q_heads, q_tiles, k_tiles]`.
    """
    per_tile = tile // stride
    weights = group_scores(query, key, q_offset, stride).softmax(-1)
    # [num_q_heads, q_groups, k_tiles]
    shares = block_sums(weights, 1, per_tile)
    return block_sums(shares, per_tile, 1), _tile_peaks(shares, per_tile)


def tile_masses_row(
    query: torch.Tensor, key: torch.Tensor, q_offset: int, stride: int, tile: int = TILE
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each tile's mass where every query row has its own softmax over sampled keys.

    Row i sees the keys j <= i with `j % stride == stride - 1 - i % stride`. A tile's mass is the
    mean over its rows of the share that the row puts into it; rows that see no sampled key, a few
    of the first tile, are left out of the mean. So a query tile's masses add up to 1, or to 0 if
    no row of it sees a sampled key.

    Args:
        q_offset: a multiple of `tile`, which is one of `stride`.

    Returns:
        Masses, and the greatest share that any one row puts into the tile, both
        `[num_q_heads, q_tiles, k_tiles]`.
    """
    q, k = _wide(query, key)
    i = q_offset + torch.arange(q.shape[1], device=q.device)[:, None]
    j = torch.arange(k.shape[1], device=q.device)
    sampled = (j <= i) & (j % stride == stride - 1 - i % stride)
    counted = sampled.any(-1, keepdim=True)
    logits = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~sampled, float("-inf"))
    # [num_q_heads, q_len, k_tiles]
    shares = block_sums(torch.where(counted, logits.softmax(-1), 0.0), 1, tile)
    num_counted = block_sums(counted.to(q.dtype)[None], tile, 1).clamp(min=1)
    return block_sums(shares, tile, 1) / num_counted, _tile_peaks(shares, tile)


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
    up to the diagonal. Nothing above the diagonal is kept. Memory grows with `k_tiles` squared.

    Args:
        masses: `[num_q_heads, q_tiles, k_tiles]`, none negative.
        threshold: one for all, or `[num_q_heads]`; from 1 on every tile up to the diagonal is kept.
        q_tile0: absolute index of the first query tile.
        peaks, gamma: keep also the tiles whose peak is more than gamma (the guard).

    Returns:
        bool, like `masses`.
    """
    (masses,) = _wide(masses)
    threshold = torch.as_tensor(threshold, dtype=masses.dtype, device=masses.device)
    threshold = threshold.reshape(-1, 1, 1)
    column = torch.arange(masses.shape[2], device=masses.device)
    diagonal = q_tile0 + torch.arange(masses.shape[1], device=masses.device)[:, None]
    causal = column <= diagonal
    forced = (column == 0) | (column == diagonal)
    masses = masses.masked_fill(~causal, 0.0)
    # [num_q_heads, q_tiles, k_tiles, k_tiles]: whether the last axis' tile comes before the other.
    mine, other = masses[..., :, None], masses[..., None, :]
    earlier = (other > mine) | ((other == mine) & (column < column[:, None]))
    before = torch.where(earlier | forced[:, None, :], other, 0.0).sum(-1)
    keep = forced | (before < threshold * masses.sum(-1, keepdim=True)) | (threshold >= 1)
    if peaks is not None and gamma is not None:
        keep = keep | (peaks > gamma)
    return keep & causal


def _tile_peaks(shares: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the maximum of `[..., q, k]` over each `rows` rows, the last ones filled up with 0."""
    whole = F.pad(shares, (0, 0, 0, -shares.shape[-2] % rows))
    return whole.view(*whole.shape[:-2], -1, rows, whole.shape[-1]).amax(-2)


def _wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors in fp32 or fp64, each with as many heads as the first."""
    wide = torch.float64 if tensors[0].dtype == torch.float64 else torch.float32
    num_heads = len(tensors[0])
    return [x.to(wide).repeat_interleave(num_heads // len(x), 0) for x in tensors]
