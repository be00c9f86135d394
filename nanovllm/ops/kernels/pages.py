"""Triton kernels of `ops.pages`: bounds of pages, their scores, and the choice among them."""

import torch
import triton
import triton.language as tl

from nanovllm.ops.pages import SHARE_UNITS, num_entries

_PAGES_PER_PROGRAM = 32  # whose bounds a program holds in registers
_CHOICES_PER_WARP = 1024


@triton.jit
def _update_kernel(
    bounds_ptr,
    key_ptr,
    key_slot_ptr,
    cache_slot_ptr,
    num_tokens,
    block_stride,
    token_stride,
    head_stride,
    NUM_KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(cache_slot_ptr + row)
    page = slot // PAGE_SIZE
    previous = tl.load(cache_slot_ptr + tl.maximum(row - 1, 0)) // PAGE_SIZE
    # The first token of a page works for those after it.
    if (row == 0) | (previous != page):
        dims = tl.arange(0, DIM_PAD)
        rows = row + tl.arange(0, PAGE_SIZE)
        slots = tl.load(cache_slot_ptr + rows, mask=rows < num_tokens, other=0)
        # Rows of other pages repeat the first one, which changes no bound.
        rows = tl.where((rows < num_tokens) & (slots // PAGE_SIZE == page), rows, row)
        source = tl.load(key_slot_ptr + rows).to(tl.int64)
        at = source // BLOCK_SIZE * block_stride + source % BLOCK_SIZE * token_stride
        keys = tl.load(
            key_ptr + (at + head * head_stride)[:, None] + dims[None, :],
            mask=(dims < DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        # The reductions would pass over NaN.
        has_nan = tl.max((keys != keys).to(tl.int32), 0) > 0
        low = tl.where(has_nan, float("nan"), tl.min(keys, 0))
        high = tl.where(has_nan, float("nan"), tl.max(keys, 0))

        target = bounds_ptr + (page.to(tl.int64) * NUM_KV_HEADS + head) * (2 * DIM) + dims
        inside = dims < DIM
        if slot % PAGE_SIZE != 0:  # the page goes on
            old_low = tl.load(target, mask=inside, other=0.0).to(tl.float32)
            old_high = tl.load(target + DIM, mask=inside, other=0.0).to(tl.float32)
            low = tl.minimum(low, old_low, propagate_nan=tl.PropagateNan.ALL)
            high = tl.maximum(high, old_high, propagate_nan=tl.PropagateNan.ALL)
        dtype = bounds_ptr.dtype.element_ty
        tl.store(target, low.to(dtype), mask=inside)
        tl.store(target + DIM, high.to(dtype), mask=inside)


def update_page_bounds(
    bounds: torch.Tensor,
    key_cache: torch.Tensor,
    key_slots: torch.Tensor,
    cache_slots: torch.Tensor,
    page_size: int,
) -> None:
    """See `ops.pages.update_page_bounds`."""
    num_kv_heads, _, dim = bounds.shape[1:]
    num_tokens = len(cache_slots)
    _update_kernel[(num_tokens, num_kv_heads)](
        bounds,
        key_cache,
        key_slots,
        cache_slots,
        num_tokens,
        *key_cache.stride()[:3],
        NUM_KV_HEADS=num_kv_heads,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        BLOCK_SIZE=key_cache.shape[1],
        PAGE_SIZE=page_size,
        num_warps=4,
    )


@triton.jit
def _score_kernel(
    q_ptr,
    bounds_ptr,
    table_ptr,
    length_ptr,
    score_ptr,
    scale,
    max_pages,
    q_stride,
    q_head_stride,
    table_stride,
    length_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    PAGES: tl.constexpr,
):
    first_page = tl.program_id(0) * PAGES
    head = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    num_pages = tl.cdiv(tl.load(length_ptr + seq * length_stride), PAGE_SIZE)
    pages = first_page + tl.arange(0, PAGES)
    seen = (pages < num_pages) & (pages < max_pages)
    target = score_ptr + (seq * NUM_KV_HEADS + head) * GROUP * max_pages + pages
    if first_page < num_pages:
        dims = tl.arange(0, DIM_PAD)
        blocks = tl.load(
            table_ptr + seq * table_stride + pages // PAGES_PER_BLOCK, mask=seen, other=0
        ).to(tl.int64)
        physical = blocks * PAGES_PER_BLOCK + pages % PAGES_PER_BLOCK
        at = (physical * NUM_KV_HEADS + head) * (2 * DIM)
        pointers = bounds_ptr + at[:, None] + dims[None, :]
        inside = seen[:, None] & (dims < DIM)[None, :]
        low = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
        high = tl.load(pointers + DIM, mask=inside, other=0.0).to(tl.float32)
        for i in tl.static_range(GROUP):
            q_head = (head * GROUP + i).to(tl.int64)
            q = tl.load(
                q_ptr + seq * q_stride + q_head * q_head_stride + dims, mask=dims < DIM, other=0.0
            ).to(tl.float32)
            positive = tl.where(q > 0, q, 0.0)
            bound = tl.sum(positive[None, :] * high + (q - positive)[None, :] * low, 1) * scale
            bound = tl.where(seen, bound, float("-inf"))
            tl.store(target + i * max_pages, bound, mask=pages < max_pages)
    else:
        hidden = tl.full((PAGES,), float("-inf"), tl.float32)
        for i in tl.static_range(GROUP):
            tl.store(target + i * max_pages, hidden, mask=pages < max_pages)


def score_pages(
    query: torch.Tensor,
    bounds: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
    page_size: int,
    block_size: int,
) -> torch.Tensor:
    """See `ops.pages.score_pages`."""
    num_seqs, num_q_heads, dim = query.shape
    num_kv_heads = bounds.shape[1]
    group = num_q_heads // num_kv_heads
    max_pages = block_tables.shape[1] * (block_size // page_size)
    scores = torch.empty(
        num_seqs, num_kv_heads, group, max_pages, dtype=torch.float32, device=query.device
    )
    _score_kernel[(triton.cdiv(max_pages, _PAGES_PER_PROGRAM), num_kv_heads, num_seqs)](
        query,
        bounds,
        block_tables,
        context_lens,
        scores,
        softmax_scale,
        max_pages,
        *query.stride()[:2],
        block_tables.stride(0),
        context_lens.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        DIM=dim,
        DIM_PAD=triton.next_power_of_2(dim),
        PAGE_SIZE=page_size,
        PAGES_PER_BLOCK=block_size // page_size,
        PAGES=_PAGES_PER_PROGRAM,
        num_warps=4,
    )
    return scores


@triton.jit
def _top_kernel(
    score_ptr,
    length_ptr,
    table_ptr,
    page_ptr,
    len_ptr,
    max_pages,
    num_pages,
    num_recent,
    num_dense,
    num_entries,
    score_stride,
    score_head_stride,
    score_query_stride,
    length_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SHARE_UNITS: tl.constexpr,
    PAGES: tl.constexpr,
    ENTRIES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    HAS_TABLE: tl.constexpr,
):
    seq = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(length_ptr + seq * length_stride)
    num_seen = tl.cdiv(length, PAGE_SIZE)
    num_kept = tl.where(num_seen <= num_dense, num_seen, tl.minimum(num_seen, num_pages))
    pages = tl.arange(0, PAGES)
    seen = (pages < num_seen) & (pages < max_pages)
    scores = tl.full((PAGES,), float("-inf"), tl.float32)
    for i in tl.static_range(GROUP):
        at = seq * score_stride + head * score_head_stride + i * score_query_stride
        own = tl.load(score_ptr + at + pages, mask=seen, other=0.0)
        own = tl.where(own != own, float("inf"), own)
        if GROUP > 1:
            # Less the logarithm of the query's sum over pages. Added as integers, whose sum does
            # not depend on the order, and so not on the width of the table.
            counted = tl.where(seen & (own < float("inf")), own, float("-inf"))
            peak = tl.max(counted, 0)
            peak = tl.where(peak == float("-inf"), 0.0, peak)
            total = tl.sum((tl.exp(counted - peak) * SHARE_UNITS).to(tl.int64), 0)
            total = tl.maximum(total, 1).to(tl.float32) / SHARE_UNITS
            own = own - (peak + tl.log(total))
        scores = tl.maximum(scores, own)
    scores = tl.where(scores == 0, 0.0, scores)  # -0.0 is no less
    # Integers that are ordered as the scores are; more than all for a page that must be kept, and
    # less than all for one that is not there.
    bits = scores.to(tl.int32, bitcast=True)
    keys = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    keys = tl.where((pages == 0) | (pages >= num_seen - num_recent), 0x7FFFFFFF, keys)
    keys = tl.where(seen, keys, -0x80000000)

    # The greatest number that enough keys reach: its sign, then bit by bit.
    from_zero = tl.sum((keys >= 0).to(tl.int32), 0)
    cut = tl.where(from_zero >= num_kept, 0, -0x80000000).to(tl.int32)
    for i in range(31):
        trial = cut + (1 << (30 - i))
        from_trial = tl.sum((keys >= trial).to(tl.int32), 0)
        cut = tl.where(from_trial >= num_kept, trial, cut)
    above = keys > cut
    ties = (keys == cut).to(tl.int32)
    num_ties = num_kept - tl.sum(above.to(tl.int32), 0)
    keep = above | ((ties > 0) & (tl.cumsum(ties, 0) <= num_ties))

    chosen = pages
    if HAS_TABLE:
        blocks = tl.load(
            table_ptr + seq * table_stride + pages // PAGES_PER_BLOCK, mask=keep, other=0
        )
        chosen = blocks * PAGES_PER_BLOCK + pages % PAGES_PER_BLOCK
    out_ptr = page_ptr + (seq * NUM_KV_HEADS + head) * num_entries
    tl.store(out_ptr + tl.cumsum(keep.to(tl.int32), 0) - 1, chosen, mask=keep)
    entries = tl.arange(0, ENTRIES)
    unused = (entries >= num_kept) & (entries < num_entries)
    tl.store(out_ptr + entries, tl.zeros((ENTRIES,), tl.int32), mask=unused)
    # All pages that are left out are full.
    tl.store(len_ptr + seq, length - (num_seen - num_kept) * PAGE_SIZE, mask=head == 0)


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
    """See `ops.pages.top_pages`."""
    num_seqs, num_kv_heads, group, max_pages = scores.shape
    entries = num_entries(num_pages, num_dense, max_pages)
    pages = torch.empty(num_seqs, num_kv_heads, entries, dtype=torch.int32, device=scores.device)
    lens = torch.empty(num_seqs, dtype=torch.int32, device=scores.device)
    width = max(16, triton.next_power_of_2(max_pages))
    _top_kernel[(num_seqs, num_kv_heads)](
        scores,
        context_lens,
        block_tables,
        pages,
        lens,
        max_pages,
        num_pages,
        num_recent,
        num_dense,
        entries,
        *scores.stride()[:3],
        context_lens.stride(0),
        0 if block_tables is None else block_tables.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        SHARE_UNITS=SHARE_UNITS,
        PAGES=width,
        ENTRIES=max(16, triton.next_power_of_2(entries)),
        PAGE_SIZE=page_size,
        PAGES_PER_BLOCK=1 if block_size is None else block_size // page_size,
        HAS_TABLE=block_tables is not None,
        num_warps=max(1, min(16, width // _CHOICES_PER_WARP)),
    )
    return pages, lens
