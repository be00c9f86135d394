"""What the device knows of the keys of every page, so that decode can tell which ones it wants.

A page is `page_size` tokens of the KV cache that lie together inside a block. Its bounds are the
channel-wise minimum and maximum of its keys, for each KV head (Tang et al., 2024, section 3.2); its
codes say of every key and channel in which quarter between them it lies. Slots of the cache are
`block_id * block_size + offset`; a slot's page is `slot // page_size`.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F

CODES_PER_WORD = 8
"""Codes, of 2 bits each, in an int16."""
_CODE_VALUES = torch.tensor([[(byte >> 2 * i & 3) + 0.5 for i in range(4)] for byte in range(256)])


class PageIndex(NamedTuple):
    """The index of one layer; with one axis more in front, of all layers."""

    bounds: torch.Tensor
    """`[num_pages, num_kv_heads, 2, head_dim]` of the cache's dtype, contiguous: the minimum and
    the maximum of each channel of a page's keys."""
    codes: torch.Tensor | None = None
    """int16 `[num_pages, num_kv_heads, page_size, n]`, n = `num_words(head_dim)`, contiguous: in
    which quarter of the bounds a key lies, 0 to 3, channel d in the two bits from 2 (d div n) on
    of word d mod n. None if bounds alone are kept."""

    @property
    def num_bytes(self) -> int:
        """Memory of the index."""
        return self.bounds.nbytes + (0 if self.codes is None else self.codes.nbytes)

    def layers(self) -> "list[PageIndex]":
        """Return the index of each layer, where this one is of all."""
        codes = [None] * len(self.bounds) if self.codes is None else self.codes
        return [PageIndex(*layer) for layer in zip(self.bounds, codes, strict=True)]


