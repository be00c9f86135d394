"""Hot pages against a cache of Python dicts, over many steps of one trace."""

from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_inputs import CPU, DEVICE

from nanovllm.ops import hot_pages
from nanovllm.ops.hot_pages import HostBlocks, HotState
from nanovllm.ops.kernels import hot_pages as kernels

LAYERS, DIM = 2, 8


class Kernels:
    """The kernels as ops, on the card where there is one."""

    device = DEVICE
    place_pages = staticmethod(kernels.place_pages)

    @staticmethod
    def fetch_pages(keys, values, pages, fetch, host, page_size, block_size):
        kernels.fetch_pages(keys, values, pages, fetch, host.addresses, page_size, block_size, 4)


class Torch:
    device = CPU
    place_pages = staticmethod(hot_pages.place_pages)
    fetch_pages = staticmethod(hot_pages.fetch_pages)


class Graphs(Kernels):
    """The kernels of a step in one CUDA graph for each layer; the first step compiles them."""


class Lru:
    """The truth of one (sequence, layer, KV head): dicts of its hot slots."""

    def __init__(self, num_slots):
        self.page_of = {}
        self.used = dict.fromkeys(range(num_slots), 0)

    def place(self, pages, first_tail, clock):
        """Return {page: hot or tail slot}, and the pages among them to fetch."""
        slot_of = {page: slot for slot, page in self.page_of.items()}
        wanted = [page for page in pages if page < first_tail]
        missing = [page for page in wanted if page not in slot_of]
        busy = {slot_of[page] for page in wanted if page in slot_of}
        free = sorted(self.used.keys() - busy, key=lambda slot: (self.used[slot], slot))
        taken = sorted(free[: len(missing)])
        self.page_of |= dict(zip(taken, missing, strict=True))
        slot_of = {page: slot for slot, page in self.page_of.items()}
        self.used |= dict.fromkeys([slot_of[page] for page in wanted], clock)
        tail = {page: len(self.used) + page - first_tail for page in pages if page >= first_tail}
        return {page: slot_of[page] for page in wanted} | tail, missing


