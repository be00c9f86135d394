"""Pages of keys, the bounds of their logits, and attention to the pages of greatest bound.

A page is `page_size` tokens of the KV cache that lie together inside a block; its bounds are the
channel-wise minimum and maximum of its keys, for each KV head (Tang et al., 2024, section 3.2).
Slots of the cache are `block_id * block_size + offset`; a slot's page is `slot // page_size`.
"""

import torch
import torch.nn.functional as F

from nanovllm.ops.backends.torch_attention import TorchAttention
from nanovllm.ops.paged_attention import paged_decode_attention

SHARE_UNITS = 1 << 16
"""Parts in which shares are counted, of a query's best page."""


def update_page_bounds(
    bounds: torch.Tensor,
    key_cache: torch.Tensor,
    key_slots: torch.Tensor,
    cache_slots: torch.Tensor,
    page_size: int,
) -> None:
    """Bring the bounds of pages up to date with tokens that have just been stored.

    A token at the start of a page begins its bounds anew; any other extends what is there. A key
    that is NaN makes both bounds of its channel NaN. Does not synchronise.

    Args:
        bounds: `[num_pages, num_kv_heads, 2, head_dim]` of the cache's dtype, contiguous: the
            minimum and the maximum of each channel. Updated in place.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, the last axis contiguous; the
            other strides are free.
        key_slots: int32 `[n]`, contiguous: where in `key_cache` each token's key lies.
        cache_slots: int32 `[n]`, contiguous: each token's slot in the cache that `bounds` is of.
            Tokens of one page follow each other, in order. Several of the same slot leave its page
            with any bounds.
        page_size: tokens of a page, a power of two.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    _check_bounds(bounds, page_size)
    wanted = (bounds.shape[1], bounds.shape[3], bounds.dtype)
    if (*key_cache.shape[2:], key_cache.dtype) != wanted or key_cache.stride(3) != 1:
        raise ValueError(
            f"key_cache of shape {list(key_cache.shape)}, {key_cache.dtype} and strides "
            f"{key_cache.stride()} for bounds of {list(bounds.shape)} and {bounds.dtype}; heads "
            "and dtype must be equal, and the last stride 1"
        )
    for name, slots in (("key_slots", key_slots), ("cache_slots", cache_slots)):
        _check_ints(name, slots, cache_slots.shape[:1])
    if bounds.is_cuda:
        from nanovllm.ops.kernels import pages as kernels

        kernels.update_page_bounds(bounds, key_cache, key_slots, cache_slots, page_size)
    elif len(cache_slots) > 0:
        _update_page_bounds(bounds, key_cache, key_slots, cache_slots, page_size)


def score_pages(
    query: torch.Tensor,
    bounds: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
    page_size: int,
    block_size: int,
) -> torch.Tensor:
    """Return a bound of the logits of each page for each query.

    No logit of query `q` exceeds `sum_d max(q_d min_d, q_d max_d)` times the scale, in fp32.

    Args:
        query: `[num_seqs, num_q_heads, head_dim]`, the last axis contiguous.
        bounds: as for `update_page_bounds`.
        block_tables: int32 `[num_seqs, max_blocks]`, the last axis contiguous: the ids of each
            sequence's blocks in order. Entries past the context are never read through.
        context_lens: int32 `[num_seqs]`.
        softmax_scale: factor of the logits.
        page_size: tokens of a page, a power of two.
        block_size: tokens of a block, a multiple of `page_size`.

    Returns:
        fp32 `[num_seqs, num_kv_heads, queries of a KV head, max_blocks * block_size / page_size]`,
        by the page's place in the sequence: `-inf` from the context's end on. A row depends on its
        sequence only. Does not synchronise, and its launch depends on shapes only.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    _check_bounds(bounds, page_size)
    _check_blocks(page_size, block_size)
    num_seqs, num_q_heads, dim = query.shape
    if num_q_heads % bounds.shape[1] or dim != bounds.shape[3] or query.stride(2) != 1:
        raise ValueError(
            f"query of shape {list(query.shape)} and strides {query.stride()} for bounds of "
            f"{list(bounds.shape)}"
        )
    _check_tables(block_tables, context_lens, num_seqs)
    if query.is_cuda:
        from nanovllm.ops.kernels import pages as kernels

        return kernels.score_pages(
            query, bounds, block_tables, context_lens, softmax_scale, page_size, block_size
        )
    return _score_pages(
        query, bounds, block_tables, context_lens, softmax_scale, page_size, block_size
    )


