"""The antidiagonal estimate: kernels and torch forms against the definition, computed in fp64."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_inputs import CPU, DEVICE, DTYPES, INF, KERNEL_DTYPES, NAN, randn
from tolerances import assert_close, relative_rms

from nanovllm.ops import xattn
from nanovllm.ops import xattn_reference as reference
from nanovllm.ops.kernels import xattn as kernels

HEADS = [(4, 2), (9, 3), (8, 1), (4, 4)]
# Absolute position of the first query, number of queries, number of keys.
LENGTHS = [(0, 1, 1), (0, 5, 5), (0, 131, 131), (128, 200, 328), (256, 70, 326), (128, 128, 400)]


def form(module, device):
    return SimpleNamespace(
        device=device,
        scores=module.flat_group_gemm_fuse_reshape,
        stats=module.softmax_compute_partial_stats,
        sums=module.softmax_normalize_and_block_sum,
    )


TORCH, KERNELS = form(xattn, CPU), form(kernels, DEVICE)
FORMS = {"torch": TORCH, "kernel": KERNELS}
FORM_DTYPES = [("torch", dtype) for dtype in DTYPES] + [("kernel", d) for d in KERNEL_DTYPES]


@pytest.fixture(params=FORMS)
def ops(request):
    return FORMS[request.param]


def make_qk(q_len, k_len, heads=4, kv_heads=2, dim=64, dtype=torch.float32, device=CPU, batch=1):
    query = randn(batch, heads, q_len, dim, dtype=dtype, device=device)
    return query, randn(batch, kv_heads, k_len, dim, dtype=dtype, seed=1, device=device)


def chunk_of(q_offset, q_len, stride):
    """Return the query's first group and the one after its last."""
    return q_offset // stride, -(-(q_offset + q_len) // stride)


def true_scores(query, key, q_offset, stride, causal=True):
    """Return unscaled fp64 scores of a batch."""
    unscale = stride * query.shape[-1] ** 0.5
    pairs = zip(query.double(), key.double(), strict=True)
    return unscale * torch.stack(
        [reference.group_scores(q, k, q_offset, stride, causal) for q, k in pairs]
    )


def assert_scores_close(ours, truth):
    assert ours.dtype == torch.float32
    hidden = truth == -INF
    assert torch.equal(ours == -INF, hidden)
    ours, truth = ours.masked_fill(hidden, 0.0), truth.masked_fill(hidden, 0.0)
    if truth.any():
        assert_close(ours, truth)
    else:  # nothing visible, or one token that has no partner on the antidiagonal
        assert not ours.any()


# Scores


@pytest.mark.parametrize(("name", "dtype"), FORM_DTYPES, ids=str)
@pytest.mark.parametrize("stride", [4, 8, 16])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_scores(name, dim, stride, dtype):
    ops = FORMS[name]
    query, key = make_qk(75, 203, 2, 1, dim, dtype, ops.device)
    ours = ops.scores(query, key, stride, *chunk_of(128, 75, stride))
    assert_scores_close(ours, true_scores(query, key, 128, stride))


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_scores_of_heads_and_lengths(ops, causal, lengths, heads):
    offset, q_len, k_len = lengths
    query, key = make_qk(q_len, k_len, *heads, 16, device=ops.device, batch=1 + (heads == HEADS[0]))
    ours = ops.scores(query, key, 8, *chunk_of(offset, q_len, 8), is_causal=causal)
    assert_scores_close(ours, true_scores(query, key, offset, 8, causal))