class Trace:
    """An op's device memory and host memory, and beside them what they must hold."""

    def __init__(self, ops, context_lens, heads=2, hot=5, num_pages=4, page=2, tail=2, limit=16):
        self.ops, self.contexts, self.heads = ops, list(context_lens), heads
        self.page, self.tail, self.hot, self.num_pages = page, tail, hot, num_pages
        self.seqs, self.limit = len(self.contexts), limit
        self.state = HotState.empty(self.seqs, LAYERS, heads, hot, limit, ops.device)
        self.rows = list(product(range(self.seqs), range(LAYERS), range(heads)))
        self.lru = {row: Lru(hot) for row in self.rows}
        self.wanted = self.fetched = self.clock = 0
        shape = 2, len(self.rows) * (hot + tail), page, DIM
        self.generator = torch.Generator().manual_seed(0)
        self.slots = self.random(*shape)
        self.data = self.slots.to(ops.device, copy=True)
        # All blocks there will be; those not yet written hold something else.
        self.blocks = [
            [[self.block() for _ in range(limit // tail)] for _ in self.contexts]
            for _ in range(LAYERS)
        ]
        addresses = [[[b.data_ptr() for b in seq] for seq in layer] for layer in self.blocks]
        on = {"dtype": torch.int32, "device": ops.device}
        self.inputs = SimpleNamespace(
            pages=torch.zeros(LAYERS, self.seqs, heads, num_pages, **on),
            lens=torch.zeros(self.seqs, **on),
            context_lens=torch.zeros(self.seqs, **on),
            clock=torch.zeros(1, **on),
            addresses=torch.tensor(addresses, device=ops.device),
        )
        self.graphs = {}

    def random(self, *shape):
        return torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=self.generator)

    def block(self):
        block = self.random(2, self.heads, self.page * self.tail, DIM)
        return block.pin_memory() if self.ops.device.type == "cuda" else block

    def sizes(self):
        return self.page, self.page * self.tail

    def launch(self, layer):
        x, host = self.inputs, HostBlocks(self.inputs.addresses[layer], self.blocks[layer])
        args = x.pages[layer], x.lens, x.context_lens, self.state, layer, x.clock, *self.sizes()
        tables, fetch = self.ops.place_pages(*args)
        result = self.ops.fetch_pages(*self.data, x.pages[layer], fetch, host, *self.sizes())
        assert result is None
        return tables, fetch

    def run(self, layer):
        if self.ops is not Graphs or self.clock == 1:
            return self.launch(layer)
        if layer not in self.graphs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self.graphs[layer] = graph, self.launch(layer)
        graph, outputs = self.graphs[layer]
        graph.replay()
        return outputs

    def grow(self, num_tokens):
        """Let contexts grow; a block that ends is written to host memory."""
        for seq, num in enumerate(num_tokens):
            before = self.first_tail(seq)
            self.contexts[seq] += num
            for block in range(before // self.tail, self.first_tail(seq) // self.tail):
                for layer in self.blocks:
                    layer[seq][block].copy_(self.random(*layer[seq][block].shape))

    def first_tail(self, seq):
        return (self.contexts[seq] - 1) // (self.page * self.tail) * self.tail

    def last_page(self, seq):
        return (self.contexts[seq] - 1) // self.page

    def step(self, choose, layers=range(LAYERS)):
        """Run a step in which `choose(seq, layer, head)` names the pages, and check everything."""
        self.clock += 1
        self.inputs.clock.fill_(self.clock)
        self.inputs.context_lens.copy_(torch.tensor(self.contexts))
        for layer in layers:
            chosen = {(s, h): choose(s, layer, h) for s, i, h in self.rows if i == layer}
            lens = [0] * self.seqs
            for (seq, head), pages in chosen.items():
                short = self.page - 1 if self.last_page(seq) in pages else 0
                lens[seq] = len(pages) * self.page - short
                padded = torch.zeros(self.num_pages, dtype=torch.int32)
                padded[: len(pages)] = torch.tensor(pages, dtype=torch.int32)
                self.inputs.pages[layer, seq, head] = padded.to(self.ops.device)
            self.inputs.lens.copy_(torch.tensor(lens))
            tables, fetch = self.run(layer)
            self.check(layer, chosen, tables, fetch)

    def check(self, layer, chosen, tables, fetch):
        assert tables.dtype == fetch.dtype == torch.int32
        assert tables.shape == fetch.shape == (self.seqs, self.heads, self.num_pages)
        for (seq, head), pages in chosen.items():
            first, row = self.first_tail(seq), (seq, layer, head)
            base = self.rows.index(row) * (self.hot + self.tail)
            placed, missing = self.lru[row].place(pages, first, self.clock)
            rest = self.num_pages - len(pages)
            assert tables[seq, head].tolist() == [base + placed[p] for p in pages] + [0] * rest
            truth = [base + placed[p] if p in missing else -1 for p in pages] + [-1] * rest
            assert fetch[seq, head].tolist() == truth
            self.wanted += sum(page < first for page in pages)
            self.fetched += len(missing)
            for page in missing:
                self.slots[:, base + placed[page]] = self.host_page(layer, seq, head, page)
            for page in (page for page in pages if page < first):
                slot = self.data[:, base + placed[page]].cpu()
                assert torch.equal(slot, self.host_page(layer, seq, head, page))
        assert torch.equal(self.data.cpu(), self.slots), "a slot that nothing was fetched to"
        self.check_state()

    def host_page(self, layer, seq, head, page):
        at = page % self.tail * self.page
        return self.blocks[layer][seq][page // self.tail][:, head, at : at + self.page]

    def check_state(self):
        """All layers: those that did not run are as they were."""
        for row in self.rows:
            lru = self.lru[row]
            slots = {page: slot for slot, page in lru.page_of.items()}
            assert len(slots) == len(lru.page_of), "a page in two slots"
            truth = [slots.get(page, -1) for page in range(self.limit)]
            assert self.state.slot_of_page[row].tolist() == truth
            truth = [lru.page_of.get(slot, -1) for slot in range(self.hot)]
            assert self.state.page_of_slot[row].tolist() == truth
            assert self.state.last_used[row].tolist() == list(lru.used.values())
        assert self.state.counts.tolist() == [self.wanted, self.fetched]


@pytest.fixture(params=[Torch, Kernels, pytest.param(Graphs, marks=pytest.mark.gpu)])
def ops(request):
    return request.param


def random_choice(trace, num, seed):
    """Return a `choose` of `num` pages, or all: the first, the last and any between."""
    generator = torch.Generator().manual_seed(seed)

    def choose(seq, layer, head):
        last = trace.last_page(seq)
        between = torch.randperm(max(0, last - 1), generator=generator) + 1
        ends = sorted({0, last})[-num:]
        return sorted([*ends, *between[: num - len(ends)].tolist()])

    return choose


@pytest.mark.parametrize(
    ("hot", "num_pages", "heads", "page", "tail"),
    [(5, 4, 2, 2, 2), (4, 4, 1, 1, 4), (13, 7, 3, 3, 1), (1, 1, 1, 2, 2)],
)
def test_trace(ops, hot, num_pages, heads, page, tail):
    """Contexts of two lengths grow over the ends of blocks, whose pages then are host pages."""
    limit = 8 * tail
    trace = Trace(ops, [1, 3 * page * tail], heads, hot, num_pages, page, tail, limit)
    for i in range(9):
        trace.step(random_choice(trace, num_pages, i))
        trace.grow([page * tail // 2 or 1, i % 2])
    assert trace.first_tail(0) >= 3 * tail
    assert trace.wanted > trace.fetched or hot == 1
    assert num_pages == 1 or trace.fetched > 0


@given(data=st.data())
@settings(max_examples=40)
def test_any_trace(data):
    """The torch form on sizes and lengths of any kind; a step may leave layers out."""
    heads, hot, page, tail = (data.draw(st.integers(1, n)) for n in (3, 9, 4, 4))
    num_pages = data.draw(st.integers(1, hot))
    contexts = data.draw(st.lists(st.integers(1, 6 * page * tail), min_size=1, max_size=3))
    trace = Trace(Torch, contexts, heads, hot, num_pages, page, tail, 16 * tail)
    for i in range(data.draw(st.integers(1, 8))):
        layers = data.draw(st.sampled_from([[0], [1], [0, 1]]))
        trace.step(random_choice(trace, data.draw(st.integers(1, num_pages)), i), layers)
        trace.grow([data.draw(st.integers(0, page * tail)) for _ in contexts])


def test_least_recently_used_goes_first(ops):
    """By hand, one head: which slot each page has, and which pages are thrown out."""
    trace = Trace(ops, [29], heads=1, hot=4, num_pages=4)  # the tail begins with page 14

    def step(*pages):
        trace.step(lambda *_: list(pages), [1])
        return trace.state.page_of_slot[0, 1, 0].tolist()

    assert step(3, 5) == [3, 5, -1, -1]
    assert step(7, 14) == [3, 5, 7, -1], "an empty slot before a full one"
    assert step(3, 9) == [3, 5, 7, 9]
    assert step(8) == [3, 8, 7, 9]
    assert step(3, 8) == [3, 8, 7, 9]
    assert step(1, 2, 3) == [3, 8, 1, 2], "7 before 9, and 3, in use, not at all"
    assert step(10, 11) == [10, 11, 1, 2], "8 is the oldest; 3, 1 and 2 tie: the lowest slot"
    assert step(0, 4, 6, 12) == [0, 4, 6, 12]
    assert step(14) == [0, 4, 6, 12]
    assert trace.state.counts.tolist() == [17, 13]


def test_pages_used_in_this_step_stay_whatever_the_clock(ops):
    """Where it stood still, as when a step runs again, pages of the step are not thrown out."""
    trace = Trace(ops, [29], heads=1, hot=4, num_pages=4)
    trace.step(lambda *_: [1, 2, 3, 4])
    for pages in ([1, 5, 6, 7], [1, 5, 8, 9], [2, 3, 8, 9]):
        trace.clock = 1
        trace.step(lambda *_, pages=pages: pages)


def test_sequences_that_do_not_count(ops):
    """Rows of padding: no page counts, whatever the context; the state stays as it is."""
    trace = Trace(ops, [29, 9, 29])
    for length in (0, 9):
        trace.contexts[1] = length
        trace.step(lambda seq, *_: [] if seq == 1 else [0, 4, 14])
    assert (trace.state.slot_of_page[1] == -1).all()


def test_first_sequences_of_a_state(ops):
    """A step of fewer sequences than the state has."""
    trace = Trace(ops, [29, 29])
    x, args = trace.inputs, (trace.state, 1, trace.inputs.clock, *trace.sizes())
    x.lens.fill_(4)
    x.context_lens.fill_(29)
    x.clock.fill_(1)
    tables, fetch = ops.place_pages(
        x.pages[1, :1] + torch.arange(4, dtype=torch.int32, device=ops.device),
        x.lens[:1],
        x.context_lens[:1],
        *args,
    )
    assert tables.tolist() == [[[14, 15, 0, 0], [21, 22, 0, 0]]]
    assert fetch.tolist() == [[[14, 15, -1, -1], [21, 22, -1, -1]]]
    assert (trace.state.page_of_slot >= 0).sum() == 4


def test_forgotten_pages_are_fetched_anew(ops):
    trace = Trace(ops, [29])
    trace.step(lambda *_: [0, 1])
    trace.state.forget()
    trace.lru = {row: Lru(trace.hot) for row in trace.rows}
    trace.step(lambda *_: [0, 1])
    assert trace.fetched == trace.wanted == 16


@pytest.mark.parametrize(
    ("hot", "num_pages"), [(260, 130), pytest.param(3500, 500, marks=pytest.mark.gpu)]
)
def test_many_slots(ops, hot, num_pages):
    """Numbers that are no powers of two, several warps; pages come until some must go."""
    limit = 4 * hot
    trace = Trace(ops, [limit], 1, hot, num_pages, page=1, tail=1, limit=limit)
    while trace.fetched <= hot + num_pages // 2:
        trace.step(random_choice(trace, num_pages, trace.clock), [0])


@pytest.mark.parametrize("num_programs", [2, 64])
def test_few_pages_among_many_entries(num_programs):
    """More entries than a program looks at in one go, of which a few, here and there, count."""
    seqs, heads, num_pages, page, tail = 2, 3, 500, 2, 4
    trace = Trace(Kernels, [1] * seqs, heads, 4, 4, page, tail, 32)
    pages = torch.randint(0, 32, (seqs, heads, num_pages), generator=trace.generator)
    fetch = torch.full(pages.shape, -1)
    wanted = torch.randperm(pages.numel(), generator=trace.generator)[:20]
    fetch.view(-1)[wanted] = torch.randperm(trace.slots.shape[1], generator=trace.generator)[:20]
    keys, values = trace.data
    kernels.fetch_pages(
        keys,
        values,
        *(x.int().to(DEVICE) for x in (pages, fetch)),
        trace.inputs.addresses[1],
        *trace.sizes(),
        num_programs,
    )
    for seq, head, j in (fetch >= 0).nonzero().tolist():
        slot = fetch[seq, head, j]
        trace.slots[:, slot] = trace.host_page(1, seq, head, int(pages[seq, head, j]))
    assert torch.equal(trace.data.cpu(), trace.slots)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_pages_of_every_dtype(ops, dtype):
    """Pages of 3 x 24 numbers: 2 in each block; bits of every kind pass, NaN too."""
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    info, generator = torch.iinfo(bits), torch.Generator().manual_seed(0)
    block = torch.randint(info.min, info.max, (2, 2, 6, 24), dtype=bits, generator=generator)
    block = block.pin_memory() if ops.device.type == "cuda" else block
    host = HostBlocks(
        torch.tensor([[0, block.data_ptr()]], device=ops.device), [[None, block.view(dtype)]]
    )
    keys, values = torch.zeros(2, 3, 3, 24, dtype=dtype, device=ops.device)
    pages = torch.tensor([[[2, 3], [3, 0]]], dtype=torch.int32, device=ops.device)
    fetch = torch.tensor([[[-1, 2], [0, -1]]], dtype=torch.int32, device=ops.device)
    ops.fetch_pages(keys, values, pages, fetch, host, 3, 6)
    for ours, theirs in ((keys, block[0]), (values, block[1])):
        truth = torch.stack([theirs[1, 3:], torch.zeros_like(theirs[1, 3:]), theirs[0, 3:]])
        assert torch.equal(ours.view(bits).cpu(), truth)


def place_args(**changes):
    args = {
        "pages": torch.zeros(2, 2, 4, dtype=torch.int32),
        "lens": torch.zeros(2, dtype=torch.int32),
        "context_lens": torch.zeros(2, dtype=torch.int32),
        "state": HotState.empty(2, LAYERS, 2, 4, 16, CPU),
        "layer_id": 0,
        "clock": torch.ones(1, dtype=torch.int32),
        "page_size": 2,
        "block_size": 4,
    }
    return args | changes


STATE = place_args()["state"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pages": torch.zeros(2, 2, 4)}, r"pages of shape .*float32.*int32 \[2, 2, 4\]"),
        ({"pages": torch.zeros(2, 3, 4).int()}, r"needed is int32 \[2, 2, 4\]"),
        ({"pages": torch.zeros(2, 4, 2).int().mT}, "contiguous"),
        ({"pages": torch.zeros(2, 2, 5).int()}, "5 pages .* 4 hot slots"),
        ({"lens": torch.zeros(3).int()}, r"lens of shape \[3\]"),
        ({"context_lens": torch.zeros(2).long()}, "context_lens of .*int64"),
        ({"clock": torch.ones(()).int()}, r"clock of shape \[\]"),
        ({"layer_id": 2}, "layer 2; .* 2 layers"),
        ({"block_size": 5}, "blocks of 5 tokens .* pages of 2"),
        ({"state": replace(STATE, last_used=torch.zeros(2, 2, 2, 5).int())}, "last_used of shape"),
        ({"state": replace(STATE, page_of_slot=torch.zeros(1, 2, 2, 4).int())}, "page_of_slot of"),
        ({"state": HotState.empty(1, 2, 2, 4, 16, CPU)}, "2 sequences, .* has 1 sequences"),
    ],
)
def test_place_refuses(changes, reason):
    hot_pages.place_pages(**place_args())
    with pytest.raises(ValueError, match=reason):
        hot_pages.place_pages(**place_args(**changes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"keys": torch.zeros(3, 2, 8)[:, :, ::2]}, "keys of shape .*contiguous"),
        ({"values": torch.zeros(4, 2, 4)}, r"values of shape \[4, 2, 4\]"),
        ({"values": torch.zeros(3, 2, 4).half()}, "float16 .* alike"),
        ({"page_size": 1}, r"needed is \[num_slots, 1, head_dim\]"),
        ({"keys": torch.zeros(3, 2, 3), "values": torch.zeros(3, 2, 3)}, "page of 24 bytes"),
        ({"fetch": torch.zeros(2, 2, 3).int()}, r"pages of shape \[2, 2, 4\]"),
        ({"fetch": torch.zeros(2, 2, 4)}, "fetch of shape .*float32"),
        ({"host": HostBlocks(torch.zeros(1, 1).long(), [])}, r"needed is int64 \[2, max_blocks\]"),
        ({"host": HostBlocks(torch.zeros(2, 1).int(), [])}, "addresses of .*int32"),
    ],
)
def test_fetch_refuses(changes, reason):
    args = {
        "keys": torch.zeros(3, 2, 4),
        "values": torch.zeros(3, 2, 4),
        "pages": torch.zeros(2, 2, 4).int(),
        "fetch": torch.full((2, 2, 4), -1).int(),
        "host": HostBlocks(torch.zeros(2, 1).long(), [[], []]),
        "page_size": 2,
        "block_size": 4,
    }
    hot_pages.fetch_pages(**args)
    with pytest.raises(ValueError, match=reason):
        hot_pages.fetch_pages(**args | changes)