def top_pages(
    scores: torch.Tensor,
    context_lens: torch.Tensor,
    page_size: int,
    num_pages: int,
    num_recent: int,
    block_tables: torch.Tensor | None = None,
    block_size: int | None = None,
    num_dense: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the pages of greatest score, at most `num_pages` for each KV head.

    The context's first page and its newest `num_recent` are chosen in any case; then the others by
    descending score, the lower page first among equals. A score of NaN counts as infinite.
    Queries that share a KV head are compared by the share of a softmax over the pages that each
    gives to a page, and the page has the greatest: else a query of long vectors outvotes all.

    Args:
        scores: fp32 `[num_seqs, num_kv_heads, queries of a KV head, max_pages]`, as from
            `score_pages`, the last axis contiguous. What lies past the context is not seen.
        context_lens: int32 `[num_seqs]`, at most `max_pages * page_size`.
        page_size: tokens of a page, a power of two.
        num_pages: pages to choose; a shorter context has all of its pages chosen.
        num_recent: from 1 to `num_pages - 1`; any if there is room for `max_pages`.
        block_tables, block_size: as for `score_pages`; both or neither. Return the pages' places in
            the cache instead of those in the sequence.
        num_dense: a context of no more pages has all of its pages chosen.

    Returns:
        The pages, int32 `[num_seqs, num_kv_heads, num_pages]`, or more if `num_dense` may take more
        (`num_entries`), in the order of the sequence, 0 in entries that are not used; and the
        tokens that they hold, int32 `[num_seqs]`, the same for each head: only the context's last
        page may be partly filled, and it comes last. Does not synchronise, and its launch depends
        on shapes only.

    Raises:
        ValueError: shapes, dtypes, strides or numbers that do not fit, or one of `block_tables` and
            `block_size` alone.
    """
    if scores.dim() != 4 or scores.dtype != torch.float32 or scores.stride(3) != 1:
        raise ValueError(
            f"scores of shape {list(scores.shape)}, {scores.dtype} and strides {scores.stride()}; "
            "needed is float32 [num_seqs, num_kv_heads, group, max_pages], contiguous in the last "
            "axis"
        )
    if num_pages < scores.shape[3] and not 1 <= num_recent < num_pages:
        raise ValueError(
            f"num_recent={num_recent} with num_pages={num_pages}; must be from 1 to num_pages - 1"
        )
    if (block_tables is None) != (block_size is None):
        raise ValueError("one of block_tables and block_size without the other")
    _check_blocks(page_size, page_size if block_size is None else block_size)
    _check_tables(block_tables, context_lens, len(scores))
    arguments = (
        scores,
        context_lens,
        page_size,
        num_pages,
        num_recent,
        block_tables,
        block_size,
        num_dense,
    )
    if scores.is_cuda:
        from nanovllm.ops.kernels import pages as kernels

        return kernels.top_pages(*arguments)
    return _top_pages(*arguments)


def num_entries(num_pages: int, num_dense: int, max_pages: int) -> int:
    """Return how many pages `top_pages` has room for, for each KV head."""
    return max(num_pages, min(num_dense, max_pages))


def page_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tables: torch.Tensor,
    lens: torch.Tensor,
    softmax_scale: float,
) -> torch.Tensor:
    """Attend each sequence's query to pages that are chosen for each KV head, on any device.

    Args:
        query: `[num_seqs, num_q_heads, head_dim]`.
        key_cache, value_cache: `[num_pages, page_size, num_kv_heads, head_dim]`, the last axis
            contiguous; the other strides are free, 0 for the heads of pages that hold one head
            each, and both tensors' are the same.
        tables: int32 `[num_seqs, num_kv_heads, n]`, the last axis contiguous: the pages of each
            head, none beyond the first `lens` tokens read.
        lens: int32 `[num_seqs]`, tokens to attend to. A sequence of 0 gets 0.
        softmax_scale: factor of the logits.

    Returns:
        `[num_seqs, num_q_heads, head_dim]` of the query's dtype. Does not synchronise, and its
        launch depends on shapes only.

    Raises:
        ValueError: on a GPU, caches of different strides, or with gaps in the last axis.
    """
    if query.is_cuda:
        return paged_decode_attention(query, key_cache, value_cache, tables, lens, softmax_scale)
    num_kv_heads = key_cache.shape[2]
    heads = torch.arange(num_kv_heads)[:, None]
    attend = TorchAttention().attend
    out = torch.zeros_like(query)
    for i, length in enumerate(lens.tolist()):
        if length == 0:
            continue
        pages = tables[i, :, : -(-length // key_cache.shape[1])]
        # Each head by itself, as a batch of one KV head: [num_kv_heads, length, 1, head_dim]
        keys, values = (
            cache[pages, :, heads].flatten(1, 2)[:, :length, None]
            for cache in (key_cache, value_cache)
        )
        q = query[i].unflatten(0, (num_kv_heads, 1, -1))
        out[i] = attend(q, keys, values, softmax_scale, False)[0].flatten(0, 2)
    return out


def _update_page_bounds(
    bounds: torch.Tensor,
    key_cache: torch.Tensor,
    key_slots: torch.Tensor,
    cache_slots: torch.Tensor,
    page_size: int,
) -> None:
    pages, counts = (cache_slots // page_size).unique_consecutive(return_counts=True)
    first = counts.cumsum(0) - counts
    # A shorter run repeats its last token, which changes no bound: [num_pages, longest run]
    rows = torch.arange(int(counts.max()))
    slots = key_slots[first[:, None] + torch.minimum(rows, counts[:, None] - 1)]
    block_size = key_cache.shape[1]
    low, high = key_cache[slots // block_size, slots % block_size].aminmax(dim=1)
    old_low, old_high = bounds[pages].unbind(2)
    begins = (cache_slots[first] % page_size == 0)[:, None, None]
    low = torch.where(begins, low, torch.minimum(low, old_low))
    high = torch.where(begins, high, torch.maximum(high, old_high))
    bounds[pages] = torch.stack((low, high), dim=2)


def _score_pages(
    query: torch.Tensor,
    bounds: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
    page_size: int,
    block_size: int,
) -> torch.Tensor:
    num_kv_heads, pages_per_block = bounds.shape[1], block_size // page_size
    max_pages = block_tables.shape[1] * pages_per_block
    group = query.shape[1] // num_kv_heads
    scores = torch.full((len(query), num_kv_heads, group, max_pages), float("-inf"))
    # One by one, so that products of matrices do not depend on the other sequences.
    for i, length in enumerate(context_lens.tolist()):
        pages = torch.arange(-(-length // page_size))
        blocks = block_tables[i, pages // pages_per_block]
        # [2, num_kv_heads, head_dim, num_pages]
        by_channel = bounds[blocks * pages_per_block + pages % pages_per_block].permute(2, 1, 3, 0)
        low, high = by_channel.float()
        q = query[i].float().unflatten(0, (num_kv_heads, -1))
        logits = q.clamp(min=0) @ high + q.clamp(max=0) @ low
        scores[i, ..., : len(pages)] = logits * softmax_scale
    return scores


def _top_pages(
    scores: torch.Tensor,
    context_lens: torch.Tensor,
    page_size: int,
    num_pages: int,
    num_recent: int,
    block_tables: torch.Tensor | None,
    block_size: int | None,
    num_dense: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    max_pages = scores.shape[3]
    width = num_entries(num_pages, num_dense, max_pages)
    page = torch.arange(max_pages)
    num_seen = -(-context_lens // page_size)
    num_kept = torch.where(num_seen <= num_dense, num_seen, num_seen.clamp(max=num_pages))
    ahead = page - num_seen[:, None, None]
    # In fp64 there is room above and below all scores.
    ranks = (
        _merge_queries(scores, ahead[:, :, None] < 0)
        .double()
        .nan_to_num(nan=1e300, posinf=1e300, neginf=-1e300)
    )
    ranks = ranks.masked_fill((page == 0) | (ahead >= -num_recent), float("inf"))
    ranks = ranks.masked_fill(ahead >= 0, float("-inf"))
    order = ranks.argsort(dim=-1, descending=True, stable=True)[..., :width]
    order = F.pad(order, (0, max(0, width - max_pages)))
    unused = torch.arange(width) >= num_kept[:, None, None]
    pages = order.masked_fill(unused, max_pages).sort(dim=-1).values.masked_fill(unused, 0)
    if block_tables is not None and block_size is not None:
        pages_per_block = block_size // page_size
        tables = block_tables[:, None].expand(-1, scores.shape[1], -1)
        blocks = tables.gather(2, pages // pages_per_block)
        pages = (blocks * pages_per_block + pages % pages_per_block).masked_fill(unused, 0)
    return pages.int(), context_lens - (num_seen - num_kept) * page_size


def _merge_queries(scores: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return `[num_seqs, num_kv_heads, max_pages]`: the greatest share, as its logarithm.

    Shares are added as integers, whose sum does not depend on the order: so the choice is the same
    however wide the table is.
    """
    scores = scores.nan_to_num(nan=float("inf"), posinf=float("inf"), neginf=float("-inf"))
    if scores.shape[2] == 1:
        return scores[:, :, 0]
    counted = scores.masked_fill(~seen | (scores == float("inf")), float("-inf"))
    peak = counted.amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == float("-inf"), 0.0)
    total = ((counted - peak).exp() * SHARE_UNITS).to(torch.int32).sum(-1, keepdim=True)
    return (scores - (peak + (total.clamp(min=1) / SHARE_UNITS).log())).amax(2)


