"""Triton kernel of `ops.pages`: the choice among pages."""

import torch
import triton
import triton.language as tl

from nanovllm.ops.pages import SHARE_UNITS, num_entries

_CHOICES_PER_WARP = 256


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

    # The greatest number that enough keys reach, two bits at a time: the counts of three numbers go
    # in one sum, 21 bits each. Where just enough reach one, the bits that are left do not matter.
    cut = tl.full((), -0x80000000, tl.int32)
    reached = tl.full((), PAGES, tl.int32)
    shift = 30
    while (shift >= 0) & (reached != num_kept):
        step = tl.full((), 1, tl.int32) << shift
        reach = (keys >= cut + step).to(tl.int64)
        reach += (keys >= cut + 2 * step).to(tl.int64) << 21
        reach += (keys >= cut + 3 * step).to(tl.int64) << 42
        counts = tl.sum(reach, 0)
        for _ in tl.static_range(3):
            count = (counts & 0x1FFFFF).to(tl.int32)
            enough = count >= num_kept
            cut += tl.where(enough, step, 0)
            reached = tl.where(enough, count, reached)
            counts = counts >> 21
        shift -= 2
    above = keys > cut
    num_ties = num_kept - tl.sum(above.to(tl.int32), 0)
    # Both kinds are numbered in one scan.
    tied = keys == cut
    places = tl.cumsum(above.to(tl.int64) + (tied.to(tl.int64) << 32), 0)
    tie = (places >> 32).to(tl.int32)
    keep = above | (tied & (tie <= num_ties))
    place = (places & 0x7FFFFFFF).to(tl.int32) + tl.minimum(tie, num_ties) - 1

    chosen = pages
    if HAS_TABLE:
        blocks = tl.load(
            table_ptr + seq * table_stride + pages // PAGES_PER_BLOCK, mask=keep, other=0
        )
        chosen = blocks * PAGES_PER_BLOCK + pages % PAGES_PER_BLOCK
    out_ptr = page_ptr + (seq * NUM_KV_HEADS + head) * num_entries
    tl.store(out_ptr + place, chosen, mask=keep)
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
