"""The choice among pages of the KV cache by their scores, and attention to the pages chosen."""

import torch
import torch.nn.functional as F

from nanovllm.ops.backends.torch_attention import TorchAttention
from nanovllm.ops.page_index import check_page_size, check_tables
from nanovllm.ops.paged_attention import paged_decode_attention

SHARE_UNITS = 1 << 16
"""Parts in which shares are counted, of a query's best page."""


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
    check_page_size(page_size, page_size if block_size is None else block_size)
    check_tables(block_tables, context_lens, len(scores))
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
