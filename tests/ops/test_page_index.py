"""The index of a page's keys, and scores by it, against loops."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_inputs import CPU, DEVICE, INF, KERNEL_DTYPES, NAN, randn
from page_inputs import (
    BLOCK_SIZE,
    ESTIMATORS,
    GARBAGE,
    PAGE_SIZE,
    SCALE,
    Cache,
    Pages,
    assert_same,
    codes_of,
    ints,
    unpack,
)
from tolerances import assert_close

from nanovllm.ops import page_index as ops
from nanovllm.ops.kernels import page_index as kernels
from nanovllm.ops.page_index import PageIndex

IMPLEMENTATIONS = {"torch": (ops, CPU), "kernel": (kernels, DEVICE)}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return IMPLEMENTATIONS[request.param]


# Bounds and codes: `Cache.store` compares both.


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (3, 80), (2, 96), (1, 128)])
def test_bounds_by_loop(implementation, heads, dim, dtype):
    """Pages begun, filled, and left in the middle, of two sequences in blocks out of order."""
    module, device = implementation
    cache = Cache(4, heads, dim, dtype, device)
    for i, slots in enumerate(
        ([*range(32, 48), 0, 1, 2, 48, 49], [3, 50], [4, 5, 6, 7, 8, 51], [9, 52])
    ):
        cache.store(module, randn(len(slots), heads, dim, seed=i, device=CPU), slots)
    assert cache.bounds[[2, 3, 7]].isnan().all(), "no token is there"


@given(data=st.data())
@settings(max_examples=10)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_bounds_in_steps_of_any_size(name, data):
    module, device = IMPLEMENTATIONS[name]
    cache = Cache(6, 1, device=device)
    blocks = data.draw(st.permutations(range(6)))
    lengths, tables = [0, 0], [blocks[:3], blocks[3:]]
    for step in range(3):
        slots = []
        for i, table in enumerate(tables):
            end = data.draw(st.integers(lengths[i], min(lengths[i] + 18, 3 * BLOCK_SIZE)))
            slots += [
                table[j // BLOCK_SIZE] * BLOCK_SIZE + j % BLOCK_SIZE for j in range(lengths[i], end)
            ]
            lengths[i] = end
        cache.store(module, randn(len(slots), 1, 16, seed=step, device=CPU), slots)


def test_page_begun_anew_forgets(implementation):
    """Bounds wider than any key's, and NaN in one channel, which stays until then."""
    module, device = implementation
    cache = Cache(1, device=device)
    keys = randn(4, 2, 16, device=CPU)
    cache.store(module, 100 * keys, [0, 1, 2, 3])
    keys[1, 1, 5] = NAN
    cache.store(module, keys, [0, 1, 2, 3])
    assert cache.bounds[0].isnan().nonzero().tolist() == [[1, 0, 5], [1, 1, 5]]
    assert cache.bounds[0].nan_to_num().abs().max() < 5
    cache.store(module, keys[:1], [4])
    assert cache.bounds[0].isnan().sum() == 2
    cache.store(module, keys[:1], [0])
    assert not cache.bounds[0].isnan().any()


def test_token_extends_its_page_by_what_it_exceeds(implementation):
    module, device = implementation
    cache = Cache(1, 1, 2, device=device)
    for slot, key, low, high in (
        (0, (1, -1), (1, -1), (1, -1)),
        (1, (0, 5), (0, -1), (1, 5)),
        (2, (0.5, 2), (0, -1), (1, 5)),
        (3, (9, -9), (0, -9), (9, 5)),
    ):
        cache.store(module, torch.tensor([[key]]), [slot])
        assert cache.bounds[0, 0].tolist() == [list(low), list(high)]


