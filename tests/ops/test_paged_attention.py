"""Decode attention over a paged cache: the kernel and the gathered form."""

import pytest
import torch
from op_inputs import (
    DEVICE,
    DTYPES,
    INF,
    KERNEL_DTYPES,
    NAN,
    randn,
    truth_of,
)
from tolerances import assert_close, assert_lse_close, relative_rms

from nanovllm.ops import paged_attention, reference
from nanovllm.ops.attention import merge_attention_outputs
from nanovllm.ops.kernels import paged_decode
from nanovllm.ops.kernels.paged_decode import (
    num_splits,
    paged_decode_attention,
    paged_decode_attention_with_lse,
)
from nanovllm.ops.paged_attention import decode_attention_with_lse, gathered_decode_attention

# The kernel takes the logarithm of an empty split's sum before it puts -inf in its place.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning")


class PagedBatch:
    """Sequences of given lengths in a paged cache; whatever belongs to none of them is poison."""

    def __init__(self, lengths, block_size, heads=4, kv_heads=2, dim=64, dtype=torch.float32):
        num_blocks = [-(-length // block_size) for length in lengths]
        generator = torch.Generator().manual_seed(0)
        blocks = torch.randperm(sum(num_blocks) + 2, generator=generator).tolist()
        shape = (len(blocks), block_size, kv_heads, dim)
        self.keys = torch.full(shape, NAN, dtype=dtype, device=DEVICE)
        self.values = self.keys.clone()
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        # Past the context the table names a block that is all poison.
        shape = (len(lengths), max(num_blocks) + 1)
        tables = torch.full(shape, blocks.pop(), dtype=torch.int32)
        self.query = randn(len(lengths), heads, dim, dtype=dtype, seed=1)
        self.scale = dim**-0.5
        self.gathered, truths, truth_lses = [], [], []
        for i, (length, count) in enumerate(zip(lengths, num_blocks, strict=True)):
            mine, blocks = blocks[:count], blocks[count:]
            tables[i, :count] = torch.tensor(mine)
            new = [randn(length, kv_heads, dim, dtype=dtype, seed=2 + 2 * i + j) for j in range(2)]
            for cache, tokens in zip((self.keys, self.values), new, strict=True):
                for start in range(0, length, block_size):
                    piece = tokens[start : start + block_size]
                    cache[mine[start // block_size], : len(piece)] = piece
            self.gathered.append(tuple(new))
            truth, lse = truth_of(self.query[None, i : i + 1], *(t[None] for t in new), False)
            truths.append(truth[0, 0])
            truth_lses.append(lse[0, :, 0])
        self.tables = tables.to(DEVICE)
        self.truth, self.truth_lse = torch.stack(truths), torch.stack(truth_lses)

    def attend(self, op=paged_decode_attention, **options):
        caches = (self.keys, self.values)
        return op(self.query, *caches, self.tables, self.lengths, self.scale, **options)

    def attend_with_lse(self, **options):
        return self.attend(paged_decode_attention_with_lse, **options)


ODD_LENGTHS = [1, 16, 17, 64, 130, 257]


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 4, 8, None])
@pytest.mark.parametrize("block_size", [16, 256])
def test_paged_decode_lengths_and_splits(dtype, splits, block_size):
    batch = PagedBatch(ODD_LENGTHS, block_size, dtype=dtype)
    out = batch.attend(splits=splits)
    assert out.dtype == dtype
    assert_close(out, batch.truth)
    for row, truth in zip(out, batch.truth, strict=True):  # a short one's error shows by itself
        assert_close(row, truth)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 1), (3, 3), (40, 2)], ids=str)
@pytest.mark.parametrize("dim", [16, 17, 80, 96, 128, 256])
def test_paged_decode_heads(dtype, heads, dim):
    batch = PagedBatch([70, 5], 16, *heads, dim, dtype)
    assert_close(batch.attend(splits=2), batch.truth)


def test_paged_decode_of_a_view():
    """The queries lie beside keys and values, and the cache beside other layers'."""
    batch = PagedBatch([70, 5], 16)
    wide = torch.full((2, 8, 64), NAN, device=DEVICE)
    wide[:, :4] = batch.query
    caches = torch.full((3, *batch.keys.shape), NAN, device=DEVICE)
    caches[1], caches[2] = batch.keys, batch.values
    batch.query, batch.keys, batch.values = wide[:, :4], caches[1], caches[2]
    assert_close(batch.attend(), batch.truth)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 4, None])
def test_paged_decode_with_lse(dtype, splits):
    batch = PagedBatch([1, 17, 64, 130], 16, dtype=dtype)
    out, lse = batch.attend_with_lse(splits=splits)
    assert torch.equal(out, batch.attend(splits=splits))
    assert_close(out, batch.truth)
    assert_lse_close(lse, batch.truth_lse, dtype)


@pytest.mark.parametrize("splits", [1, 4])
def test_paged_decode_without_keys(splits):
    batch = PagedBatch([0, 70, 0], 16)
    out, lse = batch.attend_with_lse(splits=splits)
    assert torch.equal(out[::2], torch.zeros_like(out[::2]))
    assert torch.equal(lse[::2], torch.full_like(lse[::2], -INF))
    assert_close(out[1], batch.truth[1])
    assert_lse_close(lse, batch.truth_lse, torch.float32)
    assert torch.equal(batch.attend(splits=splits), out)


def test_contexts_cut_in_two_merge_to_the_whole():
    """The first three blocks of each sequence and the rest, which some do not have."""
    batch = PagedBatch([70, 5, 48, 49], 16)
    whole, tables = batch.lengths, batch.tables
    parts = []
    for batch.tables, batch.lengths in (
        (tables[:, :3], whole.clamp(max=48)),
        (tables[:, 3:], (whole - 48).clamp(min=0)),
    ):
        out, lse = batch.attend_with_lse()
        parts += [out[:, None], lse[..., None]]
    out, lse = merge_attention_outputs(*parts)
    assert_close(out[:, 0], batch.truth)
    assert_lse_close(lse[..., 0], batch.truth_lse, torch.float32)


