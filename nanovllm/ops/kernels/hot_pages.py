"""Placement of pages by bisection over last uses, and copies that read pinned host memory."""

import torch
import triton
import triton.language as tl

from nanovllm.ops.hot_pages import IN_USE, HotState

_SLOTS_PER_WARP = 256
_ENTRIES = 2048  # of `fetch`, which a program looks at in one go: 8 a thread
_WORD_BYTES = 8


@triton.jit(do_not_specialize=["layer_id"])
def _place_kernel(
    pages_ptr,
    lens_ptr,
    context_lens_ptr,
    slot_of_page_ptr,
    page_of_slot_ptr,
    last_used_ptr,
    counts_ptr,
    clock_ptr,
    tables_ptr,
    fetch_ptr,
    layer_id,
    num_layers,
    num_kv_heads,
    num_pages,
    num_slots,
    max_pages,
    page_size,
    block_size,
    PAGES: tl.constexpr,
    SLOTS: tl.constexpr,
    IN_USE: tl.constexpr,
):
    seq = tl.program_id(0) // num_kv_heads
    head = tl.program_id(0) % num_kv_heads
    row = ((seq * num_layers + layer_id) * num_kv_heads + head).to(tl.int64)
    slot_of_page = slot_of_page_ptr + row * max_pages
    page_of_slot = page_of_slot_ptr + row * num_slots
    last_used = last_used_ptr + row * num_slots
    entries = tl.program_id(0).to(tl.int64) * num_pages
    fetch = fetch_ptr + entries
    clock = tl.load(clock_ptr)
    num_tail = block_size // page_size
    tail = (tl.load(context_lens_ptr + seq) - 1) // block_size * num_tail

    entry = tl.arange(0, PAGES)
    exists = entry < num_pages
    counted = exists & (entry * page_size < tl.load(lens_ptr + seq))
    page = tl.load(pages_ptr + entries + entry, mask=counted, other=0)
    on_host = counted & (page < tail)
    held = tl.load(slot_of_page + page, mask=on_host, other=-1)
    missing = on_host & (held < 0)
    num_missing = tl.sum(missing.to(tl.int32), 0)

    # Threads of the program see through memory what others of them have stored, after a barrier.
    slot = held
    if num_missing > 0:
        tl.store(last_used + held, tl.full((PAGES,), IN_USE, tl.int32), mask=held >= 0)
        tl.debug_barrier()
        hot = tl.arange(0, SLOTS)
        stamp = tl.load(last_used + hot, mask=hot < num_slots, other=IN_USE)
        # The least stamp up to which there are slots enough: all older ones are taken, and of those
        # with this stamp the first few. Pages are no more than slots, so there is one.
        low = tl.min(stamp, 0)
        cut = tl.max(tl.where(stamp < IN_USE, stamp, 0), 0)
        while low < cut:
            middle = low + (cut - low) // 2
            enough = tl.sum((stamp <= middle).to(tl.int32), 0) >= num_missing
            low = tl.where(enough, low, middle + 1)
            cut = tl.where(enough, middle, cut)
        ties = (stamp == cut).to(tl.int32)
        num_ties = num_missing - tl.sum((stamp < cut).to(tl.int32), 0)
        victim = (stamp < cut) | ((ties > 0) & (tl.cumsum(ties, 0) <= num_ties))
        # The row of `fetch`, not yet in use, passes them on: the first to the first page missing.
        tl.store(fetch + tl.cumsum(victim.to(tl.int32), 0) - 1, hot, mask=victim)
        tl.debug_barrier()
        rank = tl.cumsum(missing.to(tl.int32), 0) - 1
        slot = tl.load(fetch + rank, mask=missing, other=0)
        slot = tl.where(missing, slot, held)
        old = tl.load(page_of_slot + slot, mask=missing, other=-1)
        tl.debug_barrier()
        # No page thrown out is one of those that come: it would have been found.
        tl.store(slot_of_page + old, tl.full((PAGES,), -1, tl.int32), mask=old >= 0)
        tl.store(slot_of_page + page, slot, mask=missing)
        tl.store(page_of_slot + slot, page, mask=missing)
    tl.store(last_used + slot, tl.zeros((PAGES,), tl.int32) + clock, mask=on_host)

    slot = tl.where(on_host, slot, num_slots + page - tail)
    table = tl.where(counted, row.to(tl.int32) * (num_slots + num_tail) + slot, 0)
    tl.store(tables_ptr + entries + entry, table, mask=exists)
    tl.store(fetch + entry, tl.where(missing, table, -1), mask=exists)
    tl.atomic_add(counts_ptr, tl.sum(on_host.to(tl.int32), 0).to(tl.int64))
    tl.atomic_add(counts_ptr + 1, num_missing.to(tl.int64))


