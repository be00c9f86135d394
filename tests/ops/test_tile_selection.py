"""Estimates in the reference, and selection of tiles in all of its forms, against loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_inputs import CPU, DEVICE, INF, NAN, randn
from torch.utils._python_dispatch import TorchDispatchMode

from nanovllm.ops import xattn_reference as reference
from nanovllm.ops.kernels import tile_selection as kernels
from nanovllm.ops.tile_selection import select_tiles
from nanovllm.ops.xattn import find_blocks_chunked

THRESHOLDS = [0.0, 0.5, 0.9, 1.0]


# The reference's estimates


def make_qk(q_len, k_len, dim=64):
    return randn(4, q_len, dim, device=CPU), randn(2, k_len, dim, seed=1, device=CPU)


def test_reference_by_loops():
    """Scores, masses of both estimators and peaks, each from its sentence in the definition."""
    offset, q_len, k_len, dim, stride, tile = 8, 13, 21, 16, 4, 8
    q, k = (x.double() for x in make_qk(q_len, k_len, dim=dim))
    num_groups, q_tiles, k_tiles = 4, 2, 3
    scores = reference.group_scores(q, k, offset, stride)
    masses, group_peaks = reference.tile_masses_group(q, k, offset, stride, tile)
    row_masses, peaks = reference.tile_masses_row(q, k, offset, stride, tile)
    assert scores.shape == (4, num_groups, 6)
    for x in (masses, group_peaks, row_masses, peaks):
        assert x.shape == (4, q_tiles, k_tiles)
    for head in range(4):
        rows = {offset + i: q[head, i] for i in range(q_len)}
        keys = dict(enumerate(k[head // 2]))
        mass, group_peak, row_mass, peak = (
            torch.zeros(q_tiles, k_tiles).double() for _ in range(4)
        )
        for group in range(num_groups):
            a = offset // stride + group
            exponentials = {}
            for b in range(a + 1):
                pairs = [(a * stride + stride - 1 - i, b * stride + i) for i in range(stride)]
                logits = [rows[i] @ keys[j] / 4 for i, j in pairs if i in rows and j in keys]
                score = sum(logits, torch.zeros(()).double()) / stride
                torch.testing.assert_close(scores[head, group, b], score)
                exponentials[b] = score.exp()
            assert (scores[head, group, a + 1 :] == -INF).all()
            shares = torch.zeros(k_tiles).double()
            for b, x in exponentials.items():
                shares[b * stride // tile] += x / sum(exponentials.values())
            t = group * stride // tile
            mass[t] += shares
            group_peak[t] = torch.maximum(group_peak[t], shares)
        for i, row in rows.items():
            sampled = [j for j in keys if j <= i and j % stride == stride - 1 - i % stride]
            shares = torch.zeros(k_tiles).double()
            for j, share in zip(
                sampled, torch.stack([row @ keys[j] / 4 for j in sampled]).softmax(0), strict=True
            ):
                shares[j // tile] += share
            t = i // tile - offset // tile
            row_mass[t] += shares / min(tile, q_len - t * tile)
            peak[t] = torch.maximum(peak[t], shares)
        torch.testing.assert_close(masses[head], mass)
        torch.testing.assert_close(group_peaks[head], group_peak)
        torch.testing.assert_close(row_masses[head], row_mass)
        torch.testing.assert_close(peaks[head], peak)


def test_both_estimators_with_every_key_are_attention():
    """Groups of one token: the mass is that of dense attention."""
    q, k = (x.double() for x in make_qk(150, 278))
    group, group_peaks = reference.tile_masses_group(q, k, 128, 1)
    logits = q @ k.repeat_interleave(2, 0).mT / 8
    weights = logits.masked_fill(torch.ones(150, 278).triu(129).bool(), -INF).softmax(-1)
    padded = torch.zeros(4, 256, 384).double()
    padded[:, :150, :278] = weights
    torch.testing.assert_close(group, padded.view(4, 2, 128, 3, 128).sum((2, 4)))
    masses, peaks = reference.tile_masses_row(q, k, 128, 1)
    torch.testing.assert_close(masses * torch.tensor([[128.0], [22.0]]), group)
    torch.testing.assert_close(peaks, padded.view(4, 2, 128, 3, 128).sum(4).amax(2))
    torch.testing.assert_close(group_peaks, peaks)


def test_rows_that_see_no_sampled_key_count_nothing():
    """Row i of the first group sees a key if i >= (stride - 1) / 2."""
    q, k = make_qk(3, 3)
    masses, peaks = reference.tile_masses_row(q, k, 0, 8)
    assert not masses.any()
    assert not peaks.any()
    q, k = make_qk(200, 200)
    torch.testing.assert_close(reference.tile_masses_row(q, k, 0, 8)[0].sum(-1), torch.ones(4, 2))


# Selection


def select_by_loop(masses, thresholds, q_tile0):
    """Return the mask by the sentence of the definition, in fp32 as the ops compute it.

    The masses are small integers, of which every sum is exact.
    """
    mask = torch.zeros(masses.shape, dtype=torch.bool)
    for head, threshold in enumerate(thresholds):
        for row in range(masses.shape[1]):
            diagonal = q_tile0 + row
            visible = range(min(diagonal + 1, masses.shape[2]))
            mass = [int(masses[head, row, j]) for j in visible]
            kept = {j for j in (0, diagonal) if j in visible}
            before = sum(mass[j] for j in kept)
            needed = np.float32(threshold) * np.float32(sum(mass))
            for j in sorted(set(visible) - kept, key=lambda j: (-mass[j], j)):
                if before >= needed and threshold < 1:
                    break
                kept.add(j)
                before += mass[j]
            mask[head, row, list(kept)] = True
    return mask


@st.composite
def integer_masses(draw):
    heads, rows, columns = (draw(st.integers(1, n)) for n in (3, 4, 9))
    # Few values make ties common; the exact share of a threshold is met often too.
    values = st.integers(0, draw(st.sampled_from([1, 3, 10, 1000])))
    count = heads * rows * columns
    masses = draw(st.lists(values, min_size=count, max_size=count))
    return torch.tensor(masses, dtype=torch.float32).view(heads, rows, columns)


@given(masses=integer_masses(), data=st.data())
@settings(max_examples=300)
def test_op_and_reference_equal_the_loop(masses, data):
    """Diagonals inside the keys and beyond them; one threshold, or one a head."""
    first = data.draw(st.integers(0, 9))
    thresholds = data.draw(
        st.lists(st.sampled_from(THRESHOLDS), min_size=len(masses), max_size=len(masses))
    )
    same = data.draw(st.booleans())
    if same:
        thresholds = thresholds[:1] * len(masses)
    given_threshold = thresholds[0] if same else torch.tensor(thresholds)
    truth = select_by_loop(masses, thresholds, first)
    assert torch.equal(reference.select_tiles(masses, given_threshold, first), truth)
    ours = find_blocks_chunked(masses[None], first, given_threshold, None, False)
    assert ours.dtype == torch.bool
    assert torch.equal(ours[0], truth)
    assert torch.equal(select_tiles(masses, given_threshold, first), truth)
    if same:
        scalar = torch.tensor(thresholds[0])
        assert torch.equal(find_blocks_chunked(masses[None], first, scalar, None, False)[0], truth)


@given(masses=integer_masses(), first=st.integers(0, 9), data=st.data())
def test_selection_does_not_depend_on_chunks(masses, first, data):
    """Rows by themselves, with the columns that exist by then."""
    whole = find_blocks_chunked(masses[None], first, 0.5, None, False)
    for row in range(masses.shape[1]):
        width = min(masses.shape[2], first + row + 1)
        piece = masses[None, :, row : row + 1, :width]
        ours = find_blocks_chunked(piece, first + row, 0.5, None, False)
        assert torch.equal(ours, whole[:, :, row : row + 1, :width])
        assert not whole[:, :, row, width:].any()


def test_masses_as_they_come():
    """Random shares rather than integers, in every dtype: op and reference agree."""
    masses = (3 * randn(2, 4, 20, 30, device=CPU)).softmax(-1)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for threshold in (0.3, 0.9, 0.99, 1.0):
            rounded = masses.to(dtype)
            ours = find_blocks_chunked(rounded, 10, threshold, None, False)
            for mask, mass in zip(ours, rounded, strict=True):
                assert torch.equal(mask, reference.select_tiles(mass, threshold, 10))


# The kernel. One launch checks many thresholds, each with a head of its own.

KERNEL_THRESHOLDS = torch.tensor([0.0, 0.3, 0.5, 0.9, 1.0, 1.5])


def assert_kernel_selects(masses, first, peaks=None, gamma=None):
    """Masses of one head, `[q_tiles, k_tiles]`, of which every sum is exact."""
    heads = masses.expand(len(KERNEL_THRESHOLDS), -1, -1)  # strides of any kind
    truth = reference.select_tiles(heads, KERNEL_THRESHOLDS, first)
    guard = () if peaks is None else (peaks.expand(heads.shape), gamma)
    if guard:
        truth = reference.select_tiles(heads, KERNEL_THRESHOLDS, first, *guard)
        guard = guard[0].to(DEVICE), gamma
    ours = kernels.select_tiles(heads.to(DEVICE), KERNEL_THRESHOLDS.to(DEVICE), first, *guard)
    assert ours.dtype == torch.bool
    assert torch.equal(ours.cpu(), truth)


@pytest.mark.parametrize(("first", "columns"), [(0, 1), (0, 7), (3, 7), (9, 5), (30, 33)])
def test_kernel_equals_the_reference(first, columns):
    """Only zeros, many ties and few; diagonals inside the keys and beyond them."""
    generator = torch.Generator().manual_seed(columns)
    values = torch.tensor([1, 2, 4, 1000])[:, None]
    masses = (torch.rand(4, columns, generator=generator) * values).floor()
    assert_kernel_selects(masses, first)


def test_kernel_with_guard_and_poison():
    """What lies above the diagonal is never seen, neither as mass nor as peak."""
    generator = torch.Generator().manual_seed(0)
    masses = torch.randint(0, 9, (3, 12), generator=generator).float()
    peaks = torch.rand(3, 12, generator=generator)
    assert_kernel_selects(masses, 8, peaks, 0.7)
    hidden = torch.arange(12) > 8 + torch.arange(3)[:, None]
    truth = kernels.select_tiles(masses[None].to(DEVICE), 0.5, 8, peaks[None].to(DEVICE), 0.7)
    masses, peaks = (x.masked_fill(hidden, NAN)[None].to(DEVICE) for x in (masses, peaks))
    assert torch.equal(kernels.select_tiles(masses, 0.5, 8, peaks, 0.7), truth)


def test_kernel_on_masses_as_they_come():
    """Shares of any size down to the least, in a row wider than a power of two."""
    masses = (9 * randn(1, 4, 150, device=CPU)).softmax(-1)
    masses[0, 2] *= 1e-36
    for threshold in (0.3, 0.9, 0.999):
        truth = find_blocks_chunked(masses[None], 140, threshold, None, False)[0]
        assert 0.005 < truth.float().mean() < 0.9
        assert torch.equal(kernels.select_tiles(masses.to(DEVICE), threshold, 140).cpu(), truth)


def test_kernel_adds_up_what_fp32_would_lose():
    """Beside a mass of 1, 64 that each vanish when added to it alone; in rows of two widths."""
    masses = torch.full((1, 1, 66), 2.0**-25)
    masses[..., 0], masses[..., 65] = 1, 0
    threshold = 1 - 2.0**-20
    truth = find_blocks_chunked(masses[None], 65, threshold, None, False)[0]
    assert truth.sum() == 32, "30 bring the sum to 1 + 2**-20, which is enough, by rounding"
    wide = torch.cat([masses, torch.ones(1, 1, 70)], -1)
    for x in (masses, wide):
        ours = kernels.select_tiles(x.to(DEVICE), threshold, 65)[..., :66]
        assert torch.equal(ours.cpu(), truth)


@pytest.mark.parametrize("threshold", [1.0, 1.5])
def test_threshold_of_one_keeps_every_causal_tile(threshold):
    """Even those without any mass, which no share ever needs."""
    masses = torch.zeros(1, 2, 6, 8)
    masses[0, 0, :, 0] = 1
    causal = torch.ones(6, 8, dtype=torch.bool).tril(2)
    assert torch.equal(
        find_blocks_chunked(masses, 2, threshold, None, False)[0], causal.expand(2, 6, 8)
    )
    assert torch.equal(reference.select_tiles(masses[0], threshold, 2), causal.expand(2, 6, 8))


def test_crossing_tile_is_kept():
    """The tile whose mass brings the row over its share is the last one; control: without it."""
    masses = torch.tensor([[[1.0, 6.0, 2.0, 4.0, 3.0]]])  # forced: 1 + 3; order: 1, 3, 2
    mask = reference.select_tiles(masses, 0.7, 4)  # 11.2 of 16: 4, 10, 14
    assert mask[0, 0].tolist() == [True, True, False, True, True]
    ours = find_blocks_chunked(masses[None], 4, 0.7, None, False)[0]
    assert torch.equal(ours, mask)
    kept_mass = (masses * mask).sum()
    assert kept_mass >= 0.7 * 16
    assert kept_mass - 4 < 0.7 * 16, "one tile fewer falls short"
    wrong = find_blocks_chunked(masses[None], 4, 0.7 - 4 / 16, None, False)[0]
    assert not torch.equal(wrong, mask)


def test_share_met_exactly_needs_no_further_tile():
    masses = torch.tensor([[[2.0, 4.0, 1.0, 2.0]]])  # 4 forced, 8 of 9
    for threshold, count in ((4 / 9 - 0.01, 2), (4 / 9 + 0.01, 3), (8 / 9 - 0.01, 3), (0.95, 4)):
        assert reference.select_tiles(masses, threshold, 3).sum() == count
    masses = torch.tensor([[[2.0, 4.0, 0.0, 2.0]]])
    assert reference.select_tiles(masses, 0.5, 3).sum() == 2
    assert find_blocks_chunked(masses[None], 3, 0.5, None, False).sum() == 2


@pytest.mark.parametrize(
    ("select", "device"),
    [(reference.select_tiles, CPU), (select_tiles, DEVICE), (kernels.select_tiles, DEVICE)],
    ids=["reference", "op", "kernel"],
)
def test_guard_keeps_tiles_with_a_peak(select, device):
    masses = torch.tensor([[[5.0, 1.0, 1.0, 5.0, 0.0]]], device=device)
    peaks = torch.tensor([[[0.0, 0.2, 0.3, 0.0, 1.0]]], device=device)
    plain = select(masses, 0.5, 3)
    guarded = select(masses, 0.5, 3, peaks, 0.2)
    assert plain[0, 0].tolist() == [True, False, False, True, False]
    assert guarded[0, 0].tolist() == [True, False, True, True, False]


def test_without_causality():
    """Every column counts, and only the first one is forced."""
    masses = torch.tensor([[[[0.0, 1.0, 2.0, 5.0]]]])
    mask = find_blocks_chunked(masses, 0, 0.6, None, False, causal=False)
    assert mask.flatten().tolist() == [True, False, False, True]
    assert find_blocks_chunked(masses, 0, 1.0, None, False, causal=False).all()


def test_number_to_choose():
    masses = torch.tensor([[[[0.0, 1.0, 2.0, 2.0, 5.0, 9.0]]]])
    for count, kept in ((0, [0, 4]), (2, [0, 4]), (3, [0, 2, 4]), (5, [0, 1, 2, 3, 4])):
        mask = find_blocks_chunked(masses, 4, None, count, False)
        assert mask.flatten().nonzero().flatten().tolist() == kept


@pytest.mark.parametrize("decoding", [False, True])
def test_mode(decoding):
    """In the phase that is not chosen in, everything up to the diagonal is kept."""
    masses = torch.tensor([[[[5.0, 0.0, 0.0, 5.0, 0.0]]]])
    for mode in ("prefill", "decode", "both"):
        mask = find_blocks_chunked(masses, 3, 0.5, None, decoding, mode)
        chosen = mode == "both" or (mode == "decode") == decoding
        assert mask.flatten().tolist() == [True, not chosen, not chosen, True, False]


def test_what_does_not_fit_is_refused():
    masses = torch.ones(1, 1, 2, 2)
    with pytest.raises(ValueError, match="mode='dense'"):
        find_blocks_chunked(masses, 0, 0.5, None, False, "dense")
    for threshold, count in ((None, None), (0.5, 3)):
        with pytest.raises(ValueError, match="one of them must be None"):
            find_blocks_chunked(masses, 0, threshold, count, False)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((torch.ones(1, 2, 2).half(), 0.5, 0), "masses of shape .*float16"),
        ((torch.ones(1, 2, 3).mT, 0.5, 0), "contiguous in the last axis"),
        ((torch.ones(1, 2, 2), torch.ones(2), 0), r"threshold of shape \[2\] for 1 heads"),
        ((torch.ones(1, 2, 2), 0.5, 0, torch.ones(1, 2, 3), 0.1), r"peaks of shape \[1, 2, 3\]"),
        ((torch.ones(1, 2, 2), 0.5, 0, torch.ones(1, 2, 2)), "without the other"),
        ((torch.ones(1, 2, 2), 0.5, 0, None, 0.1), "without the other"),
    ],
)
def test_selection_refuses(args, reason):
    with pytest.raises(ValueError, match=reason):
        select_tiles(*args)


class NoSync(TorchDispatchMode):
    """Refuses the operations that make the host wait for values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal"):
            raise RuntimeError(f"{name} synchronises")
        if name in ("index", "index_put", "index_put_"):
            assert not any(i is not None and i.dtype == torch.bool for i in args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("threshold", [0.9, torch.tensor(0.9), torch.tensor([0.9, 0.5])])
def test_host_does_not_wait(threshold):
    masses = torch.rand(1, 2, 3, 5, device=DEVICE)
    if isinstance(threshold, torch.Tensor):
        threshold = threshold.to(DEVICE)
    with NoSync():
        find_blocks_chunked(masses, 2, threshold, None, False)
        find_blocks_chunked(masses, 2, None, 2, False)
        select_tiles(masses[0], threshold, 2, masses[0], 0.5)
    for wait in (lambda: masses.sum().item(), lambda: masses.nonzero(), lambda: bool(masses.any())):
        with NoSync(), pytest.raises(RuntimeError, match="synchronises"):
            wait()