# The axes of a cache in memory, outermost first: blocks, tokens, heads.
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)], ids=str)
def test_keys_that_lie_elsewhere(implementation, order):
    """New keys in a tail of any layout, behind their pages' first; index of the cache."""
    module, device = implementation
    shape = (2, 24, 3, 16)  # blocks whose size is no power of two
    tail = torch.full((*(shape[axis] + 1 for axis in order), 20), NAN, device=device)
    tail = tail.permute(*(order.index(axis) for axis in range(3)), 3)[:2, :24, :3, :16]
    keys = randn(11, 3, 16, device=CPU)
    # The last two tokens of a page whose first lie before them, and three of a page of their own.
    for key, slot in zip(keys, [*range(17, 25), 36, 37, 38], strict=True):
        tail[slot // 24, slot % 24] = key
    cache = Cache(6, 3, device=device)
    slots = (ints(x, device) for x in ([23, 24, 36, 37, 38], [14, 15, 80, 81, 82]))
    module.update_page_index(cache.index, tail, *slots, PAGE_SIZE)
    for page, mine in ((1, keys[:8]), (10, keys[8:])):
        assert_same(cache.bounds[page], torch.stack(mine.aminmax(dim=0), 1))
        codes = unpack(cache.index.codes[page, :, : len(mine)], 16).transpose(0, 1)
        assert torch.equal(codes.cpu(), codes_of(mine))
    assert cache.bounds[[0, *range(2, 10), 11]].isnan().all()


def test_rows_of_padding_harm_no_page(implementation):
    """More rows of one slot than a page has tokens; and none at all."""
    module, device = implementation
    cache = Cache(3, device=device)
    cache.store(module, randn(2, 2, 16, device=CPU), [8, 9])
    slots = ints([10, *[32] * 20], device)
    cache.keys[0, 10], cache.keys[2] = 7, 0
    module.update_page_index(cache.index, cache.keys, slots, slots, PAGE_SIZE)
    mine = cache.keys[0, 8:11].cpu()
    assert_same(cache.bounds[1], torch.stack(mine.aminmax(dim=0), 1))
    assert cache.bounds[[0, 2, 3]].isnan().all()
    before = cache.bounds.clone()
    module.update_page_index(cache.index, cache.keys, slots[:0], slots[:0], PAGE_SIZE)
    assert_same(cache.bounds, before)


def test_codes_of_a_page_by_hand(implementation):
    """Quarters are closed below and the highest above; a channel of one value is all highest."""
    module, device = implementation
    cache = Cache(1, 1, 3, device=device)
    keys = [[0, 5, -1], [1, 5, 7], [2, 5, 0.99], [3, 5, 1], [4, 5, 5], [0.9, 5, 4.9]]
    cache.store(module, torch.tensor(keys)[:, None], range(6))
    expected = [[0, 3, 0], [1, 3, 3], [2, 3, 0], [3, 3, 1], [3, 3, 3], [0, 3, 2]]
    assert unpack(cache.index.codes[0, 0, :6], 3).tolist() == expected
    assert (cache.index.codes[0, 0] >> 6 == 0).all(), "bits of no channel"


# Scores

every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)


@every_estimator
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(1, 1, 64), (6, 2, 80), (4, 1, 96), (8, 1, 128), (4, 2, 8)]
)
def test_scores_by_loop(implementation, heads, kv_heads, dim, dtype, estimator):
    pages = Pages([33, 1, 16], heads, kv_heads, dim, dtype)
    scores = pages.score(implementation, estimator)
    assert scores.dtype == torch.float32
    group = heads // kv_heads
    assert scores.shape == (3, kv_heads, group, 8)
    for i, num_pages in enumerate((4, 0, 1)):
        assert (scores[i, ..., num_pages:] == -INF).all()
        if num_pages == 0:
            continue
        truth = torch.stack([pages.truth(i, h, group, estimator) for h in range(kv_heads)])
        ours = scores[i, ..., :num_pages].double()
        if estimator == "bounds" or dtype == torch.float32:
            assert_close(ours.float(), truth)
        else:  # products of rounded queries and steps
            torch.testing.assert_close(ours, truth, rtol=0, atol=0.03)


