"""XAttention's antidiagonal estimate and the selection of tiles (Xu et al., 2025, section 2).

A group is `stride` consecutive tokens, and `chunk_start`, `chunk_end` and `key_start` are absolute
indices of groups. A chunk's queries, and every piece of keys but a sequence's last, are whole
groups. A last group that is not full counts like the others, its missing tokens as zero vectors: it
alone holds the newest tokens. All sums are in fp32.

Scores take `4 * num_q_heads * q_len * k_len / stride**2` bytes, so `xattn_estimate` goes through
the queries in pieces. For keys in pieces the softmax takes three stages, which agree with the
one-shot `softmax_fuse_block_sum` to rounding:

    stats = [softmax_compute_partial_stats(scores, ...) for scores in pieces]
    row_max, row_sum = merge_softmax_stats(*zip(*stats))
    sums = [softmax_normalize_and_block_sum(scores, row_max, row_sum, ...) for scores in pieces]
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from nanovllm.ops.xattn_reference import block_sums

_SEGMENT_GROUPS = 256


def flat_group_gemm_fuse_reshape(
    query: torch.Tensor,
    key: torch.Tensor,
    stride: int,
    chunk_start: int,
    chunk_end: int,
    is_causal: bool = True,
    *,
    key_start: int = 0,
) -> torch.Tensor:
    """Return the score of each query group a and key group b, before scale and softmax.

    score(a, b) = sum_i query[a*stride + stride-1-i] . key[b*stride + i]

    in absolute positions: the antidiagonals of the `stride` x `stride` square of logits.

    Args:
        query: `[batch, num_q_heads, q_len, head_dim]`, the last axis contiguous, as of `key`; the
            other strides are free.
        key: `[batch, num_kv_heads, k_len, head_dim]`, of the query's dtype; each head serves
            `num_q_heads / num_kv_heads` query heads and is not expanded.
        stride: tokens a group.
        chunk_start, chunk_end: the query's first group and the one after its last.
        is_causal: hide key groups after the query's own.
        key_start: the key's first group.

    Returns:
        fp32 `[batch, num_q_heads, q_len / stride, k_len / stride]`, both rounded up; `-inf` where
        hidden. Does not synchronise.

    Raises:
        ValueError: shapes, dtypes or a chunk that do not fit, or a last axis with gaps.
    """
    _check_query_and_key(query, key)
    _check_chunk(-(-query.shape[2] // stride), chunk_start, chunk_end)
    if query.is_cuda:
        from nanovllm.ops.kernels import xattn

        return xattn.flat_group_gemm_fuse_reshape(
            query, key, stride, chunk_start, chunk_end, is_causal, key_start=key_start
        )
    # Groups become rows, the query's in reverse order, of one matrix product a KV head.
    q = _as_groups(query, stride).flip(3).flatten(3)
    k = _as_groups(key, stride).flatten(3)
    batch, num_q_heads, rows, _ = q.shape
    q = q.reshape(batch, key.shape[1], -1, q.shape[3])
    scores = (q @ k.mT).view(batch, num_q_heads, rows, -1)
    return _hide_future(scores, chunk_start, key_start) if is_causal else scores


def softmax_fuse_block_sum(
    scores: torch.Tensor,
    reshaped_block_size: int,
    segment_size: int,
    chunk_start: int,
    chunk_end: int,
    real_q_len: int,
    scale: float,
    is_causal: bool = True,
) -> torch.Tensor:
    """Return the softmax of `scale * scores` over the keys, summed over square blocks.

    Args:
        scores: fp32 `[batch, num_q_heads, q_groups, k_groups]`, the last axis contiguous, `-inf`
            where hidden; all the keys from the first.
        reshaped_block_size: groups a block on both axes, a power of two.
        segment_size: key groups that one step of the computation reads, a power of two, at least
            `reshaped_block_size`. Changes the speed, and results by rounding only.
        chunk_start, chunk_end: the first group of the rows, a multiple of `reshaped_block_size`,
            and the one after their last.
        real_q_len: the group at which rows end that count; later ones are padding. `chunk_end`
            where there is none.
        scale: `softmax_scale / stride`, positive.
        is_causal: hide keys after a query, whatever their scores.

    Returns:
        fp32 `[batch, num_q_heads, q_blocks, k_blocks]`. A row of blocks adds up to the number of
        its group rows that count and see a key. Does not synchronise.

    Raises:
        ValueError: sizes or a chunk that do not fit, or scores of another layout.
    """
    _check_chunk(scores.shape[2], chunk_start, chunk_end)
    stats = softmax_compute_partial_stats(scores, segment_size, chunk_start, scale, is_causal)
    sizes = reshaped_block_size, segment_size, chunk_start, real_q_len
    return softmax_normalize_and_block_sum(scores, *stats, *sizes, scale, is_causal)


def softmax_compute_partial_stats(
    scores: torch.Tensor,
    segment_size: int,
    chunk_start: int,
    scale: float,
    is_causal: bool = True,
    *,
    key_start: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stage 1: return the maximum and the sum that the softmax of one piece of the keys needs.

    Arguments, errors and synchronisation as of `softmax_fuse_block_sum`, and `key_start`, the
    piece's first group, any. Rows of padding are computed like the others.

    Returns:
        m = max(scale * scores) and l = sum(exp(scale * scores - m)) over the piece, both fp32
        `[batch, num_q_heads, q_groups]`; `-inf` and 0 for a row that sees none of its keys.
    """
    _check_scores(scores, segment_size)
    if scores.is_cuda:
        from nanovllm.ops.kernels import xattn

        return xattn.softmax_compute_partial_stats(
            scores, segment_size, chunk_start, scale, is_causal, key_start=key_start
        )
    stats = []
    for piece in scores.split(segment_size, -1):
        logits = piece * scale
        if is_causal:
            logits = _hide_future(logits, chunk_start, key_start)
        row_max = logits.amax(-1)
        row_sum = logits.sub_(_shift(row_max)[..., None]).exp_().sum(-1)
        stats.append((row_max, row_sum))
        key_start += segment_size
    return merge_softmax_stats(*zip(*stats, strict=True))


