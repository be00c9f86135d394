"""Triton kernels of `ops.page_index`: bounds and codes of pages, and scores by either."""

import torch
import triton
import triton.language as tl

from nanovllm.ops.page_index import CODES_PER_WORD, PageIndex, num_words

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
    WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr,
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
        tokens = tl.arange(0, PAGE_SIZE)
        # What is past the newest token repeats it, which changes no bound.
        source = tl.load(key_slot_ptr + row) - offset + tl.minimum(tokens, offset)
        at = (source // BLOCK_SIZE).to(tl.int64) * block_stride
        at += (source % BLOCK_SIZE).to(tl.int64) * token_stride
        at += head * head_stride
        place = page.to(tl.int64) * NUM_KV_HEADS + head
        # Channels as the codes have them: a row of the first code of each word, and so on.
        words = tl.arange(0, WORDS_PAD)
        rows = tl.arange(0, CODES_PER_WORD)
        dims = rows[:, None] * WORDS + words[None, :]
        inside = (words < WORDS)[None, :] & (dims < DIM)
        keys = tl.load(
            key_ptr + at[:, None, None] + dims[None, :, :], mask=inside[None, :, :], other=0.0
        ).to(tl.float32)
        # The reductions would pass over NaN.
        has_nan = tl.max((keys != keys).to(tl.int32), 0) > 0
        low = tl.where(has_nan, float("nan"), tl.min(keys, 0))
        high = tl.where(has_nan, float("nan"), tl.max(keys, 0))
        target = bounds_ptr + place * (2 * DIM) + dims
        tl.store(target, low.to(bounds_ptr.dtype.element_ty), mask=inside)
        tl.store(target + DIM, high.to(bounds_ptr.dtype.element_ty), mask=inside)
        if HAS_CODES:
            step = (high - low) * 0.25
            code = (keys >= (low + step)[None, :, :]).to(tl.int32)
            code += (keys >= (low + 2 * step)[None, :, :]).to(tl.int32)
            code += (keys >= (high - step)[None, :, :]).to(tl.int32)
            code = tl.where(inside[None, :, :], code << (2 * rows)[None, :, None], 0)
            target = code_ptr + (place * PAGE_SIZE + tokens)[:, None] * WORDS + words[None, :]
            tl.store(target, tl.sum(code, 1).to(tl.int16), mask=(words < WORDS)[None, :])


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
        WORDS=num_words(dim),
        WORDS_PAD=triton.next_power_of_2(num_words(dim)),
        BLOCK_SIZE=key_cache.shape[1],
        PAGE_SIZE=page_size,
        CODES_PER_WORD=CODES_PER_WORD,
        HAS_CODES=index.codes is not None,
        num_warps=8,
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
    num_pages = (tl.load(length_ptr + seq * length_stride) - 1) // PAGE_SIZE
    pages = first_page + tl.arange(0, PAGES)
    seen = pages < num_pages
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


@triton.constexpr_function
def _pick_halves(i):
    """Return PTX that leaves of two words at once their code i, in bits 2 (i mod 5) and up."""
    mask = 0x00030003 << 2 * (i % 5)
    if i < 5:
        return f"and.b32 $0, $1, {mask:#x};"
    return f"{{ .reg .b32 t; shr.b32 t, $1, 10; and.b32 $0, t, {mask:#x}; }}"


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
    WORDS: tl.constexpr,
    WORDS_PAD: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES_PER_BLOCK: tl.constexpr,
    CODES_PER_WORD: tl.constexpr,
    PAIRS: tl.constexpr,
):
    page = tl.program_id(0)
    head = tl.program_id(1)
    seq = tl.program_id(2).to(tl.int64)
    num_pages = (tl.load(length_ptr + seq * length_stride) - 1) // PAGE_SIZE
    rows = tl.arange(0, ROWS)
    target = score_ptr + ((seq * NUM_KV_HEADS + head) * GROUP + rows) * max_pages + page
    if page < num_pages:
        tokens = tl.arange(0, PAGE_SIZE)
        words = tl.arange(0, WORDS_PAD)
        block = tl.load(table_ptr + seq * table_stride + page // PAGES_PER_BLOCK).to(tl.int64)
        place = (block * PAGES_PER_BLOCK + page % PAGES_PER_BLOCK) * NUM_KV_HEADS + head
        packed = tl.load(
            code_ptr + (place * PAGE_SIZE + tokens)[:, None] * WORDS + words[None, :],
            mask=(words < WORDS)[None, :],
            other=0,
        )
        q_head_ptr = q_ptr + seq * q_stride + (head * GROUP + rows)[None, :] * q_head_stride
        own_bounds = bounds_ptr + place * (2 * DIM)
        # A key is the middle of its quarters: q * (low + step / 2) + (q * step) * code
        offsets = tl.zeros((WORDS_PAD, ROWS), tl.float32)
        logits = tl.zeros((PAGE_SIZE, ROWS), tl.float32)
        for i in tl.static_range(CODES_PER_WORD):
            dims = i * WORDS + words
            inside = (words < WORDS) & (dims < DIM)
            q = tl.load(
                q_head_ptr + dims[:, None],
                mask=inside[:, None] & (rows < GROUP)[None, :],
                other=0.0,
            )
            low = tl.load(own_bounds + dims, mask=inside, other=0.0).to(tl.float32)
            high = tl.load(own_bounds + DIM + dims, mask=inside, other=0.0).to(tl.float32)
            scaled = q.to(tl.float32) * scale_log2
            step = (high - low) * 0.25
            offsets += scaled * (low + 0.5 * step)[:, None]
            if q.dtype == tl.float32:
                steps = scaled * step[:, None]
                codes = ((packed >> 2 * i) & 3).to(tl.float32)
                logits = tl.dot(codes, steps, logits, input_precision="ieee")
            else:
                # Left where it is, a code is a float16 of these bits: code * 4**(i mod 5) * 2**-24.
                steps = scaled * (step * 0.25 ** (i % 5))[:, None]
                if PAIRS:  # two words in a register, which the interpreter does not have
                    codes = tl.inline_asm_elementwise(
                        _pick_halves(i), "=r,r", [packed], dtype=tl.float16, is_pure=True, pack=2
                    )
                else:
                    codes = (packed if i < 5 else packed >> 10) & (3 << 2 * (i % 5))
                    codes = codes.to(tl.float16, bitcast=True)
                logits = tl.dot(codes, steps.to(tl.float16), logits)
        if q_ptr.dtype.element_ty != tl.float32:
            logits *= 16777216.0  # 2**24
        logits += tl.sum(offsets, 0)[None, :]
        peak = tl.max(logits, 0)
        total = tl.sum(tl.exp2(logits - peak[None, :]), 0)
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
        ROWS=max(4, triton.next_power_of_2(group)),
        WORDS=num_words(dim),
        WORDS_PAD=max(16, triton.next_power_of_2(num_words(dim))),
        CODES_PER_WORD=CODES_PER_WORD,
        PAIRS=not triton.knobs.runtime.interpret,
        num_warps=1,
        **sizes,
    )
    return scores