def test_scores_of_key_pieces(ops):
    """Pieces of whole groups, and one of keys that all lie in the future."""
    query, key = make_qk(600, 1101, dim=16, device=ops.device)
    truth = true_scores(query, key, 256, 4)
    for first, last in ((0, 300), (300, 308), (308, 900), (900, 1101)):
        piece = key[:, :, first:last]
        ours = ops.scores(query, piece, 4, *chunk_of(256, 600, 4), key_start=first // 4)
        assert_scores_close(ours, truth[..., first // 4 : -(-last // 4)])


def test_scores_of_views(ops):
    """Token-major queries and keys beside other heads, with poison after the last tokens."""
    query, key = make_qk(75, 203, device=ops.device)
    wide = torch.full((1, 300, 9, 70), NAN, device=ops.device)
    views = wide[:, 3:78, 1:5, :64].transpose(1, 2), wide[:, :203, 6:8, :64].transpose(1, 2)
    for view, whole in zip(views, (query, key), strict=True):
        view.copy_(whole)
    ours = ops.scores(*views, 8, *chunk_of(128, 75, 8))
    assert_scores_close(ours, true_scores(query, key, 128, 8))
    wide[:, 202, 6] = NAN  # control
    assert ops.scores(*views, 8, *chunk_of(128, 75, 8)).isnan().any()


@pytest.mark.parametrize("axis", range(3), ids=["batch", "heads", "tokens"])
def test_offsets_beyond_32_bits(ops, axis):
    """Three of one kind lie 2^30 elements apart; on a CPU only pages that are written are taken."""
    pool = torch.empty(2**31 + 256, device=ops.device)
    shape, strides = [1, 1, 4, 64], [256, 256, 64, 1]
    shape[axis], strides[axis] = 3, 2**30
    far = pool.as_strided(shape, strides).copy_(randn(*shape, device=ops.device))
    near = far.clone()
    ours = ops.scores(far, far, 2, *chunk_of(0, shape[2], 2))
    assert_scores_close(ours, true_scores(near, near, 0, 2))
    weights = (near.double() * 0.5).softmax(-1)
    sums = sum_blocks(ops, far, 16, 64, 64, 99, 0.5)
    assert_close(sums, reference.block_sums(weights, 16, 16))


# Block sums


def sum_blocks(ops, scores, block, segment, start, real, scale, causal=True):
    stats = ops.stats(scores, segment, start, scale, is_causal=causal)
    return ops.sums(scores, *stats, block, segment, start, real, scale, is_causal=causal)


@pytest.mark.parametrize("block", [4, 16, 64])
@pytest.mark.parametrize("shape", [(1, 1), (33, 49), (70, 134), (16, 64)], ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_block_sums(ops, causal, shape, block):
    """Any number of rows and keys; some rows of padding; scores that are hidden or are not."""
    rows, columns = shape
    start = columns - rows - (columns - rows) % block
    scores = randn(2, 2, rows, columns, device=ops.device) * 9
    hidden = torch.arange(columns) > start + torch.arange(rows)[:, None]
    counted = rows - rows // 3
    logits = scores.double() / 4
    if causal:
        logits = logits.masked_fill(hidden.to(ops.device), -INF)
    weights = logits.softmax(-1)
    weights[:, :, counted:] = 0
    truth = reference.block_sums(weights, block, block)
    ours = sum_blocks(ops, scores, block, max(block, 64), start, start + counted, 0.25, causal)
    assert ours.dtype == torch.float32
    assert_close(ours, truth)
    if causal:  # hidden by the scores themselves, and by both
        scores = scores.masked_fill(hidden.to(ops.device), -INF)
        for causal in (False, True):
            args = block, max(block, 64), start, start + counted, 0.25, causal
            assert_close(sum_blocks(ops, scores, *args), truth)


def test_one_shot_is_its_stages():
    scores = randn(1, 2, 40, 72, device=CPU)
    ours = xattn.softmax_fuse_block_sum(scores, 8, 64, 32, 72, 70, 0.5)
    assert torch.equal(ours, sum_blocks(TORCH, scores, 8, 64, 32, 70, 0.5))


def test_rows_without_keys_add_nothing(ops):
    scores = randn(1, 2, 8, 16, device=ops.device)
    scores[:, :, 3] = -INF
    row_max, row_sum = ops.stats(scores, 16, 16, 1.0)
    assert (row_max[:, :, 3] == -INF).all()
    assert (row_sum[:, :, 3] == 0).all()
    sums = ops.sums(scores, row_max, row_sum, 8, 16, 16, 24, 1.0)
    assert_close(sums.sum(-1), torch.full((1, 2, 1), 7.0, device=ops.device))


@given(data=st.data())
def test_three_stages_equal_one_shot(data):
    check_three_stages(TORCH, data)


@given(data=st.data())
@settings(max_examples=8)
def test_three_stages_equal_one_shot_on_kernels(data):
    check_three_stages(KERNELS, data)


def check_three_stages(ops, data):
    """Keys in any pieces, those of the two passes independent, and pieces in any order."""
    block = data.draw(st.sampled_from([4, 16]))
    first_block, rows = data.draw(st.integers(0, 3)), data.draw(st.integers(1, 24))
    start = first_block * block
    columns = start + rows + data.draw(st.integers(0, 30))  # some beyond all the rows
    scores = randn(1, 2, rows, columns, seed=data.draw(st.integers(0, 9)), device=ops.device) * 9
    whole = sum_blocks(ops, scores, block, 16, start, start + rows, 0.25)

    def pieces(unit):
        count = -(-columns // unit)
        borders = data.draw(st.sets(st.integers(1, count - 1), max_size=4)) if count > 1 else ()
        borders = [0, *(unit * border for border in sorted(borders)), columns]
        return data.draw(st.permutations(list(pairwise(borders))))

    stats = [
        ops.stats(scores[..., first:last], 16, start, 0.25, key_start=first)
        for first, last in pieces(1)
    ]
    merged = xattn.merge_softmax_stats(*zip(*stats, strict=True))
    for ours, truth in zip(merged, ops.stats(scores, 16, start, 0.25), strict=True):
        assert_close(ours, truth)
    sums = torch.full_like(whole, NAN)
    for first, last in pieces(block):
        piece = scores[..., first:last]
        args = block, 16, start, start + rows, 0.25
        sums[..., first // block : -(-last // block)] = ops.sums(
            piece, *merged, *args, key_start=first
        )
    assert_close(sums, whole)
    assert_close(sums.sum((-2, -1)), torch.full((1, 2), float(rows), device=ops.device))


# The estimate


def true_masses(query, key, q_offset, stride, block=128):
    pairs = zip(query.double(), key.double(), strict=True)
    return torch.stack(
        [reference.tile_masses_group(q, k, q_offset, stride, block)[0] for q, k in pairs]
    )


def test_estimate_takes_any_scale_and_need_not_be_causal():
    query, key = make_qk(100, 228)
    sums, mask = xattn.xattn_estimate(query, key, 8, 1.0, softmax_scale=0.3, is_causal=False)
    weights = (true_scores(query, key, 0, 8, causal=False) * 0.3 / 8).softmax(-1)
    assert_close(sums, reference.block_sums(weights, 16, 16))
    assert mask.all()


@pytest.mark.parametrize("device", dict.fromkeys((CPU, DEVICE)), ids=str)
@pytest.mark.parametrize("stride", [4, 8, 16])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_estimate(lengths, heads, stride, device):
    offset, q_len, k_len = lengths
    query, key = make_qk(q_len, k_len, *heads, 32, device=device, batch=2)
    query = 4 * query
    sums, mask = xattn.xattn_estimate(query, key, stride, 0.8, q_offset=offset)
    truth = true_masses(query, key, offset, stride)
    assert_close(sums, truth)
    for ours, masses in zip(mask, truth, strict=True):
        assert torch.equal(ours, reference.select_tiles(masses, 0.8, offset // 128))
    # A tile's groups, of which the last one may have fewer.
    first, last = chunk_of(offset, q_len, stride)
    per_tile = 128 // stride
    counts = [min(per_tile, last - group) for group in range(first, last, per_tile)]
    assert_close(sums.sum(-1), torch.tensor(counts, device=device).expand(sums.shape[:3]))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_masses(ops, heads):
    """What `xattn_estimate` calls, on kernels too where it does not run them."""
    query, key = make_qk(200, 328, *heads, 32, torch.float16, ops.device)
    scores = ops.scores(query, key, 8, 16, 41)
    ours = sum_blocks(ops, scores, 16, 32, 16, 41, 32**-0.5 / 8)
    assert_close(ours, true_masses(query, key, 128, 8))


@given(data=st.data())
@settings(max_examples=15)
def test_estimate_does_not_depend_on_chunks(data):
    """Chunks with the keys that exist by then, and pieces of the whole, choose the same blocks."""
    length, block = data.draw(st.integers(1, 700)), data.draw(st.sampled_from([64, 128]))
    query, key = make_qk(length, length, dim=16)
    sums, mask = xattn.xattn_estimate(4 * query, key, 8, 0.8, block)
    size = block * data.draw(st.integers(1, 4))
    pieces = xattn.xattn_estimate(4 * query, key, 8, 0.8, block, chunk_size=size)
    assert torch.equal(pieces[1], mask)
    for first in range(0, length, size):
        last = min(first + size, length)
        chunk, keys = 4 * query[:, :, first:last], key[:, :, :last]
        ours, our_mask = xattn.xattn_estimate(chunk, keys, 8, 0.8, block, first)
        rows = slice(first // block, -(-last // block))
        assert_close(ours, sums[:, :, rows, : ours.shape[3]])
        assert torch.equal(our_mask, mask[:, :, rows, : ours.shape[3]])
        assert not mask[:, :, rows, ours.shape[3] :].any()


def test_wrong_estimates_are_seen():
    """Control: each of the known mistakes of ports is far beyond rounding, and moves tiles."""
    query, key = (x[0].double() for x in make_qk(300, 556))
    query = query * 4
    truth, _ = reference.tile_masses_group(query, key, 256, 8)
    assert truth.shape == (4, 3, 5)

    def masses_of(scores):
        return reference.block_sums(scores.softmax(-1), 16, 16)

    def reversed_groups(x):
        whole = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % 8))
        return whole.unflatten(1, (-1, 8)).flip(2).flatten(1, 2)

    group = 32 + torch.arange(38)[:, None]
    full = reference.group_scores(query, key, 256, 8, causal=False)
    averaged = query.view(2, 2, 300, 64).mean(1)
    wrongs = {
        "right": masses_of(full.masked_fill(torch.arange(70) > group, -INF)),
        "diagonal": reference.tile_masses_group(reversed_groups(query), key, 256, 8)[0],
        "scale without 1 / stride": masses_of(8 * reference.group_scores(query, key, 256, 8)),
        "average over the GQA group": reference.tile_masses_group(averaged, key, 256, 8)[
            0
        ].repeat_interleave(2, 0),
        "one group too few": masses_of(full.masked_fill(torch.arange(70) >= group, -INF)),
        "one group too many": masses_of(full.masked_fill(torch.arange(70) > group + 1, -INF)),
        "causality of the chunk": masses_of(full.masked_fill(torch.arange(70) > group - 32, -INF)),
    }
    assert relative_rms(wrongs.pop("right"), truth) < 1e-12
    for name, wrong in wrongs.items():
        assert relative_rms(wrong[:, : truth.shape[1]], truth) > 1e-2, name


# What is refused


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda: TORCH.scores(*make_qk(64, 64, 3, 2), 8, 0, 8), r"does not fit a key of \[1, 2"),
        (lambda: TORCH.scores(randn(1, 2, 8, 16), randn(1, 2, 8, 32), 8, 0, 1), "does not fit"),
        (lambda: TORCH.scores(randn(1, 2, 8, 8).mT, randn(1, 2, 8, 8), 8, 0, 1), "not 1 last"),
        (lambda: TORCH.scores(*make_qk(65, 65), 8, 0, 8), "9 groups for groups 0 to 8"),
        (lambda: TORCH.stats(randn(1, 1, 4, 4), 12, 0, 1.0), "segment_size=12"),
        (lambda: TORCH.stats(randn(1, 1, 4, 4).half(), 16, 0, 1.0), "float16"),
        (lambda: sum_blocks(TORCH, randn(1, 1, 4, 4), 32, 16, 0, 4, 1.0), "no less than"),
        (lambda: sum_blocks(TORCH, randn(1, 1, 4, 8), 4, 16, 3, 7, 1.0), "chunk_start=3"),
        (lambda: xattn.softmax_fuse_block_sum(randn(1, 1, 4, 8), 4, 8, 4, 9, 8, 1.0), "4 to 9"),
        (lambda: xattn.xattn_estimate(*make_qk(8, 8), 8, 0.9, 100), "block_size=100 is no"),
        (lambda: xattn.xattn_estimate(*make_qk(8, 8), 8, 0.9, q_offset=64), "q_offset=64 is no"),
        (lambda: xattn.xattn_estimate(*make_qk(8, 8), 8, 0.9, chunk_size=64), "chunk_size=64 is"),
    ],
)
def test_what_does_not_fit_is_refused(call, reason):
    with pytest.raises(ValueError, match=reason):
        call()
