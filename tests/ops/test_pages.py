"""Bounds of pages, their scores, the choice among them and attention to it, against loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_inputs import CPU, DEVICE, INF, KERNEL_DTYPES, NAN, randn, truth_of
from tolerances import assert_close

from nanovllm.ops import pages as ops
from nanovllm.ops.kernels import pages as kernels
from nanovllm.ops.kernels.paged_decode import paged_decode_attention

IMPLEMENTATIONS = {"torch": (ops, CPU), "kernel": (kernels, DEVICE)}
PAGE_SIZE, BLOCK_SIZE = 8, 16
SCALE = 0.1
GARBAGE = 2**31 - 1  # an entry of a table that would end the process if it were read through


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return IMPLEMENTATIONS[request.param]


def ints(values, device=CPU):
    return torch.tensor(values, dtype=torch.int32, device=device)


def assert_same(ours, truth):
    """NaN is the same as NaN."""
    torch.testing.assert_close(ours, truth.to(ours.device), rtol=0, atol=0, equal_nan=True)


# Bounds


def update_by_loop(bounds, keys, slots, page_size=PAGE_SIZE):
    for key, slot in zip(keys, slots, strict=True):
        low, high = bounds[slot // page_size].unbind(1)
        if slot % page_size == 0:
            low[:], high[:] = key, key
        else:
            low[:], high[:] = torch.minimum(low, key), torch.maximum(high, key)


class Cache:
    """A paged cache of keys, bounds of its pages, and what a loop says of them."""

    def __init__(self, num_blocks, heads=2, dim=16, dtype=torch.float32, device=CPU):
        num_pages = num_blocks * BLOCK_SIZE // PAGE_SIZE
        self.keys = torch.full((num_blocks, BLOCK_SIZE, heads, dim), NAN, dtype=dtype)
        self.keys = self.keys.to(device)
        self.truth = torch.full((num_pages, heads, 2, dim), NAN, dtype=dtype)
        self.bounds = self.truth.to(device, copy=True)

    def store(self, module, keys, slots, page_size=PAGE_SIZE):
        where = ints(slots, self.keys.device)
        self.keys[where // BLOCK_SIZE, where % BLOCK_SIZE] = keys.to(self.keys)
        module.update_page_bounds(self.bounds, self.keys, where, where, page_size)
        update_by_loop(self.truth, keys.to(self.truth), slots, page_size)
        assert_same(self.bounds, self.truth)


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
    """New keys in a small tail of any layout, with poison around them; bounds of the cache."""
    module, device = implementation
    shape = (2, 24, 3, 16)  # blocks whose size is no power of two
    tail = torch.full((*(shape[axis] + 1 for axis in order), 20), NAN, device=device)
    tail = tail.permute(*(order.index(axis) for axis in range(3)), 3)[:2, :24, :3, :16]
    key_slots, cache_slots = [23, 24, 47, 0, 5], [14, 15, 80, 81, 82]
    keys = randn(5, 3, 16, device=CPU)
    for key, slot in zip(keys, key_slots, strict=True):
        tail[slot // 24, slot % 24] = key
    truth = randn(12, 3, 2, 16, seed=1, device=CPU)
    bounds = truth.to(device, copy=True)
    update_by_loop(truth, keys, cache_slots)
    slots = (ints(x, device) for x in (key_slots, cache_slots))
    module.update_page_bounds(bounds, tail, *slots, PAGE_SIZE)
    assert_same(bounds, truth)


def test_rows_of_padding_harm_no_page(implementation):
    """More rows of one slot than a page has tokens; and none at all."""
    module, device = implementation
    cache = Cache(3, device=device)
    cache.store(module, randn(2, 2, 16, device=CPU), [8, 9])
    slots = ints([10, *[32] * 20], device)
    cache.keys[0, 10], cache.keys[2] = 7, 0
    module.update_page_bounds(cache.bounds, cache.keys, slots, slots, PAGE_SIZE)
    update_by_loop(cache.truth, torch.full((1, 2, 16), 7.0), [10])
    assert_same(cache.bounds[:4], cache.truth[:4])
    before = cache.bounds.clone()
    module.update_page_bounds(cache.bounds, cache.keys, slots[:0], slots[:0], PAGE_SIZE)
    assert_same(cache.bounds, before)


# Scores


class Pages:
    """Random bounds of sequences of given lengths; whatever belongs to none of them is poison."""

    def __init__(self, lengths, heads=4, kv_heads=2, dim=64, dtype=torch.float32):
        self.lengths = lengths
        per_block = BLOCK_SIZE // PAGE_SIZE
        num_blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        generator = torch.Generator().manual_seed(0)
        blocks = torch.randperm(sum(num_blocks) + 1, generator=generator).tolist()
        self.bounds = torch.full((len(blocks) * per_block, kv_heads, 2, dim), NAN, dtype=dtype)
        self.tables = torch.full((len(lengths), max(num_blocks) + 1), GARBAGE, dtype=torch.int32)
        self.query = randn(len(lengths), heads, dim, dtype=dtype, device=CPU)
        self.physical = []
        for i, (length, count) in enumerate(zip(lengths, num_blocks, strict=True)):
            mine, blocks = blocks[:count], blocks[count:]
            self.tables[i, :count] = ints(mine)
            pages = [block * per_block + j for block in mine for j in range(per_block)]
            pages = pages[: -(-length // PAGE_SIZE)]
            ends = randn(len(pages), kv_heads, 2, dim, seed=1 + i, device=CPU)
            self.bounds[pages] = ends.sort(dim=2).values.to(dtype)
            self.physical.append(pages)

    def score(self, implementation):
        module, device = implementation
        inputs = self.query, self.bounds, self.tables, ints(self.lengths)
        inputs = (x.to(device) for x in inputs)
        return module.score_pages(*inputs, SCALE, PAGE_SIZE, BLOCK_SIZE).cpu()


def score_by_loop(query, bounds):
    """Return the bound of one page for each query of a KV head, in fp64, from its sentence."""
    low, high = bounds.double()
    return [SCALE * sum(max(a, b) for a, b in zip(q * low, q * high, strict=True)) for q in query]


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(1, 1, 64), (6, 2, 80), (4, 1, 96), (8, 1, 128)]
)
def test_scores_by_loop(implementation, heads, kv_heads, dim, dtype):
    pages = Pages([17, 1, 8], heads, kv_heads, dim, dtype)
    scores = pages.score(implementation)
    assert scores.dtype == torch.float32
    assert scores.shape == (3, kv_heads, heads // kv_heads, 6)
    queries = pages.query.double().unflatten(1, (kv_heads, -1))
    for i, physical in enumerate(pages.physical):
        truth = torch.tensor(
            [
                [score_by_loop(queries[i, h], pages.bounds[page, h]) for page in physical]
                for h in range(kv_heads)
            ]
        )
        assert_close(scores[i, ..., : len(physical)], truth.mT)
        assert (scores[i, ..., len(physical) :] == -INF).all()


def test_scores_bound_the_logits(implementation):
    """Of each key of each page, for each query; a page of one token has it as its score."""
    module, device = implementation
    cache = Cache(4, 2, 64, device=device)
    keys, query = randn(57, 2, 64, device=CPU), randn(1, 6, 64, seed=1, device=CPU)
    cache.store(module, keys, list(range(57)))
    table = ints([[0, 1, 2, 3]], device)
    scores = module.score_pages(
        query.to(device), cache.bounds, table, ints([57], device), SCALE, PAGE_SIZE, BLOCK_SIZE
    )[0].cpu()
    logits = SCALE * torch.einsum("hgd,nhd->hgn", query[0].unflatten(0, (2, 3)), keys)
    for page in range(8):
        inside = logits[..., page * PAGE_SIZE : (page + 1) * PAGE_SIZE].amax(-1)
        assert (scores[..., page] >= inside - 1e-4).all()
    torch.testing.assert_close(scores[..., 7], logits[..., 56], rtol=1e-5, atol=1e-5)


def test_scores_depend_on_their_sequence_only(implementation):
    """Bit for bit, alone or among others, with a wider table or none wider than needed."""
    pages = Pages([40, 700, 3])
    scores = pages.score(implementation)
    query, tables, lengths = pages.query, pages.tables, pages.lengths
    for i, length in enumerate(lengths):
        num_blocks = -(-length // BLOCK_SIZE)
        pages.query, pages.tables = query[i : i + 1], tables[i : i + 1, :num_blocks]
        pages.lengths = [length]
        alone = pages.score(implementation)
        assert torch.equal(scores[i : i + 1, ..., : alone.shape[3]], alone)


def test_scores_of_a_view(implementation):
    """Queries beside keys and values, and lengths that lie apart."""
    module, device = implementation
    pages = Pages([40, 3])
    truth = pages.score(implementation)
    wide = torch.full((2, 9, 80), NAN, device=device)
    wide[:, 1:5, :64] = pages.query
    lengths = torch.full((2, 3), GARBAGE, dtype=torch.int32, device=device)
    lengths[:, 1] = ints(pages.lengths)
    inputs = (wide[:, 1:5, :64], pages.bounds, pages.tables, lengths[:, 1])
    scores = module.score_pages(*(x.to(device) for x in inputs), SCALE, PAGE_SIZE, BLOCK_SIZE)
    assert torch.equal(scores.cpu(), truth)


def test_nan_in_bounds_shows_in_their_score_only(implementation):
    pages = Pages([40], heads=6)
    truth = pages.score(implementation)
    pages.bounds[pages.physical[0][2], 1, :, 63] = NAN
    scores = pages.score(implementation)
    assert scores.isnan().nonzero().tolist() == [[0, 1, query, 2] for query in range(3)]
    assert_same(torch.where(scores.isnan(), truth, scores), truth)


# Choice


def choose_by_loop(scores, length, num_pages, num_recent, num_dense=0, page_size=PAGE_SIZE):
    """Return the pages of one KV head, and the tokens in them.

    Args:
        scores: of its queries, a list for each.
    """
    num_seen = -(-length // page_size)
    chosen = {j for j in range(num_seen) if j == 0 or j >= num_seen - num_recent}
    queries = [[INF if np.isnan(x) else x for x in query] for query in scores]
    if len(queries) > 1:
        for query in queries:
            finite = [x for x in query[:num_seen] if x < INF]
            total = np.logaddexp.reduce(finite) if finite else 0
            query[:] = [x if x == INF else x - total for x in query]
    score = [max(column) for column in zip(*queries, strict=True)]
    for j in sorted(range(num_seen), key=lambda j: (-score[j], j)):
        if len(chosen) < num_pages or num_seen <= num_dense:
            chosen.add(j)
    tokens = sum(min(page_size, length - j * page_size) for j in chosen)
    return sorted(chosen), tokens


def assert_chooses(
    implementation, scores, lengths, num_pages, num_recent, tables=None, num_dense=0
):
    """Compare with the loop; scores of one query for each KV head may lack its axis."""
    if scores.dim() == 3:
        scores = scores[:, :, None]
    module, device = implementation
    options = (None, None) if tables is None else (tables.to(device), BLOCK_SIZE)
    inputs = scores.to(device), ints(lengths, device), PAGE_SIZE, num_pages, num_recent
    pages, lens = module.top_pages(*inputs, *options, num_dense)
    width = max(num_pages, min(num_dense, scores.shape[3]))
    assert pages.shape == (*scores.shape[:2], width)
    assert pages.dtype == lens.dtype == torch.int32
    for i, length in enumerate(lengths):
        for h in range(scores.shape[1]):
            sizes = length, num_pages, num_recent, num_dense
            truth, tokens = choose_by_loop(scores[i, h].tolist(), *sizes)
            if tables is not None:
                per_block = BLOCK_SIZE // PAGE_SIZE
                truth = [int(tables[i, j // per_block]) * per_block + j % per_block for j in truth]
            assert pages[i, h].tolist() == truth + [0] * (width - len(truth))
            assert lens[i] == tokens
    return pages


@st.composite
def choices(draw):
    max_pages = draw(st.integers(1, 12))
    num_seqs = draw(st.integers(1, 2))
    # Few values make ties common.
    few = st.sampled_from([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 1e-45, -1e-45])
    value = draw(st.sampled_from([few, st.floats(width=32)]))
    count = num_seqs * 2 * max_pages
    scores = torch.tensor(draw(st.lists(value, min_size=count, max_size=count)))
    length = st.integers(0, max_pages * PAGE_SIZE)
    lengths = draw(st.lists(length, min_size=num_seqs, max_size=num_seqs))
    num_pages = draw(st.integers(2, 13))
    num_recent = draw(st.integers(1, num_pages - 1))
    num_dense = draw(st.sampled_from([0, 3, 20]))
    return scores.view(num_seqs, 2, max_pages), lengths, num_pages, num_recent, None, num_dense


@given(arguments=choices())
@settings(max_examples=200)
def test_choice_by_loop(arguments):
    assert_chooses(IMPLEMENTATIONS["torch"], *arguments)


@given(arguments=choices())
@settings(max_examples=15)
def test_choice_of_the_kernel_by_loop(arguments):
    assert_chooses(IMPLEMENTATIONS["kernel"], *arguments)


@pytest.mark.parametrize(
    "scores",
    [
        [1.0, -0.0, 0.0, 0.0, -0.0, 1.0],
        [0.0, INF, NAN, INF, NAN, 0.0],
        # NaN with its sign, as arithmetic may leave it
        [0.0, 1.0, -NAN, 2.0, -INF, 0.0],
        [0.0, -INF, -INF, -3e38, -INF, 0.0],
        # next to each other among fp32
        [0.0, 1.0, 1.0 + 2**-23, 1.0, 1.0 + 2**-23, 0.0],
        [0.0, -1.0, -1.0 - 2**-23, -1.0, -1.0 - 2**-23, 0.0],
        [-INF] * 6,
    ],
    ids=str,
)
def test_choice_among_special_scores(implementation, scores):
    """Zeros of either sign are equal, and so are NaN of either sign and infinity."""
    scores = torch.tensor([[scores]])
    for num_pages in (3, 4, 5):
        assert_chooses(implementation, scores, [6 * PAGE_SIZE], num_pages, 1)


def test_choice_in_a_cache(implementation):
    """The places of pages in the cache; entries of tables past the context are not touched."""
    pages = Pages([100, 17, 0, 40])
    scores = pages.score(implementation)
    assert_chooses(implementation, scores, pages.lengths, 4, 2, pages.tables)
    assert_chooses(implementation, scores, pages.lengths, 20, 2, pages.tables)


@pytest.mark.parametrize("max_pages", [4097, 16384])
def test_choice_among_many_pages(implementation, max_pages):
    """Scores of either sign, some of them in a great tie at the cut."""
    scores = randn(1, 2, max_pages, device=CPU)
    scores[0, 1] = (2 * scores[0, 1]).round()
    length = max_pages * PAGE_SIZE - 3
    pages = assert_chooses(implementation, scores, [length], 64, 4)
    cut = scores[0, 1, pages[0, 1].long().cpu()].sort().values[5]
    assert (scores[0, 1] == cut).sum() > 64


def test_what_lies_past_the_context_is_not_seen(implementation):
    """Neither a great score nor NaN; scores of which every row lies apart."""
    scores = torch.full((2, 5, 40), INF)[:, :3, :20]
    scores[:, :, ::2] = NAN
    scores[0, :, :5], scores[1, :, :9] = randn(3, 5, device=CPU), randn(3, 9, device=CPU)
    assert_chooses(implementation, scores, [33, 72], 4, 1)


@pytest.mark.parametrize("group", [2, 3, 4])
def test_queries_of_a_head_are_compared_by_their_shares(implementation, group):
    """Whatever the size of a query's scores, and of pages past the context."""
    scores = randn(2, 3, group, 30, device=CPU)
    scores[:, :, 0] *= 20
    scores[:, :, 1] += 100
    scores[0, :, :, 21:] = 1000
    scores[1, 2, 1, 3] = NAN
    scores[1, 2, 0, 5] = INF
    assert_chooses(implementation, scores, [20 * PAGE_SIZE + 1, 240], 9, 2)