def test_scores_bound_the_logits(implementation):
    """Of each key of each page but the newest, for each query."""
    module, device = implementation
    cache = Cache(4, 2, 64, device=device)
    keys, query = randn(57, 2, 64, device=CPU), randn(1, 6, 64, seed=1, device=CPU)
    cache.store(module, keys, list(range(57)))
    table = ints([[0, 1, 2, 3]], device)
    index = cache.indexed_by("bounds")
    scores = module.score_pages(
        query.to(device), index, table, ints([57], device), SCALE, PAGE_SIZE, BLOCK_SIZE
    )[0].cpu()
    logits = SCALE * torch.einsum("hgd,nhd->hgn", query[0].unflatten(0, (2, 3)), keys)
    for page in range(7):
        inside = logits[..., page * PAGE_SIZE : (page + 1) * PAGE_SIZE].amax(-1)
        assert (scores[..., page] >= inside - 1e-4).all()


def test_a_page_of_one_key_has_its_logit(implementation):
    """Both bounds, and all quarters between them, are that key."""
    module, device = implementation
    cache = Cache(1, 2, 64, device=device)
    keys, query = randn(1, 2, 64, device=CPU), randn(1, 6, 64, seed=1, device=CPU)
    cache.store(module, keys.expand(PAGE_SIZE, -1, -1), range(PAGE_SIZE))
    logits = SCALE * torch.einsum("hgd,hd->hg", query[0].unflatten(0, (2, 3)), keys[0])
    query, *tables = query.to(device), ints([[0]], device), ints([PAGE_SIZE + 1], device)
    for estimator, more in (("bounds", 0), ("codes", math.log(PAGE_SIZE))):
        index = cache.indexed_by(estimator)
        scores = module.score_pages(query, index, *tables, SCALE, PAGE_SIZE, BLOCK_SIZE)
        torch.testing.assert_close(scores[0, ..., 0].cpu(), logits + more, rtol=1e-5, atol=1e-5)


def test_codes_know_the_mass_of_a_page(implementation):
    """Closer than half a quarter of each channel; the bound of the same page is far above."""
    module, device = implementation
    cache = Cache(4, 2, 64, device=device)
    keys, query = randn(64, 2, 64, device=CPU), randn(1, 6, 64, seed=1, device=CPU)
    cache.store(module, keys, list(range(64)))
    table, length = ints([[0, 1, 2, 3]], device), ints([64], device)
    by_codes, by_bounds = (
        module.score_pages(
            query.to(device), cache.indexed_by(kind), table, length, SCALE, PAGE_SIZE, BLOCK_SIZE
        )[0].cpu()
        for kind in ("codes", "bounds")
    )
    q = query[0].unflatten(0, (2, 3))
    logits = SCALE * torch.einsum("hgd,nhd->hgn", q, keys)
    for page in range(7):
        mine = slice(page * PAGE_SIZE, (page + 1) * PAGE_SIZE)
        low, high = keys[mine].aminmax(dim=0)
        most = SCALE * torch.einsum("hgd,hd->hg", q.abs(), (high - low) / 8)
        error = (by_codes[..., page] - logits[..., mine].logsumexp(-1)).abs()
        assert (error <= most + 1e-4).all()
        assert error.mean() < 0.1 * most.mean()
        assert (by_bounds[..., page] > logits[..., mine].amax(-1) + 5 * error.mean()).all()


