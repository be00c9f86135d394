"""Split-KV decode attention over a paged cache (flash-decoding), heads of a GQA group together."""

from functools import lru_cache

import torch
import triton
import triton.language as tl

_TILE = 64  # keys a step of the inner loop
_MAX_SPLITS = 64
_PROGRAMS_PER_SM = 2


@triton.jit
def _decode_split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    table_ptr,
    length_ptr,
    out_ptr,
    lse_ptr,
    scale_log2,
    table_stride,
    table_head_stride,
    length_stride,
    q_stride,
    block_stride,
    token_stride,
    head_stride,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    length = tl.load(length_ptr + seq * length_stride)
    num_tiles = tl.cdiv(length, TILE)
    first_tile = split * num_tiles // NUM_SPLITS
    last_tile = (split + 1) * num_tiles // NUM_SPLITS

    rows = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM_PAD)
    q_inside = (rows < GROUP)[:, None] & (dims < DIM)[None, :]
    head = kv_head * GROUP + rows
    table_ptr += seq.to(tl.int64) * table_stride + kv_head.to(tl.int64) * table_head_stride
    q = tl.load(
        q_ptr + seq.to(tl.int64) * q_stride + head[:, None] * DIM + dims[None, :],
        mask=q_inside,
        other=0.0,
    )

    peak = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, DIM_PAD), tl.float32)
    for tile in range(first_tile, last_tile):
        tokens = tile * TILE + tl.arange(0, TILE)
        visible = tokens < length
        block = tl.load(table_ptr + tokens // BLOCK_SIZE, mask=visible, other=0).to(tl.int64)
        offsets = block * block_stride + (tokens % BLOCK_SIZE).to(tl.int64) * token_stride
        pointers = (offsets + kv_head.to(tl.int64) * head_stride)[:, None] + dims[None, :]
        kv_inside = visible[:, None] & (dims < DIM)[None, :]
        k = tl.load(k_ptr + pointers, mask=kv_inside, other=0.0)
        logits = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale_log2
        logits = tl.where(visible[None, :], logits, float("-inf"))
        new_peak = tl.maximum(peak, tl.max(logits, 1))
        rescale = tl.exp2(peak - new_peak)
        weights = tl.exp2(logits - new_peak[:, None])
        v = tl.load(v_ptr + pointers, mask=kv_inside, other=0.0)
        total = total * rescale + tl.sum(weights, 1)
        acc = acc * rescale[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        peak = new_peak

    # A split without tiles leaves total 0: its LSE is -inf and its output is never weighed.
    empty = first_tile >= last_tile
    part = (seq * NUM_KV_HEADS * GROUP + head).to(tl.int64) * NUM_SPLITS + split
    lse = tl.where(empty, float("-inf"), peak + tl.log2(total))
    tl.store(lse_ptr + part, lse, mask=rows < GROUP)
    out = acc / tl.where(empty, 1.0, total)[:, None]
    tl.store(out_ptr + part[:, None] * DIM + dims[None, :], out, mask=q_inside)


@triton.jit
def _merge_splits_kernel(
    part_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    STORE_LSE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    splits = tl.arange(0, NUM_SPLITS)
    dims = tl.arange(0, DIM_PAD)
    part_lse = tl.load(part_lse_ptr + row * NUM_SPLITS + splits)
    peak = tl.max(part_lse, 0)
    # Without keys every weight is 0, and so is the output.
    peak = tl.where(peak == float("-inf"), 0.0, peak)
    weights = tl.exp2(part_lse - peak)
    total = tl.sum(weights, 0)
    weights = weights / tl.where(total > 0, total, 1.0)
    parts = tl.load(
        part_ptr + (row * NUM_SPLITS + splits)[:, None] * DIM + dims[None, :],
        mask=(dims < DIM)[None, :],
        other=0.0,
    )
    out = tl.sum(parts * weights[:, None], 0)
    tl.store(out_ptr + row * DIM + dims, out.to(out_ptr.dtype.element_ty), mask=dims < DIM)
    if STORE_LSE:
        tl.store(lse_ptr + row, (peak + tl.log2(total)) * 0.6931471805599453)  # ln(2)


def num_splits(num_seqs: int, num_kv_heads: int, num_sms: int) -> int:
    """Return into how many parts a context is split, so that the programs fill the GPU.

    Depends on shapes only: a power of two, and the same for every length.
    """
    wanted = _PROGRAMS_PER_SM * num_sms // (num_seqs * num_kv_heads)
    return min(_MAX_SPLITS, 1 << max(0, wanted - 1).bit_length())


def _launch(
    query,
    key_cache,
    value_cache,
    block_tables,
    context_lens,
    softmax_scale,
    splits,
    with_lse,
    block_size=None,
):
    num_seqs, num_q_heads, dim = query.shape
    num_kv_heads = key_cache.shape[2]
    group = num_q_heads // num_kv_heads
    if splits is None:
        splits = num_splits(num_seqs, num_kv_heads, _num_sms(query.device))
    parts = torch.empty(
        num_seqs, num_q_heads, splits, dim, dtype=torch.float32, device=query.device
    )
    part_lse = torch.empty(num_seqs, num_q_heads, splits, dtype=torch.float32, device=query.device)
    out = torch.empty(num_seqs, num_q_heads, dim, dtype=query.dtype, device=query.device)
    lse = None
    if with_lse:
        lse = torch.empty(num_seqs, num_q_heads, dtype=torch.float32, device=query.device)
    dim_pad = max(16, triton.next_power_of_2(dim))
    _decode_split_kernel[(num_seqs, num_kv_heads, splits)](
        query,
        key_cache,
        value_cache,
        block_tables,
        context_lens,
        parts,
        part_lse,
        softmax_scale * 1.4426950408889634,  # log2(e): the kernel works in powers of two
        block_tables.stride(0),
        block_tables.stride(1) if block_tables.dim() == 3 else 0,  # or heads share a table
        context_lens.stride(0),
        query.stride(0),
        *key_cache.stride()[:3],
        NUM_KV_HEADS=num_kv_heads,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        DIM=dim,
        DIM_PAD=dim_pad,
        BLOCK_SIZE=block_size or key_cache.shape[1],
        TILE=_TILE,
        NUM_SPLITS=splits,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        num_warps=4,
        # Three tiles of keys and values in flight, where shared memory has room for them.
        num_stages=3 if dim_pad * query.dtype.itemsize <= 512 else 1,
    )
    _merge_splits_kernel[(num_seqs * num_q_heads,)](
        parts,
        part_lse,
        out,
        lse,
        DIM=dim,
        DIM_PAD=dim_pad,
        NUM_SPLITS=splits,
        STORE_LSE=with_lse,
        num_warps=1,
    )
    return out, lse


def paged_decode_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
    splits: int | None = None,
) -> torch.Tensor:
    """See `ops.paged_attention.paged_decode_attention`. `splits`: a power of two, or chosen."""
    caches = (key_cache, value_cache)
    return _launch(query, *caches, block_tables, context_lens, softmax_scale, splits, False)[0]


def paged_decode_attention_with_lse(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    context_lens: torch.Tensor,
    softmax_scale: float,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.paged_attention.paged_decode_attention_with_lse`. `splits`: as above."""
    caches = (key_cache, value_cache)
    return _launch(query, *caches, block_tables, context_lens, softmax_scale, splits, True)


def decode_attention_with_lse(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softmax_scale: float,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `ops.paged_attention.decode_attention_with_lse`. `splits`: as above."""
    num_keys = len(keys)
    numbers = _numbers(query.device, triton.next_power_of_2(num_keys + 1))
    length, table = numbers[num_keys : num_keys + 1], numbers[None, :1]
    # One block that has room for any length: its size is a constant of the compiled kernel.
    return _launch(
        query, keys[None], values[None], table, length, softmax_scale, splits, True, 1 << 30
    )


@lru_cache(maxsize=8)
def _numbers(device: torch.device, count: int) -> torch.Tensor:
    """Return 0 to `count` - 1 on a device, so that a length there is a view and no launch."""
    return torch.arange(count, dtype=torch.int32, device=device)


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":  # the interpreter
        return 4
    return torch.get_device_module(device).get_device_properties(device).multi_processor_count