def test_a_long_query_does_not_outvote_a_sharp_one(implementation):
    """Its pages are all alike to it; the other's page is the only one with mass."""
    scores = torch.zeros(1, 1, 2, 12)
    scores[0, 0, 0] = 50 + 0.01 * randn(12, device=CPU)
    scores[0, 0, 1, 7] = 10
    pages = assert_chooses(implementation, scores, [12 * PAGE_SIZE], 4, 1)
    assert 7 in pages[0, 0]


@pytest.mark.parametrize("width", [21, 64, 300])
def test_the_choice_does_not_depend_on_the_width_of_the_table(implementation, width):
    module, device = implementation
    scores = torch.full((1, 2, 3, width), NAN)
    scores[..., :21] = randn(1, 2, 3, 21, device=CPU)
    pages, _ = module.top_pages(scores.to(device), ints([164], device), PAGE_SIZE, 8, 2)
    truth, _ = module.top_pages(scores[..., :21].to(device), ints([164], device), PAGE_SIZE, 8, 2)
    assert torch.equal(pages, truth)


def test_all_pages_where_there_is_room(implementation):
    """Then any number of newest ones may be asked for."""
    scores = randn(1, 1, 2, device=CPU)
    for num_recent in (0, 1, 9):
        assert_chooses(implementation, scores, [13], 2, num_recent)


