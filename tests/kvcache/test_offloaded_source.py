"""Attention over a cache in host memory: selected blocks, wherever they lie, and nothing else."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offload_inputs import NUM_BLOCKS, checked_device, chunk_of, make_engine, store
from tolerances import assert_close

from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.recent import RecentKV
from nanovllm.kvcache.source import OffloadedSource
from nanovllm.kvcache.sparse.full import FullAttentionPolicy
from nanovllm.kvcache.sparse.policy import PolicyContext, SparsePolicy
from nanovllm.ops import reference
from nanovllm.ops.backends import resolve_backend

BLOCK, NUM_LAYERS = 16, 2
HEADS, KV_HEADS, DIM = 4, 2, 32
LAYOUT = KVLayout(NUM_LAYERS, BLOCK, KV_HEADS, DIM, torch.float32)
TABLES = {"following": list(range(5, 15)), "scattered": [7, 3, 28, 12, 4, 29, 0, 21, 22, 9]}
every_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


class Chosen(SparsePolicy):
    """Attends to the history blocks at given places of the block table."""

    supports_prefill = True
    supports_decode = False

    def __init__(self, places):
        self.places = places

    def select_blocks(self, available_blocks, source, ctx):
        self.offered = list(available_blocks)
        return [block for i, block in enumerate(available_blocks) if i in self.places]


@pytest.fixture
def device():
    with checked_device() as device:
        yield device


class Prompt:
    """A sequence whose tokens reach an engine in chunks; all memory is poison before.

    Args:
        device: where.
        table: its blocks.
        steps: for each step of the engine the lengths of its chunks, which it computes layer-major.
            All tokens of a step are on the device in it, and what came before in host memory.
        together: whether the buffer has places for what is in host memory.
    """

    def __init__(self, device, table, steps, num_slots=4, together=False):
        self.engine = make_engine(device, num_slots, layout=LAYOUT)
        self.table = table
        num_tokens = sum(map(sum, steps))
        generator = torch.Generator().manual_seed(0)
        # [num_layers, K and V, num_tokens, num_kv_heads, head_dim]
        shape = (NUM_LAYERS, 2, num_tokens, KV_HEADS, DIM)
        self.tokens = torch.randn(shape, generator=generator)
        self.queries = torch.randn(NUM_LAYERS, num_tokens, HEADS, DIM, generator=generator)
        self.steps = []
        start = 0
        for lengths in steps:
            device_start = start // BLOCK * BLOCK
            chunks = []
            for i, length in enumerate(lengths):
                first, last = i == 0, i == len(lengths) - 1
                chunks.append(
                    chunk_of(
                        table,
                        start,
                        length,
                        device_start,
                        last,
                        BLOCK,
                        0 if together else device_start,
                        first,
                    )
                )
                start += length
            self.steps.append(chunks)

    def run(self, use):
        """Store all chunks in the order of the steps and `use(layer_id, chunk)` each."""
        for chunks in self.steps:
            self.engine.begin_step(0, chunks[-1].num_buffer_tokens)
            if chunks[-1].num_buffer_tokens > BLOCK:
                # Of what a step before has left in the buffer nothing may be used.
                self.engine.recent._buffer.fill_(float("nan"))
            for layer_id in range(NUM_LAYERS):
                for chunk in chunks:
                    tokens = slice(chunk.num_history_tokens, chunk.context_len)
                    store(self.engine, layer_id, chunk, self.tokens[layer_id][:, tokens])
                    use(layer_id, chunk)

    def source(self, layer_id, chunk, next_layer=None):
        return OffloadedSource(self.engine, layer_id, next_layer, chunk)

    def context(self, layer_id, chunk):
        return PolicyContext(
            layer_id=layer_id,
            query=self.queries[layer_id, chunk.num_history_tokens : chunk.context_len],
            num_history_tokens=chunk.num_history_tokens,
            block_size=BLOCK,
            softmax_scale=DIM**-0.5,
            backend=resolve_backend("torch", torch.device("cpu"), torch.float32, DIM),
        )

    def attend(self, policy, layer_id, chunk, next_layer=None):
        source = self.source(layer_id, chunk, next_layer)
        return policy.compute_chunked_prefill(source, self.context(layer_id, chunk))

    def truth(self, layer_id, chunk, dropped=()):
        """Return dense causal attention over all tokens but those of the dropped blocks."""
        kept = [i for i in range(chunk.context_len) if i // BLOCK not in dropped]
        ctx = self.context(layer_id, chunk)
        keys, values = self.tokens[layer_id][:, kept].double()
        out, _ = reference.attention_with_lse(
            ctx.query[None].double(), keys[None], values[None], ctx.softmax_scale, True
        )
        return out[0]


STEPS = {
    "one chunk": [[75]],
    "layer-major": [[40, 16, 19, 33]],
    "chunk-major": [[40], [16], [19], [33]],
    "both": [[21, 20], [5], [50, 13], [1], [1], [16]],
    "short chunks": [[5], [5], [5, 5, 5], [5], [2], [5, 4]],
    "whole blocks": [[32], [16], [16, 48]],
}
every_step = pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)


@every_table
@every_step
@pytest.mark.parametrize("num_slots", [2, 5])
def test_full_attention(device, table, steps, num_slots):
    prompt = Prompt(device, table, steps, num_slots)
    prompt.run(
        lambda layer_id, chunk: assert_close(
            prompt.attend(FullAttentionPolicy(), layer_id, chunk, 1 - layer_id),
            prompt.truth(layer_id, chunk),
        )
    )


@every_table
@every_step
@pytest.mark.parametrize("places", [set(), {0}, {1, 3}, {0, 2, 4}, {3, 4, 5}], ids=str)
def test_selected_blocks_and_what_comes_after_them_are_all_that_counts(
    device, table, steps, places
):
    """Some of the blocks are in host memory and some, where a step has several chunks, at hand."""
    prompt = Prompt(device, table, steps)

    def check(layer_id, chunk):
        policy = Chosen(places)
        out = prompt.attend(policy, layer_id, chunk, 1 - layer_id)
        num_full = chunk.num_history_tokens // BLOCK
        assert policy.offered == table[:num_full]
        dropped = set(range(num_full)) - places
        assert_close(out, prompt.truth(layer_id, chunk, dropped))
        if dropped:
            with pytest.raises(AssertionError):  # control: the dropped blocks would show
                assert_close(out, prompt.truth(layer_id, chunk))

    prompt.run(check)


@every_table
@pytest.mark.parametrize("places", [set(), {1}, {0, 3}, {1, 2, 3, 4}], ids=str)
def test_pieces(device, table, places):
    """Three blocks are in host memory, two at hand, and a part of one, which is not offered."""
    prompt = Prompt(device, table, [[50], [40, 8]])
    seen = []

    def check(layer_id, chunk):
        if chunk is not prompt.steps[1][1]:
            return
        source = prompt.source(layer_id, chunk)
        selected = [table[place] for place in sorted(places)]
        before = self_bytes(prompt.engine)
        pieces = [(torch.stack([k, v]), own) for k, v, own in source.pieces(selected)]
        num_loaded = len(places & {0, 1, 2})
        loaded = (self_bytes(prompt.engine) - before) // LAYOUT.layer_block_bytes
        assert loaded == num_loaded  # no block that is at hand
        assert [own for _, own in pieces] == [False] * -(-num_loaded // 2) + [True]
        kept = [i for i in range(98) if i // BLOCK in places or i // BLOCK >= 5]
        assert torch.equal(torch.cat([t for t, _ in pieces], 1), prompt.tokens[layer_id][:, kept])
        assert source.available_blocks == table[:5]
        seen.append(layer_id)

    prompt.run(check)
    assert seen == [0, 1]


def self_bytes(engine):
    traffic = engine.stats.summary()["prefill"]["h2d"]
    return traffic["key_bytes"] + traffic["value_bytes"]


@pytest.mark.parametrize("guess", [True, False])
def test_the_next_layers_blocks_are_begun_ahead(device, guess):
    prompt = Prompt(device, TABLES["scattered"], [[64], [5]], num_slots=8)

    def check(layer_id, chunk):
        if chunk.host_blocks and layer_id == 0:
            list(prompt.source(0, chunk, 1 if guess else None).pieces(chunk.host_blocks[1:]))
            num_blocks = self_bytes(prompt.engine) // LAYOUT.layer_block_bytes
            assert num_blocks == (6 if guess else 3)

    prompt.run(check)


def test_reading_twice_gives_the_same(device):
    """A policy that looks at all keys before it selects."""
    prompt = Prompt(device, TABLES["scattered"], [[70], [20, 30]])

    class Looks(FullAttentionPolicy):
        def select_blocks(self, available_blocks, source, ctx):
            self.keys = torch.cat([piece.keys.clone() for piece in source.pieces(available_blocks)])
            return available_blocks

    def check(layer_id, chunk):
        policy = Looks()
        out = prompt.attend(policy, layer_id, chunk, 1 - layer_id)
        assert torch.equal(policy.keys, prompt.tokens[layer_id, 0, : chunk.context_len])
        assert_close(out, prompt.truth(layer_id, chunk))

    prompt.run(check)


@every_step
@pytest.mark.parametrize(("num_slots", "guess"), [(2, False), (5, False), (5, True)])
@pytest.mark.parametrize("places", [{1, 3}, {0, 2, 4}], ids=str)
def test_keys_come_together_and_values_of_selected_blocks(device, steps, num_slots, guess, places):
    table = TABLES["scattered"]
    prompt = Prompt(device, table, steps, num_slots, together=True)

    def check(layer_id, chunk):
        next_layer = 1 - layer_id if chunk.is_last else layer_id
        source = prompt.source(layer_id, chunk, next_layer if guess else None)
        num_host = len(chunk.host_blocks)
        assert source.loads_blocks == (num_host > 0)
        expected = prompt.tokens[layer_id][:, : chunk.context_len]
        assert torch.equal(source.keys(), expected[0])
        selected = [table[i] for i in sorted(places) if i < len(source.available_blocks)]
        keys, values = source.load(selected)
        assert torch.equal(keys, expected[0])
        blocks = [i // BLOCK for i in range(chunk.context_len)]
        kept = [i for i, block in enumerate(blocks) if block in places or block >= num_host]
        assert torch.equal(values[kept], expected[1][kept])

    prompt.run(check)
    # The keys of a layer cross the bus once a step, however many chunks want them.
    num_host = [len(chunks[0].host_blocks) for chunks in prompt.steps]
    num_selected = sum(len([i for i in places if i < count]) for count in num_host)
    part_bytes = NUM_LAYERS * LAYOUT.layer_block_bytes // 2
    key_bytes, value_bytes = traffic_of(prompt.engine)
    assert value_bytes == num_selected * part_bytes
    if guess:  # wrong ones cost time
        assert key_bytes >= sum(num_host) * part_bytes
    else:
        assert key_bytes == sum(num_host) * part_bytes


def test_keys_take_what_was_begun_for_dense_attention(device):
    """A layer that attends densely begins whole blocks for the next, which may want keys alone."""
    prompt = Prompt(device, TABLES["scattered"], [[64], [20]], num_slots=8, together=True)
    seen = []

    def check(layer_id, chunk):
        if not chunk.host_blocks:
            return
        source = prompt.source(layer_id, chunk, 1 if layer_id == 0 else None)
        if layer_id == 0:
            list(source.pieces(chunk.host_blocks))
            seen.append(traffic_of(prompt.engine)[0])
        else:
            assert torch.equal(source.keys(), prompt.tokens[1][0])
            assert traffic_of(prompt.engine)[0] == seen[0]
            keys, values = source.load(chunk.host_blocks)
            assert torch.equal(torch.stack([keys, values]), prompt.tokens[1])
            seen.append(True)

    prompt.run(check)
    assert seen[1:] == [True]


def traffic_of(engine):
    traffic = engine.stats.summary()["prefill"]["h2d"]
    return traffic["key_bytes"], traffic["value_bytes"]


def test_a_buffer_without_places_for_host_blocks_is_refused(device):
    prompt = Prompt(device, TABLES["scattered"], [[64], [5]])

    def check(layer_id, chunk):
        if chunk.host_blocks:
            with pytest.raises(ValueError, match="no place"):
                prompt.source(layer_id, chunk).load([])

    prompt.run(check)


LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@settings(max_examples=60)
@given(steps=st.lists(LENGTHS, min_size=1, max_size=5))
def test_the_device_holds_the_newest_tokens(steps):
    """Whatever the lengths of chunks, in one step or in several."""
    while sum(map(sum, steps)) > NUM_BLOCKS * BLOCK:
        steps = steps[:-1]
    with checked_device() as device:
        prompt = Prompt(device, list(range(NUM_BLOCKS)), steps)

        def check(layer_id, chunk):
            keys, values = prompt.engine.get_prefill_buffer_slice(layer_id, chunk.num_device_tokens)
            tokens = prompt.tokens[layer_id][:, chunk.device_start : chunk.context_len]
            assert torch.equal(torch.stack([keys, values]), tokens)

        prompt.run(check)
        num_tokens = sum(map(sum, steps))
        for layer_id in range(NUM_LAYERS):
            for block_id in range(num_tokens // BLOCK):
                block = prompt.engine.read_host_block(layer_id, block_id).transpose(1, 2)
                rows = slice(block_id * BLOCK, (block_id + 1) * BLOCK)
                assert torch.equal(block, prompt.tokens[layer_id][:, rows])


def test_short_chunks_stay_in_the_tail_block(device):
    """The prefill buffer is not touched, and not even there."""
    prompt = Prompt(device, TABLES["following"], [[5], [11], [16], [3, 4, 9], [1]])
    prompt.run(lambda layer_id, chunk: chunk.in_tail or pytest.fail("not in the tail"))
    assert prompt.engine.recent._buffer.numel() == 0


def test_tails_of_layers_are_apart_and_the_buffer_is_shared(device):
    recent = RecentKV(device, LAYOUT)
    recent.reserve(40)
    tails = {recent.storage(layer_id, BLOCK).keys.data_ptr() for layer_id in range(NUM_LAYERS)}
    buffers = {recent.storage(layer_id, BLOCK + 1).keys.data_ptr() for layer_id in (0, 1)}
    assert len(tails) == NUM_LAYERS
    assert len(buffers) == 1
    assert not tails & buffers
    assert recent.storage(1, 40).keys.shape == (3, BLOCK, KV_HEADS, DIM)


def test_the_buffer_grows_only_when_it_must(device):
    recent = RecentKV(device, LAYOUT)
    block = LAYOUT.layer_block_bytes
    tails = NUM_LAYERS * block
    assert recent.num_bytes == tails
    for num_tokens, num_blocks in [(1, 0), (16, 0), (17, 2), (33, 3), (20, 3), (48, 3), (49, 4)]:
        recent.reserve(num_tokens)
        assert recent.num_bytes == tails + num_blocks * block


def test_a_middle_chunk_leaves_the_tail_alone(device):
    """Only what a step's last chunk leaves of a block is kept for the next step."""
    engine = make_engine(device, layout=LAYOUT)
    engine.recent.reserve(64)
    tokens = torch.randn(2, 40, KV_HEADS, DIM)
    for is_last in (False, True):
        store(engine, 0, chunk_of([0, 1, 2], 0, 40, 0, is_last, BLOCK), tokens)
        tail = torch.stack(engine.recent.storage(0, 8).read(slice(0, 8)))
        assert torch.equal(tail, tokens[:, 32:]) == is_last