def num_words(head_dim: int) -> int:
    """Return how many words hold the codes of one key."""
    return -(-head_dim // CODES_PER_WORD)


def update_page_index(
    index: PageIndex,
    key_cache: torch.Tensor,
    key_slots: torch.Tensor,
    cache_slots: torch.Tensor,
    page_size: int,
) -> None:
    """Bring the index of pages up to date with tokens that have just been stored.

    A page is read from its first token to the newest. A key that is NaN makes both bounds of its
    channel NaN. Does not synchronise.

    Args:
        index: of one layer. Updated in place.
        key_cache: `[num_blocks, block_size, num_kv_heads, head_dim]`, the last axis contiguous; the
            other strides are free.
        key_slots: int32 `[n]`, contiguous: where in `key_cache` each token's key lies. Those of its
            page's earlier tokens lie in the slots before, whenever they were stored.
        cache_slots: int32 `[n]`, contiguous: each token's slot in the cache that `index` is of.
            Tokens of one page follow each other, in order. Several of the same slot leave its page
            with any bounds.
        page_size: tokens of a page, a power of two.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    _check_index(index, page_size)
    bounds = index.bounds
    wanted = (bounds.shape[1], bounds.shape[3], bounds.dtype)
    if (*key_cache.shape[2:], key_cache.dtype) != wanted or key_cache.stride(3) != 1:
        raise ValueError(
            f"key_cache of shape {list(key_cache.shape)}, {key_cache.dtype} and strides "
            f"{key_cache.stride()} for bounds of {list(bounds.shape)} and {bounds.dtype}; heads "
            "and dtype must be equal, and the last stride 1"
        )
    for name, slots in (("key_slots", key_slots), ("cache_slots", cache_slots)):
        check_ints(name, slots, cache_slots.shape[:1])
    if len(cache_slots) == 0:
        return
    if bounds.is_cuda:
        from nanovllm.ops.kernels import page_index as kernels

        kernels.update_page_index(index, key_cache, key_slots, cache_slots, page_size)
        return
    _update(index, key_cache, key_slots, cache_slots, page_size)


def score_pages(
    query: torch.Tensor,
    index: PageIndex,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
    page_size: int,
    block_size: int,
) -> torch.Tensor:
    """Return how much each query may want of each page, as a logarithm.

    By bounds: the greatest logit that a key within them could have, which is
    `sum_d max(q_d min_d, q_d max_d)` times the scale. With codes: the logarithm of the sum of
    `exp(logit)` over the page's tokens, each key taken for the middle of its quarters. The page of
    the newest token is attended to in any case and not scored, so its index may change meanwhile.
    Where a 16-bit query times a quarter is beyond float16's range, the page's score may be infinite
    or NaN.

    Args:
        query: `[num_seqs, num_q_heads, head_dim]`, the last axis contiguous.
        index: of one layer.
        block_tables: int32 `[num_seqs, max_blocks]`, the last axis contiguous: the ids of each
            sequence's blocks in order. Entries past the context are never read through.
        context_lens: int32 `[num_seqs]`.
        softmax_scale: factor of the logits.
        page_size: tokens of a page, a power of two.
        block_size: tokens of a block, a multiple of `page_size`.

    Returns:
        fp32 `[num_seqs, num_kv_heads, queries of a KV head, max_blocks * block_size / page_size]`,
        by the page's place in the sequence: `-inf` from the newest token's page on. A row depends
        on its sequence only. Does not synchronise, and its launch depends on shapes only.

    Raises:
        ValueError: shapes, dtypes or strides that do not fit.
    """
    _check_index(index, page_size)
    check_page_size(page_size, block_size)
    num_seqs, num_q_heads, dim = query.shape
    num_kv_heads = index.bounds.shape[1]
    if num_q_heads % num_kv_heads or dim != index.bounds.shape[3] or query.stride(2) != 1:
        raise ValueError(
            f"query of shape {list(query.shape)} and strides {query.stride()} for bounds of "
            f"{list(index.bounds.shape)}"
        )
    check_tables(block_tables, context_lens, num_seqs)
    if query.is_cuda:
        from nanovllm.ops.kernels import page_index as kernels

        return kernels.score_pages(
            query, index, block_tables, context_lens, softmax_scale, page_size, block_size
        )
    pages_per_block = block_size // page_size
    max_pages, group = block_tables.shape[1] * pages_per_block, num_q_heads // num_kv_heads
    scores = torch.full((num_seqs, num_kv_heads, group, max_pages), float("-inf"))
    # One by one, so that products of matrices do not depend on the other sequences.
    for i, length in enumerate(context_lens.tolist()):
        pages = torch.arange(max(0, length - 1) // page_size)
        blocks = block_tables[i, pages // pages_per_block]
        places = blocks * pages_per_block + pages % pages_per_block
        q = query[i].float().unflatten(0, (num_kv_heads, -1)) * softmax_scale
        low, high = index.bounds[places].float().unbind(2)
        if index.codes is None:
            scores[i, ..., : len(pages)] = _largest_logits(q, low, high)
        else:
            logits = _logits_of_codes(q, low, high, index.codes[places])
            scores[i, ..., : len(pages)] = logits.unflatten(2, (-1, page_size)).logsumexp(-1)
    return scores


def check_page_size(page_size: int, block_size: int) -> None:
    """Raise ValueError unless pages are a power of two of tokens and divide blocks."""
    if page_size < 1 or page_size & (page_size - 1) or block_size % page_size:
        raise ValueError(
            f"page_size={page_size} must be a power of two and divide block_size={block_size}"
        )


def check_tables(
    block_tables: torch.Tensor | None, context_lens: torch.Tensor, num_seqs: int
) -> None:
    """Raise ValueError unless lengths and tables, if there are any, are of that many sequences."""
    check_ints("context_lens", context_lens, (num_seqs,), gaps=True)
    if block_tables is not None:
        check_ints("block_tables", block_tables, (num_seqs, block_tables.shape[-1]))


def check_ints(name: str, x: torch.Tensor, shape: tuple[int, ...], gaps: bool = False) -> None:
    """Raise ValueError unless `x` is int32 of a shape, with or without gaps in the last axis."""
    fits = x.shape == shape and x.dtype == torch.int32
    if not fits or not (gaps or x.shape[-1] < 2 or x.stride(-1) == 1):
        raise ValueError(
            f"{name} of shape {list(x.shape)}, {x.dtype} and strides {x.stride()}; needed is "
            f"int32 {list(shape)}{'' if gaps else ', contiguous in the last axis'}"
        )


def _update(
    index: PageIndex,
    key_cache: torch.Tensor,
    key_slots: torch.Tensor,
    cache_slots: torch.Tensor,
    page_size: int,
) -> None:
    pages, counts = (cache_slots // page_size).unique_consecutive(return_counts=True)
    newest = counts.cumsum(0) - 1
    offset = (cache_slots[newest] % page_size)[:, None]
    # What is past the newest token repeats it, which changes no bound: [num_pages, page_size]
    slots = key_slots[newest][:, None] - offset + torch.arange(page_size).minimum(offset)
    block_size = key_cache.shape[1]
    keys = key_cache[slots // block_size, slots % block_size]
    low, high = keys.aminmax(dim=1)
    index.bounds[pages] = torch.stack((low, high), dim=2)
    if index.codes is not None:
        # [num_pages, num_kv_heads, page_size, head_dim]
        keys, low, high = (
            keys.transpose(1, 2).float(),
            low.float()[:, :, None],
            high.float()[:, :, None],
        )
        step = (high - low) / 4
        above = [keys >= limit for limit in (low + step, low + 2 * step, high - step)]
        codes = torch.stack(above).sum(0, dtype=torch.int32)
        words = index.codes.shape[3]
        codes = F.pad(codes, (0, words * CODES_PER_WORD - codes.shape[3]))
        shifts = 2 * torch.arange(CODES_PER_WORD, dtype=torch.int32)[:, None]
        index.codes[pages] = (codes.unflatten(3, (-1, words)) << shifts).sum(3).short()


def _largest_logits(q: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return `[num_kv_heads, group, num_pages]` for bounds `[num_pages, num_kv_heads, dim]`."""
    low, high = low.permute(1, 2, 0), high.permute(1, 2, 0)
    return q.clamp(min=0) @ high + q.clamp(max=0) @ low


def _logits_of_codes(
    q: torch.Tensor, low: torch.Tensor, high: torch.Tensor, codes: torch.Tensor
) -> torch.Tensor:
    """Return `[num_kv_heads, group, num_pages * page_size]`."""
    # Channels in the order of the codes in memory, word by word, for queries that are few.
    padded = codes.shape[3] * CODES_PER_WORD
    steps = F.pad((high - low)[:, :, None] / 4 * q, (0, padded - q.shape[2]))
    steps = steps.unflatten(3, (CODES_PER_WORD, -1)).mT.flatten(3)
    values = _CODE_VALUES[codes.flatten().view(torch.uint8).int()].view(*codes.shape[:3], padded)
    logits: torch.Tensor = values @ steps.mT + (low[:, :, None] * q).sum(3)[:, :, None]
    return logits.permute(1, 3, 0, 2).flatten(2)


def _check_index(index: PageIndex, page_size: int) -> None:
    bounds, codes = index
    check_page_size(page_size, page_size)
    if bounds.dim() != 4 or bounds.shape[2] != 2 or not bounds.is_contiguous():
        raise ValueError(
            f"bounds of shape {list(bounds.shape)} and strides {bounds.stride()}; needed is "
            "[num_pages, num_kv_heads, 2, head_dim], contiguous"
        )
    if codes is None:
        return
    num_pages, num_kv_heads, _, dim = bounds.shape
    shape = (num_pages, num_kv_heads, page_size, num_words(dim))
    if codes.shape != shape or codes.dtype != torch.int16 or not codes.is_contiguous():
        raise ValueError(
            f"codes of shape {list(codes.shape)}, {codes.dtype} and strides {codes.stride()}; "
            f"needed is int16 {list(shape)}, contiguous"
        )