# Attention


class ChosenPages:
    """Pages chosen for each head at random, as a cache holds them; poison elsewhere."""

    def __init__(self, lens, heads=4, kv_heads=2, dim=64, dtype=torch.float32):
        num_pages = 12
        shape = (num_pages, PAGE_SIZE, kv_heads, dim)
        caches = [randn(*shape, dtype=dtype, seed=i, device=CPU) for i in range(2)]
        self.query = randn(len(lens), heads, dim, dtype=dtype, seed=2, device=CPU)
        self.scale = dim**-0.5
        generator = torch.Generator().manual_seed(3)
        tables = torch.full((len(lens), kv_heads, num_pages), GARBAGE, dtype=torch.int32)
        truth = torch.zeros(self.query.shape, dtype=torch.float64)
        group = heads // kv_heads
        wanted = torch.zeros(shape[:3], dtype=torch.bool)
        for i, length in enumerate(lens):
            for h in range(kv_heads):
                used = -(-length // PAGE_SIZE)
                tables[i, h, :used] = torch.randperm(num_pages, generator=generator)[:used]
                slots = [(int(tables[i, h, j // PAGE_SIZE]), j % PAGE_SIZE) for j in range(length)]
                if not slots:
                    continue
                pages, offsets = (list(x) for x in zip(*slots, strict=True))
                wanted[pages, offsets, h] = True
                keys, values = (x[pages, offsets, h][None, :, None] for x in caches)
                rows = slice(h * group, (h + 1) * group)
                truth[i, rows] = truth_of(self.query[None, i : i + 1, rows], keys, values, False)[
                    0
                ][0, 0]
        caches = [x.masked_fill(~wanted[..., None], NAN) for x in caches]
        self.tables, self.truth, self.lens = tables.to(DEVICE), truth.to(DEVICE), ints(lens, DEVICE)
        self.query = self.query.to(DEVICE)
        self.keys, self.values = (x.to(DEVICE) for x in caches)

    def attend(self, op=ops.page_attention):
        caches = self.keys, self.values
        return op(self.query, *caches, self.tables, self.lens, self.scale)


# The kernel takes the logarithm of an empty split's sum before it puts -inf in its place.
@pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning")
@pytest.mark.parametrize("op", [ops.page_attention, paged_decode_attention])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(1, 1, 64), (6, 2, 80), (4, 1, 96), (8, 1, 128)]
)
def test_attention_to_chosen_pages(op, heads, kv_heads, dim, dtype):
    chosen = ChosenPages([1, 70, 0, 16], heads, kv_heads, dim, dtype)
    out = chosen.attend(op)
    assert out.dtype == dtype
    assert_close(out, chosen.truth)
    assert (out[2] == 0).all()


@pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning")
@pytest.mark.parametrize("op", [ops.page_attention, paged_decode_attention])
def test_attention_to_pages_of_one_head(op):
    """Each slot holds one head's page, and the axis of heads has stride 0."""
    chosen = ChosenPages([5, 70])
    truth = chosen.attend(op)
    shape = chosen.keys.shape
    chosen.keys, chosen.values = (
        x.transpose(1, 2).flatten(0, 1)[:, :, None].expand(-1, -1, shape[2], -1)
        for x in (chosen.keys, chosen.values)
    )
    assert chosen.keys.stride(2) == 0
    head = torch.arange(2, dtype=torch.int32, device=DEVICE)[:, None]
    used = chosen.tables != GARBAGE
    chosen.tables = torch.where(used, chosen.tables * 2 + head, GARBAGE)
    assert torch.equal(chosen.attend(op), truth)


# Together


def choose(module, query, bounds, tables, lengths, num_pages):
    scores = module.score_pages(query, bounds, tables, lengths, SCALE, PAGE_SIZE, BLOCK_SIZE)
    return module.top_pages(scores, lengths, PAGE_SIZE, num_pages, 1, tables, BLOCK_SIZE)


@pytest.mark.parametrize("sign", [1, -1])
def test_planted_key_is_found_in_every_page(implementation, sign):
    """By one of two query heads; not by the opposite query, save where a page is always kept."""
    module, device = implementation
    num_pages = 12
    # One sequence for each page that the key may be in, in a block of its own; one page is short.
    keys = 0.1 * randn(num_pages, num_pages * PAGE_SIZE, 1, 64, device=CPU)
    query = randn(1, 2, 64, seed=2, device=CPU)
    for page in range(num_pages):
        keys[page, page * PAGE_SIZE + 3 * page % 5, 0] = sign * query[0, 1]
    query[0, 0] /= 100
    bounds = torch.full((num_pages**2, 1, 2, 64), NAN)
    slots = ints([s for s in range(num_pages**2 * PAGE_SIZE) if s % 96 < 93])
    ops.update_page_bounds(bounds, keys, slots, slots, PAGE_SIZE)
    tables = torch.arange(num_pages**2 // 2, dtype=torch.int32).view(num_pages, -1)
    for turned in (1, -1):
        inputs = (turned * query).expand(num_pages, -1, -1), bounds, tables, ints([93] * num_pages)
        chosen, lens = choose(module, *(x.to(device) for x in inputs), 3)
        assert lens.tolist() == [21] * num_pages
        for page, pages in enumerate(chosen[:, 0].tolist()):
            found = page * num_pages + page in pages
            assert found == (turned == sign or page in (0, num_pages - 1))


def make_context(num_tokens, device):
    """Return a cache that holds a context in its blocks in reverse, values, and the table."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    cache = Cache(num_blocks, 1, 64, device=device)
    blocks = range(num_blocks - 1, -1, -1)
    slots = [block * BLOCK_SIZE + offset for block in blocks for offset in range(BLOCK_SIZE)]
    cache.store(ops, randn(num_tokens, 1, 64, device=CPU), slots[:num_tokens])
    return cache, randn(*cache.keys.shape, seed=1, device=device), ints([blocks], device), slots


def attend(query, cache, values, pages, lens):
    caches = (x.view(-1, PAGE_SIZE, *x.shape[2:]) for x in (cache.keys, values))
    return ops.page_attention(query, *caches, pages, lens, query.shape[2] ** -0.5)


def test_budget_of_the_whole_context_is_dense_attention(implementation):
    module, device = implementation
    cache, values, table, slots = make_context(91, device)
    query = randn(1, 4, 64, seed=2, device=device)
    pages, lens = choose(module, query, cache.bounds, table, ints([91], device), 12)
    out = attend(query, cache, values, pages, lens)
    keys, values = (x.flatten(0, 1)[slots[:91]][None] for x in (cache.keys, values))
    assert_close(out, truth_of(query[None], keys, values, False)[0][0])


@pytest.mark.gpu
def test_a_graph_holds_the_step():
    """Captured at one length and replayed at others: launches depend on shapes only."""
    cache, values, table, slots = make_context(91, DEVICE)
    query = randn(1, 4, 64, seed=2)
    length, slot = ints([1], DEVICE), ints([0], DEVICE)

    def step():
        ops.update_page_bounds(cache.bounds, cache.keys, slot, slot, PAGE_SIZE)
        pages, lens = choose(ops, query, cache.bounds, table, length, 3)
        return pages, lens, attend(query, cache, values, pages, lens)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for tokens in (1, 8, 24, 25, 90, 91):
        length.fill_(tokens)
        slot.fill_(slots[tokens - 1])
        graph.replay()
        ours = [x.clone() for x in captured]
        for x, truth in zip(ours, step(), strict=True):
            assert torch.equal(x, truth)
        assert ours[1] == (tokens if tokens <= 24 else 16 + (tokens - 1) % PAGE_SIZE + 1)


# What does not fit

BOUNDS, KEYS = torch.zeros(4, 2, 2, 16), torch.zeros(2, 16, 2, 16)
SLOTS, TABLES, LENGTHS = ints([0]), ints([[0, 1]]), ints([5])
QUERY, SCORES = torch.zeros(1, 4, 16), torch.zeros(1, 2, 2, 4)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((BOUNDS[:, :, 0], KEYS, SLOTS, SLOTS, 8), "bounds of shape"),
        ((BOUNDS.mT, KEYS, SLOTS, SLOTS, 8), "bounds of shape"),
        ((BOUNDS.half(), KEYS, SLOTS, SLOTS, 8), "key_cache of .*float16"),
        ((BOUNDS, KEYS[:, :, :1], SLOTS, SLOTS, 8), "key_cache of"),
        ((BOUNDS, KEYS.mT.contiguous().mT, SLOTS, SLOTS, 8), "the last stride 1"),
        ((BOUNDS, KEYS, SLOTS, SLOTS.long(), 8), "cache_slots of .*int64"),
        ((BOUNDS, KEYS, ints([0, 1]), SLOTS, 8), "key_slots of"),
        ((BOUNDS, KEYS, SLOTS, SLOTS, 12), "page_size=12 must be a power of two"),
    ],
)
def test_update_refuses(args, reason):
    with pytest.raises(ValueError, match=reason):
        ops.update_page_bounds(*args)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((QUERY[:, :3], BOUNDS, TABLES, LENGTHS, 1.0, 8, 16), "query of shape"),
        ((QUERY.mT, BOUNDS, TABLES, LENGTHS, 1.0, 8, 16), "query of shape"),
        ((QUERY, BOUNDS, TABLES.long(), LENGTHS, 1.0, 8, 16), "block_tables of .*int64"),
        ((QUERY, BOUNDS, TABLES, ints([5, 5]), 1.0, 8, 16), "context_lens of"),
        ((QUERY, BOUNDS, TABLES, LENGTHS, 1.0, 8, 12), "divide block_size=12"),
    ],
)
def test_score_refuses(args, reason):
    with pytest.raises(ValueError, match=reason):
        ops.score_pages(*args)


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        ((SCORES.half(), LENGTHS, 8, 3, 1), "scores of .*float16"),
        ((SCORES.mT, LENGTHS, 8, 3, 1), "contiguous in the last axis"),
        ((SCORES, LENGTHS, 8, 3, 3), "num_recent=3 with num_pages=3"),
        ((SCORES, LENGTHS, 8, 3, 0), "num_recent=0"),
        ((SCORES, LENGTHS, 8, 3, 1, TABLES), "without the other"),
        ((SCORES, LENGTHS, 8, 3, 1, TABLES, 12), "divide block_size=12"),
        ((SCORES, LENGTHS.long(), 8, 3, 1), "context_lens of"),
    ],
)
def test_choice_refuses(args, reason):
    with pytest.raises(ValueError, match=reason):
        ops.top_pages(*args)