# The axes of a cache in memory, outermost first: blocks, tokens, heads.
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)], ids=str)
def test_paged_decode_of_any_strides(order):
    """Keys and values beside each other in one pool, of any layout, with room between all."""
    batch = PagedBatch([70, 5], 16)
    shape = batch.keys.shape
    pool = torch.full((*(shape[axis] + 1 for axis in order), 2, 80), NAN, device=DEVICE)
    inverse = [order.index(axis) for axis in range(3)]
    views = pool.permute(*inverse, 3, 4)[: shape[0], : shape[1], : shape[2], :, :64]
    batch.keys = views[..., 0, :].copy_(batch.keys)
    batch.values = views[..., 1, :].copy_(batch.values)
    out, lse = batch.attend_with_lse()
    assert_close(out, batch.truth)
    assert_lse_close(lse, batch.truth_lse, torch.float32)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
def test_paged_decode_of_a_table_for_each_head(dtype):
    """Bit for bit what one table gives: the same table twice, and heads in blocks of their own."""
    batch = PagedBatch([130, 5, 0], 16, heads=6, kv_heads=3, dtype=dtype)
    truth = batch.attend(splits=2)
    assert_close(truth, batch.truth)
    keys, values, table = batch.keys, batch.values, batch.tables
    batch.tables = table[:, None].expand(-1, 3, -1)
    assert torch.equal(batch.attend(splits=2), truth)

    # Each head's blocks in an order of its own.
    orders = [torch.randperm(len(keys), generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
    orders = torch.stack([torch.arange(len(keys)), *orders]).to(DEVICE)
    batch.tables = orders.argsort(1).int()[:, table.long()].transpose(0, 1).contiguous()
    head = torch.arange(3, device=DEVICE)
    batch.keys, batch.values = (x[orders.T, :, head].transpose(1, 2) for x in (keys, values))
    assert torch.equal(batch.attend(splits=2), truth)

    # Each block holds one head, and the axis of heads has stride 0.
    batch.tables = (3 * table[:, None] + head[:, None]).int()
    batch.keys, batch.values = (
        x.transpose(1, 2).flatten(0, 1)[:, :, None].expand(-1, -1, 3, -1) for x in (keys, values)
    )
    assert torch.equal(batch.attend(splits=2), truth)


def test_paged_decode_ops():
    """The ops take what their kernels take, and refuse caches that do not match."""
    batch = PagedBatch([70, 5], 16)
    with_lse = paged_attention.paged_decode_attention_with_lse
    out, lse = batch.attend(with_lse)
    assert_close(out, batch.truth)
    assert_lse_close(lse, batch.truth_lse, torch.float32)
    assert torch.equal(batch.attend(paged_attention.paged_decode_attention), out)
    keys, values = batch.keys, batch.values
    head_major = values.transpose(1, 2).contiguous().transpose(1, 2)
    no_last_axis = keys.mT.contiguous().mT
    for batch.keys, batch.values in ((keys, head_major), (no_last_axis, no_last_axis)):
        for op in (with_lse, paged_attention.paged_decode_attention):
            with pytest.raises(ValueError, match="must be equal and end in 1"):
                batch.attend(op)


@pytest.mark.parametrize("length", [0, 63, 64, 69])
def test_poison_is_seen(length):
    """Control: one NaN within the context reaches the output, so none outside was read."""
    batch = PagedBatch([70], 16)
    block, offset = batch.tables[0, length // 16], length % 16
    batch.keys[block, offset] = NAN
    assert relative_rms(batch.attend(), batch.truth) != pytest.approx(0, abs=1)


def test_reference_of_paged_decode():
    batch = PagedBatch([70, 5, 0], 16)
    out, lse = batch.attend(reference.paged_decode_attention_with_lse)
    assert_close(out, batch.truth)
    assert_lse_close(lse, batch.truth_lse, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[70], ODD_LENGTHS], ids=len)
def test_gathered_decode(dtype, lengths):
    batch = PagedBatch(lengths, 16, dtype=dtype)
    out = gathered_decode_attention(batch.query, batch.gathered, batch.scale)
    assert_close(out, batch.truth)


@pytest.mark.parametrize("num_sms", [4, 132])
@pytest.mark.parametrize("num_seqs", [1, 7, 256, 5000])
def test_number_of_splits(num_seqs, num_sms):
    splits = num_splits(num_seqs, 8, num_sms)
    assert splits in (1, 2, 4, 8, 16, 32, 64)
    assert splits == 1 or splits * num_seqs * 8 < 4 * num_sms, "no more than fill the GPU twice"


@pytest.mark.parametrize("length", [1, 64, 130, 500])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_keys_that_lie_together(length, dtype):
    """A slice of a buffer whose rest is poison, of a length that no block size divides."""
    query = randn(1, 4, 64, dtype=dtype, seed=1)
    buffer = torch.full((2, length + 60, 2, 64), NAN, dtype=dtype, device=DEVICE)
    buffer[:, :length] = randn(2, length, 2, 64, dtype=dtype, seed=2)
    keys, values = buffer[:, :length]
    truth, truth_lse = truth_of(query[None], keys[None], values[None], False)
    for attend in (paged_decode.decode_attention_with_lse, decode_attention_with_lse):
        out, lse = attend(query, keys, values, 64**-0.5)
        assert_close(out, truth[0])
        assert_lse_close(lse, truth_lse[..., 0], dtype)