@every_estimator
def test_scores_depend_on_their_sequence_only(implementation, estimator):
    """Bit for bit, alone or among others, with a wider table or none wider than needed."""
    pages = Pages([40, 260, 3])
    scores = pages.score(implementation, estimator)
    query, tables, lengths = pages.query, pages.tables, pages.lengths
    for i, length in enumerate(lengths):
        num_blocks = -(-length // BLOCK_SIZE)
        pages.query, pages.tables = query[i : i + 1], tables[i : i + 1, :num_blocks]
        pages.lengths = [length]
        alone = pages.score(implementation, estimator)
        assert torch.equal(scores[i : i + 1, ..., : alone.shape[3]], alone)


@every_estimator
def test_scores_of_a_view(implementation, estimator):
    """Queries beside keys and values, and lengths that lie apart."""
    module, device = implementation
    pages = Pages([40, 3])
    truth = pages.score(implementation, estimator)
    wide = torch.full((2, 9, 80), NAN, device=device)
    wide[:, 1:5, :64] = pages.query
    lengths = torch.full((2, 3), GARBAGE, dtype=torch.int32, device=device)
    lengths[:, 1] = ints(pages.lengths)
    index, tables = pages.index(estimator, device), pages.tables.to(device)
    inputs = (wide[:, 1:5, :64], index, tables, lengths[:, 1])
    scores = module.score_pages(*inputs, SCALE, PAGE_SIZE, BLOCK_SIZE)
    assert torch.equal(scores.cpu(), truth)


@every_estimator
def test_nan_in_bounds_shows_in_their_score_only(implementation, estimator):
    pages = Pages([40], heads=6)
    truth = pages.score(implementation, estimator)
    pages.bounds[pages.physical[0][2], 1, :, 63] = NAN
    scores = pages.score(implementation, estimator)
    assert scores.isnan().nonzero().tolist() == [[0, 1, query, 2] for query in range(3)]
    assert_same(torch.where(scores.isnan(), truth, scores), truth)


# What does not fit

BOUNDS, CODES = torch.zeros(4, 2, 2, 16), torch.zeros(4, 2, 8, 2, dtype=torch.int16)
INDEX, KEYS = PageIndex(BOUNDS), torch.zeros(2, 16, 2, 16)
SLOTS, TABLES, LENGTHS = ints([0]), ints([[0, 1]]), ints([5])
QUERY = torch.zeros(1, 4, 16)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((PageIndex(BOUNDS[:, :, 0]), KEYS, SLOTS, SLOTS, 8), "bounds of shape"),
        ((PageIndex(BOUNDS.mT), KEYS, SLOTS, SLOTS, 8), "bounds of shape"),
        ((PageIndex(BOUNDS.half()), KEYS, SLOTS, SLOTS, 8), "key_cache of .*float16"),
        ((PageIndex(BOUNDS, CODES[:, :, :4]), KEYS, SLOTS, SLOTS, 8), "codes of shape"),
        ((PageIndex(BOUNDS, CODES.long()), KEYS, SLOTS, SLOTS, 8), "codes of .*int64"),
        ((PageIndex(BOUNDS, CODES.mT), KEYS, SLOTS, SLOTS, 8), "codes of .*contiguous"),
        ((INDEX, KEYS[:, :, :1], SLOTS, SLOTS, 8), "key_cache of"),
        ((INDEX, KEYS.mT.contiguous().mT, SLOTS, SLOTS, 8), "the last stride 1"),
        ((INDEX, KEYS, SLOTS, SLOTS.long(), 8), "cache_slots of .*int64"),
        ((INDEX, KEYS, ints([0, 1]), SLOTS, 8), "key_slots of"),
        ((INDEX, KEYS, SLOTS, SLOTS, 12), "page_size=12 must be a power of two"),
    ],
)
def test_update_refuses(args, reason):
    with pytest.raises(ValueError, match=reason):
        ops.update_page_index(*args)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((QUERY[:, :3], INDEX, TABLES, LENGTHS, 1.0, 8, 16), "query of shape"),
        ((QUERY.mT, INDEX, TABLES, LENGTHS, 1.0, 8, 16), "query of shape"),
        ((QUERY, INDEX, TABLES.long(), LENGTHS, 1.0, 8, 16), "block_tables of .*int64"),
        ((QUERY, INDEX, TABLES, ints([5, 5]), 1.0, 8, 16), "context_lens of"),
        ((QUERY, INDEX, TABLES, LENGTHS, 1.0, 8, 12), "divide block_size=12"),
    ],
)
def test_score_refuses(args, reason):
    with pytest.raises(ValueError, match=reason):
        ops.score_pages(*args)
