"""The tile estimate: kernels and torch form against the definition, computed in fp64."""

import contextlib
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_inputs import CPU, DEVICE, DTYPES, INF, KERNEL_DTYPES, NAN, randn
from tolerances import assert_close, assert_lse_close

from nanovllm.ops import tile_estimate
from nanovllm.ops import xattn_reference as reference
from nanovllm.ops.kernels import tile_estimate as kernels
from nanovllm.ops.kernels import tile_merge
from nanovllm.ops.tile_estimate import estimate_tiles

TRUTHS = {"group": reference.tile_masses_group, "row": reference.tile_masses_row}
FORM_DTYPES = [("torch", dtype) for dtype in DTYPES] + [("kernel", d) for d in KERNEL_DTYPES]
# Of each estimator a stride and sizes for which a few tiles make several blocks of keys and rows.
SMALL = [("group", 8, kernels.Tuning(16, 32, 4, 2, 2)), ("row", 8, kernels.Tuning(64, 32, 4, 2))]
# Position of the first query and number of queries.
LENGTHS = [(0, 1), (0, 5), (0, 131), (0, 300), (128, 200), (256, 70), (1024, 3)]


@contextlib.contextmanager
def poisoned_scratch():
    """Fill what `torch.empty` returns with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


class Form:
    """The two stages of one implementation."""

    def __init__(self, name, tuning=None):
        self.device = CPU if name == "torch" else DEVICE
        self.merge = (tile_estimate if name == "torch" else tile_merge).merge_tile_shares
        self.name, self.tuning = name, tuning

    def shares(self, *args):
        if self.name == "torch":
            return tile_estimate.tile_shares(*args)
        return kernels.tile_shares(*args, tuning=self.tuning)

    def estimate(self, query, key, q_offset, estimator, stride, scale=None):
        with poisoned_scratch():
            piece = self.shares(query, key, q_offset, 0, estimator, stride, scale)
            return self.merge([piece], q_offset, estimator, stride, with_peaks=True)


def make_qk(q_len, k_len, heads=4, kv_heads=2, dim=32, dtype=torch.float32, device=CPU):
    """Return queries and keys, token-major; scores are spread as widely as in a model."""
    query = 2 * randn(q_len, heads, dim, dtype=dtype, device=device)
    return query, randn(k_len, kv_heads, dim, dtype=dtype, seed=1, device=device)


def truth_of(query, key, q_offset, estimator, stride):
    q, k = (x.double().transpose(0, 1) for x in (query, key))
    return TRUTHS[estimator](q, k, q_offset, stride)


def assert_estimate(ours, truth, dtype):
    """Compare masses and peaks; kernels round shares."""
    for mine, true in zip(ours, truth, strict=True):
        assert mine.dtype == torch.float32
        if true.any():
            assert_close(mine, true, dtype)
        else:
            assert mine.shape == true.shape
            assert not mine.any()
        assert not mine[true == 0].any()


def precision_of(name, estimator, dtype):
    """Return the type that shares are kept in, the widest that rounds as much."""
    if name == "kernel" and estimator == "group":
        return torch.float16 if dtype == torch.float32 else dtype
    if name == "kernel" and dtype == torch.float16:
        return torch.bfloat16
    # The torch form computes fp16 in fp32.
    return torch.float32 if (name, dtype) == ("torch", torch.float16) else dtype


# Against the definition


@pytest.mark.parametrize(("name", "dtype"), FORM_DTYPES, ids=str)
@pytest.mark.parametrize(("estimator", "stride", "tuning"), SMALL, ids=["group", "row"])
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_dims_and_dtypes(dim, estimator, stride, tuning, name, dtype):
    form = Form(name, tuning)
    query, key = make_qk(75, 331, 2, 1, dim, dtype, form.device)
    ours = form.estimate(query, key, 256, estimator, stride)
    truth = truth_of(query, key, 256, estimator, stride)
    assert_estimate(ours, truth, precision_of(name, estimator, dtype))


@pytest.mark.parametrize("name", ["torch", "kernel"])
@pytest.mark.parametrize(("estimator", "stride", "tuning"), SMALL, ids=["group", "row"])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_lengths(lengths, estimator, stride, tuning, name):
    form = Form(name, tuning)
    offset, q_len = lengths
    query, key = make_qk(q_len, offset + q_len, 2, 1, dtype=torch.float16, device=form.device)
    ours = form.estimate(query, key, offset, estimator, stride)
    truth = truth_of(query, key, offset, estimator, stride)
    assert_estimate(ours, truth, precision_of(name, estimator, torch.float16))


@pytest.mark.parametrize("name", ["torch", "kernel"])
@pytest.mark.parametrize(("estimator", "stride", "tuning"), SMALL, ids=["group", "row"])
@pytest.mark.parametrize("heads", [(4, 2), (9, 3), (8, 1), (4, 4)], ids=str)
def test_heads(heads, estimator, stride, tuning, name):
    form = Form(name, tuning)
    query, key = make_qk(140, 268, *heads, device=form.device)
    ours = form.estimate(query, key, 128, estimator, stride)
    truth = truth_of(query, key, 128, estimator, stride)
    assert_estimate(ours, truth, precision_of(name, estimator, torch.float32))


@pytest.mark.parametrize("name", ["torch", "kernel"])
@pytest.mark.parametrize(
    ("estimator", "stride"),
    [("group", s) for s in (1, 4, 16, 128)] + [("row", s) for s in (1, 8, 32, 64)],
)
def test_strides(estimator, stride, name):
    form = Form(name, kernels.Tuning(32, max(16, 128 // stride), 4, 2))
    query, key = make_qk(60, 188, 2, 1, device=form.device)
    ours = form.estimate(query, key, 128, estimator, stride)
    truth = truth_of(query, key, 128, estimator, stride)
    assert_estimate(ours, truth, precision_of(name, estimator, torch.float32))


@pytest.mark.parametrize(("estimator", "stride", "tuning"), SMALL, ids=["group", "row"])
def test_chosen_tuning(estimator, stride, tuning):
    """With the sizes of production, a block holds more than all the keys; other sizes agree."""
    query, key = make_qk(70, 326, 2, 1, 64, torch.float16, DEVICE)
    truth = truth_of(query, key, 256, estimator, stride)
    for t in (None, tuning):
        ours = Form("kernel", t).estimate(query, key, 256, estimator, stride)
        assert_estimate(ours, truth, precision_of("kernel", estimator, torch.float16))


@pytest.mark.parametrize(("estimator", "stride", "tuning"), SMALL, ids=["group", "row"])
def test_scale(estimator, stride, tuning):
    query, key = make_qk(70, 198)
    truth = truth_of(query * 0.3 * 32**0.5, key, 128, estimator, stride)
    masses, peaks = estimate_tiles(query, key, 128, estimator, stride, 0.3, with_peaks=True)
    assert_estimate((masses, peaks), truth, torch.float32)
    masses, no_peaks = estimate_tiles(query, key, 128, estimator, stride, 0.3)
    assert no_peaks is None
    assert_estimate((masses,), truth[:1], torch.float32)
    form = Form("kernel", tuning)
    ours = form.estimate(query.to(DEVICE), key.to(DEVICE), 128, estimator, stride, 0.3)
    precision = precision_of("kernel", estimator, torch.float32)
    assert_estimate([x.cpu() for x in ours], truth, precision)


@pytest.mark.parametrize("name", ["torch", "kernel"])
@pytest.mark.parametrize(("estimator", "stride", "tuning"), SMALL, ids=["group", "row"])
def test_views(estimator, stride, tuning, name):
    """Queries from a fused row and keys beside values, with NaN all around; and odd strides."""
    form = Form(name, tuning)
    query, key = make_qk(133, 261, device=form.device, dtype=torch.float16)
    truth = truth_of(query, key, 128, estimator, stride)
    fused = torch.full((300, 9, 32), NAN, dtype=torch.float16, device=form.device)
    pairs = torch.full((400, 2, 2, 32), NAN, dtype=torch.float16, device=form.device)
    heads_first = torch.full((4, 300, 32), NAN, dtype=torch.float16, device=form.device)
    odd = torch.full((400, 3, 37), NAN, dtype=torch.float16, device=form.device)
    views = [
        (fused[16:149, 2:6], pairs[64:325, 0]),
        (heads_first[:, 7:140].transpose(0, 1), odd[3:264, :2, 3:35]),
    ]
    for q, k in views:
        q.copy_(query), k.copy_(key)
        ours = form.estimate(q, k, 128, estimator, stride)
        assert_estimate(ours, truth, precision_of(name, estimator, torch.float16))
    q, k = views[0]
    k[stride - 1] = NAN  # control
    assert form.estimate(q, k, 128, estimator, stride)[0].isnan().any()


@pytest.mark.parametrize("name", ["torch", "kernel"])
@pytest.mark.parametrize(("estimator", "stride", "tuning"), SMALL, ids=["group", "row"])
def test_planted_tile_is_found(estimator, stride, tuning, name):
    """Every query looks for what the keys of tile 3 hold."""
    form = Form(name, tuning)
    query, key = make_qk(128, 1152, 2, 1, 64, device=form.device)
    query[:, 1] = 3
    key[3 * 128 : 4 * 128] += 3
    masses, peaks = form.estimate(query, key, 1024, estimator, stride)
    total = 1 if estimator == "row" else 16
    assert masses[1, 0, 3] > 0.95 * total
    assert masses[0, 0, 3] < 0.5 * total
    assert masses[1, 0].argmax() == peaks[1, 0].argmax() == 3


def test_one_row_shows_as_a_peak():
    """One query of 128 that looks for tile 1 adds little mass, but a peak."""
    query, key = 0.1 * randn(128, 1, 64, device=CPU), randn(640, 1, 64, seed=1, device=CPU)
    key[128:256] += 3
    query[100] = 3
    masses, peaks = estimate_tiles(query, key, 512, "row", 16, with_peaks=True)
    assert masses[0, 0, 1] < 0.4
    assert peaks[0, 0, 1] > 0.99
    assert peaks[0, 0, [0, 2, 3, 4]].max() < 0.4


# The stages


@pytest.mark.parametrize("name", ["torch", "kernel"])
@pytest.mark.parametrize(("estimator", "stride", "tuning"), SMALL, ids=["group", "row"])
def test_shares_and_lse(estimator, stride, tuning, name):
    """Stage 1 by its definition: the LSE of each row, and shares that add up to it."""
    form = Form(name, tuning)
    query, key = make_qk(70, 326, 2, 1, device=form.device)
    piece = form.shares(query, key, 256, 0, estimator, stride)
    assert (piece.k_offset, piece.num_tiles) == (0, 3)
    rows = 70 if estimator == "row" else 9
    assert piece.base.shape == piece.shares.shape[:3]
    assert piece.lse.shape == piece.shares.shape[:2] == (2, rows)
    i = 256 + torch.arange(70)[:, None]
    j = torch.arange(326)
    q, k = (x.double().cpu().transpose(0, 1) for x in (query, key))
    if estimator == "row":
        sampled = (j <= i) & (j % stride == stride - 1 - i % stride)
        logits = (q @ k.mT * 32**-0.5).masked_fill(~sampled, -INF)
    else:
        logits = reference.group_scores(q, k, 256, stride)
    # The last block begins with the queries' first tile: nothing is unset.
    lse = piece.lse.cpu().double()
    assert_lse_close((lse * 0.6931471805599453).float(), logits.logsumexp(-1), torch.float32)
    weights = (piece.base.cpu() - lse.masked_fill(lse == -INF, 0.0)[..., None]).exp2()
    sums = (piece.shares.cpu().double().sum(-1) * weights).sum(-1)
    seen = lse > -INF
    assert seen.sum() > 0
    torch.testing.assert_close(sums[seen], torch.ones_like(sums[seen]), atol=3e-3, rtol=0)
    assert not sums[~seen].any()


@pytest.mark.parametrize("height", [-3000.0, 3000.0])
def test_scores_far_from_those_of_the_first_keys(height):
    """Sums of the row form refer to the first block; a later one may lie far above or below."""
    form = Form("kernel", SMALL[1][2])
    query, key = make_qk(128, 512, 2, 1, device=form.device)
    query[..., 0], key[..., 0] = 10.0, 0.0
    key[300, 0, 0] = height
    masses, peaks = form.estimate(query, key, 384, "row", 8)
    assert masses.isfinite().all()
    assert peaks.isfinite().all()
    torch.testing.assert_close(masses.sum(-1), torch.ones_like(masses[..., 0]), atol=3e-3, rtol=0)
    # Of eight residues one samples the key, and all of its rows see nothing else, or not it.
    assert (masses[..., 2] > 0.12).all()
    assert (peaks[..., 2] > 0.99).all() == (height > 0)


@given(data=st.data())
@settings(max_examples=10)
@pytest.mark.parametrize(("estimator", "stride", "tuning"), SMALL, ids=["group", "row"])
def test_split_of_keys(estimator, stride, tuning, data):
    check_split_of_keys(Form("torch"), estimator, stride, data)


@given(data=st.data())
@settings(max_examples=2)
@pytest.mark.parametrize(("estimator", "stride", "tuning"), SMALL, ids=["group", "row"])
def test_split_of_keys_on_kernels(estimator, stride, tuning, data):
    check_split_of_keys(Form("kernel", tuning), estimator, stride, data)


def check_split_of_keys(form, estimator, stride, data):
    """Pieces in any order, some of them wholly after some query tiles."""
    offset, q_len = data.draw(st.sampled_from([(0, 300), (128, 130), (512, 77)]))
    k_len = offset + q_len
    query, key = make_qk(q_len, k_len, 2, 1, device=form.device)
    whole = form.estimate(query, key, offset, estimator, stride)
    borders = data.draw(st.sets(st.integers(1, (k_len - 1) // 128), min_size=1, max_size=3))
    borders = [0, *(128 * border for border in sorted(borders)), k_len]
    spans = data.draw(st.permutations(list(pairwise(borders))))
    with poisoned_scratch():
        pieces = [form.shares(query, key[a:b], offset, a, estimator, stride) for a, b in spans]
        ours = form.merge(pieces, offset, estimator, stride, with_peaks=True)
    precision = precision_of(form.name, estimator, torch.float32)
    assert_estimate(ours, [x.double() for x in whole], precision)


@pytest.mark.parametrize("name", ["torch", "kernel"])
@pytest.mark.parametrize(("estimator", "stride", "tuning"), SMALL, ids=["group", "row"])
def test_keys_after_the_queries_add_nothing(estimator, stride, tuning, name):
    form = Form(name, tuning)
    query, key = make_qk(128, 512, 2, 1, device=form.device)
    key[256:] = INF
    masses, _ = form.estimate(query, key, 128, estimator, stride)
    near, _ = form.estimate(query, key[:256], 128, estimator, stride)
    assert torch.equal(masses[..., :2], near)
    assert not masses[..., 2:].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("estimator", "stride", "tuning"), SMALL, ids=["group", "row"])
def test_chunks_change_no_bit(estimator, stride, tuning, dtype):
    """Any chunk size, and any split of the queries with the keys that exist by then."""
    query, key = make_qk(1300, 2196, 3, 1, dtype=dtype, device=DEVICE)
    whole = estimate_tiles(query, key, 896, estimator, stride, with_peaks=True)
    for size in (128, 640):
        args = query, key, 896, estimator, stride
        ours = estimate_tiles(*args, with_peaks=True, chunk_size=size)
        assert all(torch.equal(a, b) for a, b in zip(ours, whole, strict=True))
    for first, last in ((0, 128), (128, 1152), (1152, 1300), (1280, 1300)):
        start, end = 896 + first, 896 + last
        args = query[first:last], key[:end], start, estimator, stride
        rows, columns = slice(first // 128, -(-last // 128)), slice(-(-end // 128))
        for a, b in zip(estimate_tiles(*args, with_peaks=True), whole, strict=True):
            assert torch.equal(a, b[:, rows, columns])


@pytest.mark.parametrize(("estimator", "stride", "tuning"), SMALL, ids=["group", "row"])
def test_chunks_change_no_bit_on_kernels(estimator, stride, tuning):
    form = Form("kernel", tuning)
    query, key = make_qk(333, 461, 2, 1, dtype=torch.float16, device=DEVICE)
    if DEVICE.type == "cpu":
        # Interpreted, a product is the CPU's BLAS, some of which round a row by its place in the
        # tile. With so few bits products are exact: then only a kernel can change one.
        query, key = ((16 * x).round() / 16 for x in (query, key))
    whole = form.estimate(query, key, 128, estimator, stride)
    for first, last in ((0, 128), (128, 333), (256, 333)):
        args = query[first:last], key[: 128 + last], 128 + first
        rows, columns = slice(first // 128, -(-last // 128)), slice(-(-(128 + last) // 128))
        for a, b in zip(form.estimate(*args, estimator, stride), whole, strict=True):
            assert torch.equal(a, b[:, rows, columns])


# What is refused


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"key": randn(200, 3, 32, device=CPU)}, r"does not fit a key of \[200, 3, 32\]"),
        ({"key": randn(200, 2, 64, device=CPU)}, "does not fit"),
        ({"key": randn(200, 2, 32, device=CPU).half()}, "does not fit"),
        ({"key": randn(199, 2, 32, device=CPU)}, "199 keys, but the last query is at 199"),
        ({"query": randn(72, 32, 4, device=CPU).mT}, "not 1 last"),
        ({"q_offset": 64, "query": randn(136, 4, 32, device=CPU)}, "q_offset=64 is no multiple"),
        ({"estimator": "rows"}, "estimator='rows'; allowed are"),
        ({"stride": 12}, "stride=12 does not divide 128"),
        ({"softmax_scale": 0.0}, "softmax_scale=0.0 is not positive"),
        ({"chunk_size": 64}, "chunk_size=64 is no"),
    ],
)
def test_what_does_not_fit_is_refused(changes, reason):
    query, key = make_qk(72, 200)
    args = {"query": query, "key": key, "q_offset": 128, "estimator": "row", "stride": 16}
    with pytest.raises(ValueError, match=reason):
        estimate_tiles(**(args | changes))


def test_pieces_that_do_not_fit_are_refused():
    query, key = make_qk(72, 200)
    with pytest.raises(ValueError, match="k_offset=64 is no multiple"):
        tile_estimate.tile_shares(query, key[64:], 128, 64, "row", 16)
    with pytest.raises(ValueError, match="end inside a tile, before the last query, 199"):
        tile_estimate.tile_shares(query, key[:190], 128, 0, "row", 16)
    with pytest.raises(ValueError, match="no pieces"):
        tile_estimate.merge_tile_shares([], 128, "row", 16)
    with pytest.raises(ValueError, match="cut tiles"):
        kernels.tile_shares(query, key, 128, 0, "row", 16, tuning=kernels.Tuning(16, 4, 4, 2))