def _check_bounds(bounds: torch.Tensor, page_size: int) -> None:
    if bounds.dim() != 4 or bounds.shape[2] != 2 or not bounds.is_contiguous():
        raise ValueError(
            f"bounds of shape {list(bounds.shape)} and strides {bounds.stride()}; needed is "
            "[num_pages, num_kv_heads, 2, head_dim], contiguous"
        )
    _check_blocks(page_size, page_size)


def _check_blocks(page_size: int, block_size: int) -> None:
    if page_size < 1 or page_size & (page_size - 1) or block_size % page_size:
        raise ValueError(
            f"page_size={page_size} must be a power of two and divide block_size={block_size}"
        )


def _check_tables(
    block_tables: torch.Tensor | None, context_lens: torch.Tensor, num_seqs: int
) -> None:
    _check_ints("context_lens", context_lens, (num_seqs,), gaps=True)
    if block_tables is not None:
        _check_ints("block_tables", block_tables, (num_seqs, block_tables.shape[-1]))


def _check_ints(name: str, x: torch.Tensor, shape: tuple[int, ...], gaps: bool = False) -> None:
    fits = x.shape == shape and x.dtype == torch.int32
    if not fits or not (gaps or x.shape[-1] < 2 or x.stride(-1) == 1):
        raise ValueError(
            f"{name} of shape {list(x.shape)}, {x.dtype} and strides {x.stride()}; needed is "
            f"int32 {list(shape)}{'' if gaps else ', contiguous in the last axis'}"
        )
