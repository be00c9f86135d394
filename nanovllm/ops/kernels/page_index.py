"""Triton kernels of `ops.page_index`: bounds and codes of pages, and scores by either."""

import torch
import triton
import triton.language as tl

from nanovllm.ops.page_index import CODES_PER_WORD, PageIndex

_PAGES_PER_PROGRAM = 32  # whose bounds a program holds in registers


@triton.jit
def _update_kernel(
    bounds_ptr,
    code_ptr,
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
    CODES_PER_WORD: tl.constexpr,
    HAS_CODES: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(cache_slot_ptr + row)
    page = slot // PAGE_SIZE
    following = tl.load(cache_slot_ptr + tl.minimum(row + 1, num_tokens - 1)) // PAGE_SIZE
    # The newest token of a page works for all of it.
    if (row == num_tokens - 1) | (following != page):
        offset = slot % PAGE_SIZE
        dims = tl.arange(0, DIM_PAD)
        tokens = tl.arange(0, PAGE_SIZE)
        # What is past the newest token repeats it, which changes no bound.
        source = tl.load(key_slot_ptr + row) - offset + tl.minimum(tokens, offset)
        at = (source // BLOCK_SIZE).to(tl.int64) * block_stride
        at += (source % BLOCK_SIZE).to(tl.int64) * token_stride
        keys = tl.load(
            key_ptr + (at + head * head_stride)[:, None] + dims[None, :],
            mask=(dims < DIM)[None, :],
            other=0.0,
        ).to(tl.float32)
        # The reductions would pass over NaN.
        has_nan = tl.max((keys != keys).to(tl.int32), 0) > 0
        low = tl.where(has_nan, float("nan"), tl.min(keys, 0))
        high = tl.where(has_nan, float("nan"), tl.max(keys, 0))

        place = page.to(tl.int64) * NUM_KV_HEADS + head
        target = bounds_ptr + place * (2 * DIM) + dims
        dtype = bounds_ptr.dtype.element_ty
        tl.store(target, low.to(dtype), mask=dims < DIM)
        tl.store(target + DIM, high.to(dtype), mask=dims < DIM)
        if HAS_CODES:
            step = (high - low) * 0.25
            code = (keys >= (low + step)[None, :]).to(tl.int32)
            code += (keys >= (low + 2 * step)[None, :]).to(tl.int32)
            code += (keys >= (high - step)[None, :]).to(tl.int32)
            code = tl.where((dims < DIM)[None, :], code, 0)
            words = tl.arange(0, DIM_PAD // CODES_PER_WORD)
            shifts = 2 * tl.arange(0, CODES_PER_WORD)
            code = tl.reshape(code, (PAGE_SIZE, DIM_PAD // CODES_PER_WORD, CODES_PER_WORD))
            packed = tl.sum(code << shifts[None, None, :], 2)
            num_words: tl.constexpr = (DIM + CODES_PER_WORD - 1) // CODES_PER_WORD
            target = code_ptr + (place * PAGE_SIZE + tokens)[:, None] * num_words + words[None, :]
            tl.store(target, packed, mask=(words < num_words)[None, :])


def update_page_index(
    index: PageIndex,
    key_cache: torch.Tensor,
    key_slots: torch.Tensor,
    cache_slots: torch.Tensor,
    page_size: int,
) -> None:
    """See `ops.page_index.update_page_index`."""
    num_kv_heads, _, dim = index.bounds.shape[1:]
    num_tokens = len(cache_slots)
    _update_kernel[(num_tokens, num_kv_heads)](
        index.bounds,
        index.codes,
        key_cache,
        key_slots,
        cache_slots,
        num_tokens,
        *key_cache.stride()[:3],
        NUM_KV_HEADS=num_kv_heads,
        DIM=dim,
        DIM_PAD=max(CODES_PER_WORD, triton.next_power_of_2(dim)),
        BLOCK_SIZE=key_cache.shape[1],
        PAGE_SIZE=page_size,
        CODES_PER_WORD=CODES_PER_WORD,
        HAS_CODES=index.codes is not None,
        num_warps=4,
    )


@triton.jit
def _score_bounds_kernel(
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


@triton.jit
def _score_codes_kernel(
    q_ptr,
    bounds_ptr,
    code_ptr,
    table_ptr,
    length_ptr,
    score_ptr,
    scale_log2,
    max_pages,
    q_stride,
    q_head_stride,
    table_stride,
    length_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    CODES_PER_WORD: tl.constexpr,
):
    page = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    length = tl.load(length_ptr + seq * length_stride)
    rows = tl.arange(0, ROWS)
    target = score_ptr + ((seq * NUM_KV_HEADS + head) * GROUP + rows) * max_pages + page
    if page * PAGE_SIZE < length:
        dims = tl.arange(0, DIM_PAD)
        tokens = tl.arange(0, PAGE_SIZE)
        num_words: tl.constexpr = (DIM + CODES_PER_WORD - 1) // CODES_PER_WORD
        block = tl.load(table_ptr + seq * table_stride + page // PAGES_PER_BLOCK).to(tl.int64)
        place = (block * PAGES_PER_BLOCK + page % PAGES_PER_BLOCK) * NUM_KV_HEADS + head
        # Every channel loads the word that it is in: the same for 16 of them, so from L1.
        words = code_ptr + (place * PAGE_SIZE + tokens)[:, None] * num_words
        packed = tl.load(
            words + (dims // CODES_PER_WORD)[None, :], mask=(dims < DIM)[None, :], other=0
        )
        q = tl.load(
            q_ptr + seq * q_stride + (head * GROUP + rows)[:, None] * q_head_stride + dims[None, :],
            mask=(rows < GROUP)[:, None] & (dims < DIM)[None, :],
            other=0.0,
        )
        own_bounds = bounds_ptr + place * (2 * DIM) + dims
        low = tl.load(own_bounds, mask=dims < DIM, other=0.0).to(tl.float32)
        high = tl.load(own_bounds + DIM, mask=dims < DIM, other=0.0).to(tl.float32)
        codes = ((packed >> 2 * (dims % CODES_PER_WORD)[None, :]) & 3).to(q.dtype)
        # A key is the middle of its quarters: q * (low + step / 2) + (q * step) * code
        scaled = q.to(tl.float32) * scale_log2
        step = (high - low) * 0.25
        steps = (scaled * step[None, :]).to(q.dtype)
        logits = tl.dot(steps, tl.trans(codes), input_precision="ieee")
        logits += tl.sum(scaled * (low + 0.5 * step)[None, :], 1)[:, None]
        visible = page * PAGE_SIZE + tokens < length
        logits = tl.where(visible[None, :], logits, float("-inf"))
        peak = tl.max(logits, 1)
        total = tl.sum(tl.exp2(logits - peak[:, None]), 1)
        score = (peak + tl.log2(total)) * 0.6931471805599453  # ln(2)
        tl.store(target, score, mask=rows < GROUP)
    else:
        tl.store(target, tl.full((ROWS,), float("-inf"), tl.float32), mask=rows < GROUP)


def score_pages(
    query: torch.Tensor,
    index: PageIndex,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
    page_size: int,
    block_size: int,
) -> torch.Tensor:
    """See `ops.page_index.score_pages`."""
    bounds, codes = index
    num_seqs, num_q_heads, dim = query.shape
    num_kv_heads = bounds.shape[1]
    group = num_q_heads // num_kv_heads
    max_pages = block_tables.shape[1] * (block_size // page_size)
    shape = num_seqs, num_kv_heads, group, max_pages
    scores = torch.empty(shape, dtype=torch.float32, device=query.device)
    strides = *query.stride()[:2], block_tables.stride(0), context_lens.stride(0)
    sizes = {
        "NUM_KV_HEADS": num_kv_heads,
        "GROUP": group,
        "DIM": dim,
        "PAGE_SIZE": page_size,
        "PAGES_PER_BLOCK": block_size // page_size,
    }
    if codes is None:
        _score_bounds_kernel[(triton.cdiv(max_pages, _PAGES_PER_PROGRAM), num_kv_heads, num_seqs)](
            query,
            bounds,
            block_tables,
            context_lens,
            scores,
            softmax_scale,
            max_pages,
            *strides,
            DIM_PAD=triton.next_power_of_2(dim),
            PAGES=_PAGES_PER_PROGRAM,
            num_warps=4,
            **sizes,
        )
        return scores
    _score_codes_kernel[(max_pages, num_kv_heads, num_seqs)](
        query,
        bounds,
        codes,
        block_tables,
        context_lens,
        scores,
        softmax_scale * 1.4426950408889634,  # log2(e): the kernel works in powers of two
        max_pages,
        *strides,
        ROWS=max(16, triton.next_power_of_2(group)),
        DIM_PAD=max(CODES_PER_WORD, triton.next_power_of_2(dim)),
        CODES_PER_WORD=CODES_PER_WORD,
        num_warps=2,
        **sizes,
    )
    return scores