def merge_softmax_stats(
    row_maxes: Sequence[torch.Tensor], row_sums: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Stage 2: return the maximum and sum over all pieces of the keys, in any order.

    Args:
        row_maxes, row_sums: what stage 1 returned, one for each piece; at least one.

    Returns:
        The same for the union of the keys. Does not synchronise. (FlashAttention, section 3.1.)
    """
    row_max = torch.stack(tuple(row_maxes)).amax(0)
    shift = _shift(row_max)
    row_sum = torch.zeros_like(row_max)
    for piece_max, piece_sum in zip(row_maxes, row_sums, strict=True):
        row_sum += piece_sum * (piece_max - shift).exp()
    return row_max, row_sum


def softmax_normalize_and_block_sum(
    scores: torch.Tensor,
    row_max: torch.Tensor,
    row_sum: torch.Tensor,
    reshaped_block_size: int,
    segment_size: int,
    chunk_start: int,
    real_q_len: int,
    scale: float,
    is_causal: bool = True,
    *,
    key_start: int = 0,
) -> torch.Tensor:
    """Stage 3: return one piece's block sums of the softmax over all pieces.

    Arguments, errors and synchronisation as of `softmax_fuse_block_sum`, and

    Args:
        row_max, row_sum: fp32 `[batch, num_q_heads, q_groups]`, what stage 2 returned.
        key_start: the piece's first group, a multiple of `reshaped_block_size`.

    Returns:
        fp32 `[batch, num_q_heads, q_blocks, k_blocks]`, the blocks of this piece alone. A row with
        no key in any piece adds nothing.
    """
    _check_scores(scores, segment_size, reshaped_block_size)
    if chunk_start % reshaped_block_size or key_start % reshaped_block_size:
        raise ValueError(
            f"chunk_start={chunk_start} and key_start={key_start} must be multiples of "
            f"reshaped_block_size={reshaped_block_size}: blocks lie on absolute positions"
        )
    if scores.is_cuda:
        from nanovllm.ops.kernels import xattn

        sizes = reshaped_block_size, segment_size, chunk_start, real_q_len
        return xattn.softmax_normalize_and_block_sum(
            scores, row_max, row_sum, *sizes, scale, is_causal, key_start=key_start
        )
    row = chunk_start + torch.arange(scores.shape[2], device=scores.device)
    counts = (row < real_q_len) & (row_sum > 0)
    share = torch.where(counts, 1 / row_sum, 0.0)[..., None]
    shift = _shift(row_max)[..., None]
    sums = []
    for piece in scores.split(segment_size, -1):
        logits = piece * scale
        if is_causal:
            logits = _hide_future(logits, chunk_start, key_start)
        weights = logits.sub_(shift).exp_().mul_(share)
        sums.append(block_sums(weights, reshaped_block_size, reshaped_block_size))
        key_start += segment_size
    return torch.cat(sums, -1)


def find_blocks_chunked(
    input_tensor: torch.Tensor,
    current_index: int,
    threshold: float | torch.Tensor | None,
    num_to_choose: int | None,
    decoding: bool,
    mode: str = "prefill",
    causal: bool = True,
) -> torch.Tensor:
    """Return which key blocks each row of query blocks keeps.

    The first key block, and if `causal` the one on the diagonal, are kept in any case and come
    first; the others follow by descending mass, the lower index first among equals. A block is
    kept if the mass before it is less than `threshold` of the row's.

    Args:
        input_tensor: `[batch, num_q_heads, q_blocks, k_blocks]`, masses, none negative; half types
            are added up in fp32.
        current_index: absolute index of the first query block, to which `causal` refers.
        threshold: share of the mass, one for all or a tensor `[num_q_heads]` on the input's device.
            From 1 on everything is kept, mass or none.
        num_to_choose: keep this many blocks a row in place of a share; `threshold` is None then.
        decoding: whether the rows are those of a decode step.
        mode: the phase to choose in, `"prefill"`, `"decode"` or `"both"`; in the other phase
            everything is kept.
        causal: keep nothing after the diagonal, and count no mass there.

    Returns:
        bool, like `input_tensor`. Does not synchronise, whatever the values.

    Raises:
        ValueError: an unknown mode, or not just one of `threshold` and `num_to_choose`.
    """
    if mode not in ("prefill", "decode", "both"):
        raise ValueError(f"mode={mode!r}; allowed are 'prefill', 'decode' and 'both'")
    if (threshold is None) == (num_to_choose is None):
        raise ValueError(
            f"threshold={threshold} and num_to_choose={num_to_choose}: one of them must be None"
        )
    wide = input_tensor if input_tensor.dtype == torch.float64 else input_tensor.float()
    column = torch.arange(wide.shape[3], device=wide.device)
    diagonal = current_index + torch.arange(wide.shape[2], device=wide.device)[:, None]
    allowed = column <= diagonal if causal else (column >= 0).expand(wide.shape[2], -1)
    if mode != "both" and decoding != (mode == "decode"):
        return allowed.expand(wide.shape).clone()
    forced = column == 0
    if causal:
        forced = forced | (column == diagonal)

    masses = wide.masked_fill(~allowed, 0.0)
    # Forced blocks lead, and what is not allowed trails.
    key = masses.masked_fill(~allowed, -1.0).masked_fill(forced & allowed, float("inf"))
    order = key.sort(dim=-1, descending=True, stable=True).indices
    if num_to_choose is not None:
        chosen = (column < num_to_choose).expand(wide.shape)
    else:
        assert threshold is not None
        if isinstance(threshold, torch.Tensor) and threshold.dim():
            threshold = threshold.to(wide.dtype).view(-1, 1, 1)
        running = masses.gather(-1, order).cumsum(-1)
        before = F.pad(running[..., :-1], (1, 0))
        chosen = (before < threshold * running[..., -1:]) | torch.as_tensor(threshold >= 1)
    return (torch.zeros_like(chosen).scatter(-1, order, chosen) | forced) & allowed


def xattn_estimate(
    query: torch.Tensor,
    key: torch.Tensor,
    stride: int,
    threshold: float | torch.Tensor,
    block_size: int = 128,
    q_offset: int = 0,
    chunk_size: int = 4096,
    *,
    softmax_scale: float | None = None,
    is_causal: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the estimated attention mass of each block, and the blocks that a share of it keeps.

    Args:
        query: `[batch, num_q_heads, q_len, head_dim]`, a chunk of the prompt, as for
            `flat_group_gemm_fuse_reshape`.
        key: `[batch, num_kv_heads, k_len, head_dim]`, the keys from the prompt's first on.
        stride: tokens a group; divides `block_size`.
        threshold: as for `find_blocks_chunked`.
        block_size: tokens a block on both axes; `block_size / stride` is a power of two.
        q_offset: absolute position of the first query, a multiple of `block_size`.
        chunk_size: queries that are estimated at a time, a multiple of `block_size`: bounds the
            memory for scores and changes nothing else.
        softmax_scale: factor of the logits; None means `head_dim ** -0.5`.
        is_causal: hide keys after a query.

    Returns:
        Sums, fp32 `[batch, num_q_heads, q_blocks, k_blocks]`, a row of which adds up to the number
        of its query groups; and the bool mask of the blocks kept. Does not synchronise.

    Raises:
        ValueError: sizes or shapes that do not fit.
    """
    for name, size, unit in (
        ("block_size", block_size, stride),
        ("q_offset", q_offset, block_size),
        ("chunk_size", chunk_size, block_size),
    ):
        if size % unit:
            raise ValueError(f"{name}={size} is no multiple of {unit}")
    scale = query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    block = block_size // stride
    segment = max(block, _SEGMENT_GROUPS)
    sums = []
    for first in range(0, query.shape[2], chunk_size):
        piece = query[:, :, first : first + chunk_size]
        start = (q_offset + first) // stride
        end = start - (-piece.shape[2] // stride)
        scores = flat_group_gemm_fuse_reshape(piece, key, stride, start, end, is_causal)
        sizes = block, segment, start, end, end
        sums.append(softmax_fuse_block_sum(scores, *sizes, scale / stride, is_causal))
    masses = torch.cat(sums, 2)
    first = q_offset // block_size
    return masses, find_blocks_chunked(masses, first, threshold, None, False, causal=is_causal)


def _as_groups(x: torch.Tensor, stride: int) -> torch.Tensor:
    """Return `[batch, heads, groups, stride, head_dim]` in fp32, filled up with zeros."""
    whole = F.pad(x.float(), (0, 0, 0, -x.shape[2] % stride))
    return whole.view(*x.shape[:2], -1, stride, x.shape[3])


def _hide_future(scores: torch.Tensor, chunk_start: int, key_start: int) -> torch.Tensor:
    row = chunk_start + torch.arange(scores.shape[2], device=scores.device)[:, None]
    column = key_start + torch.arange(scores.shape[3], device=scores.device)
    return scores.masked_fill_(column > row, float("-inf"))


def _shift(row_max: torch.Tensor) -> torch.Tensor:
    """Return what to subtract before the exponential: 0 for a row without keys."""
    return row_max.masked_fill(row_max == float("-inf"), 0.0)


def _check_query_and_key(query: torch.Tensor, key: torch.Tensor) -> None:
    fits = query.shape[0] == key.shape[0] and query.shape[3] == key.shape[3]
    if not fits or query.shape[1] % key.shape[1] or query.dtype != key.dtype:
        raise ValueError(
            f"a query of shape {list(query.shape)} and {query.dtype} does not fit a key of "
            f"{list(key.shape)} and {key.dtype}"
        )
    if query.stride(3) != 1 or key.stride(3) != 1:
        raise ValueError(
            f"query and key of strides {query.stride()} and {key.stride()}; not 1 last"
        )


def _check_chunk(num_groups: int, chunk_start: int, chunk_end: int) -> None:
    if chunk_end - chunk_start != num_groups:
        raise ValueError(f"queries of {num_groups} groups for groups {chunk_start} to {chunk_end}")


def _check_scores(scores: torch.Tensor, segment_size: int, block_size: int = 1) -> None:
    powers = all(size > 0 and size & (size - 1) == 0 for size in (segment_size, block_size))
    if not powers or segment_size < block_size:
        raise ValueError(
            f"segment_size={segment_size} and reshaped_block_size={block_size}; powers of two are "
            "needed, the first no less than the second"
        )
    if scores.dtype != torch.float32 or scores.stride(3) != 1:
        raise ValueError(
            f"scores of {scores.dtype}, strides {scores.stride()}; not float32, or gaps"
        )
