"""The choice among pages and attention to them, against loops."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_inputs import CPU, DEVICE, INF, KERNEL_DTYPES, NAN, randn, truth_of
from page_inputs import (
    BLOCK_SIZE,
    ESTIMATORS,
    GARBAGE,
    PAGE_SIZE,
    Cache,
    Pages,
    choose,
    ints,
)
from tolerances import assert_close

from nanovllm.ops import page_index
from nanovllm.ops import pages as ops
from nanovllm.ops.kernels import page_index as index_kernels
from nanovllm.ops.kernels import pages as kernels
from nanovllm.ops.kernels.paged_decode import paged_decode_attention
from nanovllm.ops.page_index import PageIndex

IMPLEMENTATIONS = {"torch": (ops, CPU), "kernel": (kernels, DEVICE)}
SCORING = {ops: page_index, kernels: index_kernels}
every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request):
    return IMPLEMENTATIONS[request.param]


def modules_of(implementation):
    return SCORING[implementation[0]], implementation[0]


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
    scores = pages.score((page_index, CPU))
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


@every_estimator
@pytest.mark.parametrize("sign", [1, -1])
def test_planted_key_is_found_in_every_page(implementation, sign, estimator):
    """By one of two query heads; not by the opposite query, save where a page is always kept."""
    _, device = implementation
    num_pages = 8
    # One sequence for each page that the key may be in, in a block of its own; one page is short.
    keys = 0.1 * randn(num_pages, num_pages * PAGE_SIZE, 1, 64, device=CPU)
    query = randn(1, 2, 64, seed=2, device=CPU)
    for page in range(num_pages):
        keys[page, page * PAGE_SIZE + 3 * page % 5, 0] = sign * query[0, 1]
    query[0, 0] /= 100
    cache = Cache(num_pages**2 * PAGE_SIZE // BLOCK_SIZE, 1, 64)
    slots = [s for s in range(num_pages**2 * PAGE_SIZE) if s % 64 < 61]
    cache.store(page_index, keys.flatten(0, 1)[slots], slots)
    index = PageIndex(*(x.to(device) for x in cache.index))
    if estimator == "bounds":
        index = PageIndex(index.bounds)
    tables = torch.arange(num_pages**2 // 2, dtype=torch.int32).view(num_pages, -1)
    for turned in (1, -1):
        queries, lengths = (turned * query).expand(num_pages, -1, -1), ints([61] * num_pages)
        inputs = (x.to(device) for x in (tables, lengths))
        chosen, lens = choose(modules_of(implementation), queries.to(device), index, *inputs, 3)
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
    cache.store(page_index, randn(num_tokens, 1, 64, device=CPU), slots[:num_tokens])
    return cache, randn(*cache.keys.shape, seed=1, device=device), ints([blocks], device), slots


def attend(query, cache, values, pages, lens):
    caches = (x.view(-1, PAGE_SIZE, *x.shape[2:]) for x in (cache.keys, values))
    return ops.page_attention(query, *caches, pages, lens, query.shape[2] ** -0.5)


def test_budget_of_the_whole_context_is_dense_attention(implementation):
    _, device = implementation
    cache, values, table, slots = make_context(91, device)
    query = randn(1, 4, 64, seed=2, device=device)
    pages, lens = choose(
        modules_of(implementation), query, cache.index, table, ints([91], device), 12
    )
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
        page_index.update_page_index(cache.index, cache.keys, slot, slot, PAGE_SIZE)
        pages, lens = choose((page_index, ops), query, cache.index, table, length, 3)
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

LENGTHS, TABLES, SCORES = ints([5]), ints([[0, 1]]), torch.zeros(1, 2, 2, 4)


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
