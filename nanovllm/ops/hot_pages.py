"""The hot pages of a cache in host memory: which slots on the device hold them, and fetching.

For each (sequence, layer, KV head) the device holds C hot slots and T tail slots, each one page of
one head. The tail is the newest, unfinished KV block, which lies nowhere else. Every older page is
in host memory, and copies of those used last are in the hot slots. Slot i of C + T has the number
`((sequence * num_layers + layer) * num_kv_heads + head) * (C + T) + i`; hot slots come first. T is
`block_size // page_size`, and logical page p of a sequence is in its block `p // T`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

IN_USE = 2**31 - 1
"""Stands for the last use of a slot that this step reads: later than every other."""


@dataclass(frozen=True, kw_only=True)
class HotState:
    """What the hot slots hold, for `place_pages` to read and update; all on the device."""

    slot_of_page: torch.Tensor
    """int32 `[num_seqs, num_layers, num_kv_heads, max_pages]`: the hot slot, in [0, C), that holds
    a logical page; -1 where none does."""
    page_of_slot: torch.Tensor
    """int32 `[num_seqs, num_layers, num_kv_heads, C]`: the logical page, -1 where a slot is empty.
    """
    last_used: torch.Tensor
    """int32, like `page_of_slot`: the clock of the last step that used the slot; 0: none did."""
    counts: torch.Tensor
    """int64 `[2]`: pages that steps wanted of those in host memory, and how many of them had to be
    fetched; one page of one head counts one."""

    @classmethod
    def empty(
        cls,
        num_seqs: int,
        num_layers: int,
        num_kv_heads: int,
        num_slots: int,
        max_pages: int,
        device: torch.device,
    ) -> "HotState":
        """Make the state of `num_slots` empty hot slots for each sequence, layer and KV head."""
        rows = num_seqs, num_layers, num_kv_heads
        return cls(
            slot_of_page=torch.full((*rows, max_pages), -1, dtype=torch.int32, device=device),
            page_of_slot=torch.full((*rows, num_slots), -1, dtype=torch.int32, device=device),
            last_used=torch.zeros((*rows, num_slots), dtype=torch.int32, device=device),
            counts=torch.zeros(2, dtype=torch.int64, device=device),
        )

    def forget(self, seqs: slice = slice(None)) -> None:
        """Empty the hot slots of some sequences; the counts go on. Does not synchronise."""
        self.slot_of_page[seqs].fill_(-1)
        self.page_of_slot[seqs].fill_(-1)
        self.last_used[seqs].zero_()


@dataclass(frozen=True)
class HostBlocks:
    """Where the KV blocks of one layer lie in host memory, twice: a GPU and a CPU read one each.

    A block is `[2 (keys, values), num_kv_heads, block_size, head_dim]`, contiguous, of the slots'
    dtype. Those of a sequence follow its order; only those of pages that are fetched need be there.
    """

    addresses: torch.Tensor
    """int64 `[num_seqs, max_blocks]` on the device: addresses of pinned memory, each a multiple of
    16 bytes."""
    blocks: Sequence[Sequence[torch.Tensor]]
    """For each sequence its blocks."""


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
    """Give each chosen page of a layer a slot; update `state`, which then takes it as fetched.

    A page of the tail has its tail slot, one in a hot slot stays there. The other pages, say n,
    take the n hot slots used least recently of those that this step does not use, the lower slot
    first among equals; they take them in order, both ascending. Pages thrown out are forgotten.

    Args:
        pages: int32 `[num_seqs, num_kv_heads, num_pages]`: logical pages, none twice for a head,
            of which the first `ceil(lens / page_size)` count. Sequences are the first ones of
            `state`; `num_pages` is at most C.
        lens: int32 `[num_seqs]`: tokens in the pages that count; may be 0.
        context_lens: int32 `[num_seqs]`: the tail is the block of the context's last token.
        state: updated in place, for these sequences and `layer_id`.
        clock: int32 `[1]`, from 1 on; the caller raises it for every step.
        page_size, block_size: tokens; the second a multiple of the first.

    All tensors are contiguous and on one device.

    Returns:
        `tables`, int32 like `pages`: the number of each page's slot, 0 where no page counts; and
        `fetch`, int32 like `pages`: the same number where the page has yet to be fetched, else -1.
        Does not synchronise on a GPU, and depends on nothing but values.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit, or more pages than hot slots.
    """
    _check_place(pages, lens, context_lens, state, layer_id, clock, page_size, block_size)
    if pages.is_cuda:
        from nanovllm.ops.kernels import hot_pages as kernels

        return kernels.place_pages(
            pages, lens, context_lens, state, layer_id, clock, page_size, block_size
        )
    num_seqs, num_kv_heads, num_pages = pages.shape
    num_slots, num_tail = state.page_of_slot.shape[3], block_size // page_size
    slot_of_page, page_of_slot, last_used = (
        x[:num_seqs, layer_id] for x in (state.slot_of_page, state.page_of_slot, state.last_used)
    )
    counted = torch.arange(num_pages) * page_size < lens[:, None, None]
    tail_page = pages - ((context_lens - 1) // block_size * num_tail)[:, None, None]
    on_host = counted & (tail_page < 0)
    slot = torch.where(on_host, slot_of_page.gather(2, pages.where(on_host, 0).long()), -1)
    missing = on_host & (slot < 0)

    # One column more, for what is no hit; it is cut off again.
    stamps = torch.nn.functional.pad(last_used, (0, 1))
    stamps.scatter_(2, slot.where(slot >= 0, num_slots).long(), IN_USE)
    oldest = stamps[..., :num_slots].argsort(dim=-1, stable=True)
    taken = torch.arange(num_slots) < missing.sum(-1, keepdim=True)
    victims = oldest.where(taken, num_slots).sort(-1).values.int()
    rank = (missing.cumsum(-1) - 1).clamp(min=0)
    slot = torch.where(missing, victims.gather(2, rank), slot)

    seq, head, _ = missing.nonzero(as_tuple=True)
    page, victim = pages[missing].long(), slot[missing].long()
    old = page_of_slot[seq, head, victim].long()
    full = old >= 0
    slot_of_page[seq[full], head[full], old[full]] = -1
    slot_of_page[seq, head, page] = victim.int()
    page_of_slot[seq, head, victim] = page.int()
    seq, head, _ = on_host.nonzero(as_tuple=True)
    last_used[seq, head, slot[on_host].long()] = clock
    state.counts.add_(torch.stack([on_host.sum(), missing.sum()]))

    row = torch.arange(num_seqs)[:, None] * state.page_of_slot.shape[1] + layer_id
    row = (row * num_kv_heads + torch.arange(num_kv_heads))[..., None]
    slot = torch.where(tail_page < 0, slot, num_slots + tail_page)
    tables = torch.where(counted, row * (num_slots + num_tail) + slot, 0).int()
    return tables, tables.where(missing, -1)


def fetch_pages(
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    fetch: torch.Tensor,
    host: HostBlocks,
    page_size: int,
    block_size: int,
) -> None:
    """Copy pages of a layer, bit by bit, from host memory to the slots where `fetch` wants them.

    Args:
        keys, values: `[num_slots, page_size, head_dim]`, contiguous, of one dtype: all slots,
            those of the tails too. A page takes a multiple of 16 bytes in each.
        pages, fetch: int32 `[num_seqs, num_kv_heads, num_pages]`, as `place_pages` takes and
            returns them. Nothing is read or written where `fetch` is negative.
        host: the blocks of this layer.
        page_size, block_size: tokens; the second a multiple of the first.

    On a GPU, a kernel reads host memory itself: what is written there must have arrived by then,
    and must stay until the kernel has ended. Does not synchronise there.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    _check_fetch(keys, values, pages, fetch, host.addresses, page_size, block_size)
    if keys.is_cuda:
        from nanovllm.ops.kernels import hot_pages as kernels

        kernels.fetch_pages(keys, values, pages, fetch, host.addresses, page_size, block_size)
        return
    for seq, head, j in (fetch >= 0).nonzero().tolist():
        slot, token = fetch[seq, head, j], int(pages[seq, head, j]) * page_size
        first = token % block_size
        page = host.blocks[seq][token // block_size][:, head, first : first + page_size]
        keys[slot], values[slot] = page


def _check_place(
    pages: torch.Tensor,
    lens: torch.Tensor,
    context_lens: torch.Tensor,
    state: HotState,
    layer_id: int,
    clock: torch.Tensor,
    page_size: int,
    block_size: int,
) -> None:
    max_seqs, num_layers, num_kv_heads, max_pages = state.slot_of_page.shape
    num_slots = state.page_of_slot.shape[-1]
    num_seqs, num_pages = len(pages), pages.shape[-1]
    _check_int32("pages", pages, num_seqs, num_kv_heads, num_pages)
    _check_int32("lens", lens, num_seqs)
    _check_int32("context_lens", context_lens, num_seqs)
    _check_int32("clock", clock, 1)
    _check_int32("slot_of_page", state.slot_of_page, max_seqs, num_layers, num_kv_heads, max_pages)
    _check_int32("page_of_slot", state.page_of_slot, max_seqs, num_layers, num_kv_heads, num_slots)
    _check_int32("last_used", state.last_used, *state.page_of_slot.shape)
    _check_sizes(page_size, block_size)
    if num_seqs > max_seqs or num_pages > num_slots or not 0 <= layer_id < num_layers:
        raise ValueError(
            f"{num_seqs} sequences, {num_pages} pages and layer {layer_id}; the state has "
            f"{max_seqs} sequences, {num_slots} hot slots and {num_layers} layers"
        )


def _check_fetch(
    keys: torch.Tensor,
    values: torch.Tensor,
    pages: torch.Tensor,
    fetch: torch.Tensor,
    addresses: torch.Tensor,
    page_size: int,
    block_size: int,
) -> None:
    _check_int32("pages", pages, *fetch.shape)
    _check_int32("fetch", fetch, *pages.shape)
    _check_sizes(page_size, block_size)
    for name, x in (("keys", keys), ("values", values)):
        fits = x.dim() == 3 and x.shape == keys.shape and x.dtype == keys.dtype
        if not fits or x.shape[1] != page_size or not x.is_contiguous():
            raise ValueError(
                f"{name} of shape {list(x.shape)}, {x.dtype} and strides {x.stride()}; needed is "
                f"[num_slots, {page_size}, head_dim], contiguous, alike for keys and values"
            )
    if keys[0].nbytes % 16:
        raise ValueError(f"a page of {keys[0].nbytes} bytes; needed is a multiple of 16")

    fits = addresses.dim() == 2 and addresses.dtype == torch.int64 and addresses.is_contiguous()
    if not fits or len(addresses) < len(pages):
        raise ValueError(
            f"addresses of shape {list(addresses.shape)}, {addresses.dtype} and strides "
            f"{addresses.stride()}; needed is int64 [{len(pages)}, max_blocks], contiguous"
        )


def _check_int32(name: str, x: torch.Tensor, *shape: int) -> None:
    if x.shape != shape or x.dtype != torch.int32 or not x.is_contiguous():
        raise ValueError(
            f"{name} of shape {list(x.shape)}, {x.dtype} and strides {x.stride()}; needed is "
            f"int32 {list(shape)}, contiguous"
        )


def _check_sizes(page_size: int, block_size: int) -> None:
    if block_size % page_size:
        raise ValueError(f"blocks of {block_size} tokens do not divide into pages of {page_size}")