def place_pages(
    pages: torch.Tensor,
    lens: torch.Tensor,
    context_lens: torch.Tensor,
    state: HotState,
    layer_id: int,
    clock: torch.Tensor,
    page_size: int,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.hot_pages.place_pages`."""
    num_seqs, num_kv_heads, num_pages = pages.shape
    num_layers, num_slots = state.page_of_slot.shape[1], state.page_of_slot.shape[3]
    tables, fetch = torch.empty_like(pages), torch.empty_like(pages)
    slots = triton.next_power_of_2(num_slots)
    _place_kernel[(num_seqs * num_kv_heads,)](
        pages,
        lens,
        context_lens,
        state.slot_of_page,
        state.page_of_slot,
        state.last_used,
        state.counts,
        clock,
        tables,
        fetch,
        layer_id,
        num_layers,
        num_kv_heads,
        num_pages,
        num_slots,
        state.slot_of_page.shape[3],
        page_size,
        block_size,
        PAGES=triton.next_power_of_2(num_pages),
        SLOTS=slots,
        IN_USE=IN_USE,
        num_warps=max(1, min(8, slots // _SLOTS_PER_WARP)),
    )
    return tables, fetch


@triton.jit
def _fetch_kernel(
    keys_ptr,
    values_ptr,
    pages_ptr,
    fetch_ptr,
    addresses_ptr,
    num_entries,
    num_pages,
    num_kv_heads,
    max_blocks,
    PAGES_PER_BLOCK: tl.constexpr,
    PAGE_WORDS: tl.constexpr,
    PAGE_PAD: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    # Half of the programs copy keys and half values. Each goes through all of `fetch`, which is
    # short, and counts: so the pages to fetch, however they lie, are dealt out evenly.
    part = tl.program_id(1)
    slots_ptr = keys_ptr if part == 0 else values_ptr
    word = tl.arange(0, PAGE_PAD)
    inside = word < PAGE_WORDS
    turn = tl.program_id(0) + 1  # the next page for this program, counted from 1
    count = 0
    for start in range(0, num_entries, ENTRIES):
        entry = start + tl.arange(0, ENTRIES)
        slot = tl.load(fetch_ptr + entry, mask=entry < num_entries, other=-1)
        wanted = (slot >= 0).to(tl.int32)
        number = tl.where(slot >= 0, count + tl.cumsum(wanted, 0), 0)
        count += tl.sum(wanted, 0)
        while turn <= count:
            at = tl.sum(tl.where(number == turn, entry, 0), 0)
            seq = at // num_pages // num_kv_heads
            head = at // num_pages % num_kv_heads
            page = tl.load(pages_ptr + at)
            block = tl.load(addresses_ptr + seq.to(tl.int64) * max_blocks + page // PAGES_PER_BLOCK)
            first = (part * num_kv_heads + head) * PAGES_PER_BLOCK + page % PAGES_PER_BLOCK
            source = block.to(tl.pointer_type(tl.int64)) + first.to(tl.int64) * PAGE_WORDS
            target = slots_ptr + tl.load(fetch_ptr + at).to(tl.int64) * PAGE_WORDS
            # Two words, 16 bytes, go in one load.
            source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
            copied = tl.load(source + word, mask=inside)
            tl.store(target + word, copied, mask=inside)
            turn += tl.num_programs(0)


def fetch_pages(
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    fetch: torch.Tensor,
    addresses: torch.Tensor,
    page_size: int,
    block_size: int,
    num_programs: int = 16,
) -> None:
    """See `ops.hot_pages.fetch_pages`; an even number of programs share the work.

    As few as fill the bus: kernels beside them are slowed by each.
    """
    _, num_kv_heads, num_pages = pages.shape
    page_words = keys[0].nbytes // _WORD_BYTES
    # As integers: whatever the bits mean, they pass unchanged.
    _fetch_kernel[(num_programs // 2, 2)](
        keys.view(-1).view(torch.int64),
        values.view(-1).view(torch.int64),
        pages,
        fetch,
        addresses,
        pages.numel(),
        num_pages,
        num_kv_heads,
        addresses.shape[1],
        PAGES_PER_BLOCK=block_size // page_size,
        PAGE_WORDS=page_words,
        PAGE_PAD=triton.next_power_of_2(page_words),
        ENTRIES=min(_ENTRIES, triton.next_power_of_2(pages.numel())),
        num_warps=8,
    )
