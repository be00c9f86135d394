"""The ring of slots and the way to the host: right data in the right order, in few copies.

Everything runs on streams that copy as late as they may, under the order checker.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offload_inputs import (
    BLOCK,
    DIM,
    KV_HEADS,
    LAYOUT,
    NUM_BLOCKS,
    NUM_LAYERS,
    checked_device,
    chunk_of,
    load,
    make_engine,
    store,
    tokens_of,
    write,
)

RINGS = [2, 3, 4, 5, 8]
ADJACENT = list(range(6, 14))  # one piece of the pool
SCATTERED = [9, 2, 21, 3, 17, 6, 5, 25, 24]
every_ring = pytest.mark.parametrize("num_slots", RINGS)


@pytest.fixture
def device():
    with checked_device() as device:
        yield device


@pytest.fixture
def full_engine(device):
    """Return a function that makes an engine whose host pool is full."""

    def make(num_slots=4):
        engine = make_engine(device, num_slots)
        for layer_id in range(NUM_LAYERS):
            for first in range(0, NUM_BLOCKS, 10):
                write(engine, layer_id, range(first, first + 10))
        engine.stats.reset()
        return engine

    return make


def num_copies(engine, direction="h2d", phase="prefill"):
    return engine.stats.summary()[phase][direction]["num_copies"]


def bytes_of(engine, direction="h2d", phase="prefill"):
    traffic = engine.stats.summary()[phase][direction]
    return traffic["key_bytes"], traffic["value_bytes"]


@every_ring
@pytest.mark.parametrize(
    "block_ids", [[], [7], ADJACENT, SCATTERED, list(range(NUM_BLOCKS))], ids=str
)
def test_exactly_the_blocks_asked_for_in_their_order(full_engine, num_slots, block_ids):
    engine = full_engine(num_slots)
    for layer_id in (0, 2):
        assert torch.equal(load(engine, layer_id, block_ids), tokens_of(layer_id, block_ids))


@every_ring
def test_pieces_are_half_a_ring(full_engine, num_slots):
    lengths = [len(keys) for keys, _ in full_engine(num_slots).load_blocks(1, SCATTERED)]
    half = num_slots // 2
    num_full, rest = divmod(len(SCATTERED), half)
    assert lengths == [half * BLOCK] * num_full + [rest * BLOCK] * (rest > 0)


@every_ring
def test_a_piece_is_good_until_the_next_is_asked_for(full_engine, num_slots):
    """Though the slots that it came from are loaded anew, and poisoned, before it is yielded."""
    engine = full_engine(num_slots)
    start = 0
    for keys, values in engine.load_blocks(1, SCATTERED, ahead=(2, SCATTERED)):
        stop = start + len(keys) // BLOCK
        expected = tokens_of(1, SCATTERED[start:stop])
        assert torch.equal(keys, expected[0])
        assert torch.equal(values, expected[1])
        start = stop
    assert start == len(SCATTERED)


@every_ring
@pytest.mark.parametrize("block_ids", [[7], ADJACENT, SCATTERED], ids=str)
def test_right_predictions_load_each_block_once(full_engine, num_slots, block_ids):
    engine = full_engine(num_slots)
    for layer_id in range(NUM_LAYERS):
        ahead = (layer_id + 1, block_ids) if layer_id + 1 < NUM_LAYERS else None
        assert torch.equal(load(engine, layer_id, block_ids, ahead), tokens_of(layer_id, block_ids))
    size = NUM_LAYERS * len(block_ids) * LAYOUT.layer_block_bytes // 2
    assert bytes_of(engine) == (size, size)


@every_ring
def test_a_right_prediction_has_begun_before_it_is_asked_for(full_engine, num_slots):
    engine = full_engine(num_slots)
    load(engine, 0, SCATTERED, ahead=(1, SCATTERED))
    before = bytes_of(engine)[0]
    begun = before - len(SCATTERED) * LAYOUT.layer_block_bytes // 2
    assert begun == min(num_slots, len(SCATTERED)) * LAYOUT.layer_block_bytes // 2
    next(engine.load_blocks(1, SCATTERED[: engine.piece_blocks]))
    assert bytes_of(engine)[0] == before


@every_ring
def test_a_prediction_that_is_right_at_first_keeps_what_is_right(full_engine, num_slots):
    engine = full_engine(num_slots)
    load(engine, 0, [4], ahead=(1, [8, 15, 16, 23]))
    assert torch.equal(load(engine, 1, [8, 15, 3, 9]), tokens_of(1, [8, 15, 3, 9]))
    wasted = min(2, num_slots - 2)
    size = (1 + 4 + wasted) * LAYOUT.layer_block_bytes // 2
    assert bytes_of(engine) == (size, size)


@every_ring
@pytest.mark.parametrize(
    "wrong", [(1, [3, 4]), (2, SCATTERED), (1, SCATTERED[1:]), (1, [])], ids=str
)
def test_wrong_predictions_do_no_harm(full_engine, num_slots, wrong):
    engine = full_engine(num_slots)
    load(engine, 0, [0, 1], ahead=wrong)
    assert torch.equal(load(engine, 1, SCATTERED), tokens_of(1, SCATTERED))


@every_ring
def test_a_block_may_be_asked_for_twice(full_engine, num_slots):
    engine = full_engine(num_slots)
    assert torch.equal(load(engine, 1, [5, 5, 6, 5]), tokens_of(1, [5, 5, 6, 5]))


def test_adjacent_blocks_go_in_one_copy(full_engine):
    """As far as half a ring of 8, and a piece of the pool, blocks 0 to 13, reach."""
    engine = full_engine(8)
    load(engine, 0, ADJACENT)
    assert num_copies(engine) == 2
    engine.stats.reset()
    load(engine, 0, [12, 13, 14, 15])  # the border of a piece
    assert num_copies(engine) == 2
    engine.stats.reset()
    load(engine, 0, [6, 8, 10, 12])
    assert num_copies(engine) == 4


@every_ring
def test_a_generator_that_is_left_half_way(full_engine, num_slots):
    engine = full_engine(num_slots)
    pieces = engine.load_blocks(0, SCATTERED, ahead=(1, SCATTERED))
    next(pieces)
    next(pieces)
    pieces.close()
    assert torch.equal(load(engine, 1, SCATTERED), tokens_of(1, SCATTERED))
    assert torch.equal(load(engine, 0, SCATTERED), tokens_of(0, SCATTERED))


@every_ring
def test_generators_may_take_turns(full_engine, num_slots):
    engine = full_engine(num_slots)
    wishes = [(0, SCATTERED), (2, ADJACENT)]
    generators = [engine.load_blocks(*wish) for wish in wishes]
    loaded = [[], []]
    for _ in range(max(map(len, (SCATTERED, ADJACENT)))):
        for pieces, generator in zip(loaded, generators, strict=True):
            pieces += [torch.stack(piece) for piece in [next(generator, None)] if piece]
    for wish, pieces in zip(wishes, loaded, strict=True):
        assert torch.equal(torch.cat(pieces, 1), tokens_of(*wish))


# Single slots.


def use_slot(engine, slot, layer_id, block_id):
    engine.load_to_slot_layer(slot, layer_id, block_id)
    engine.wait_slot_layer(slot)
    tokens = torch.stack(engine.get_kv_for_slot(slot))[:, 0]
    engine.record_slot_compute_done(slot)
    return tokens


@every_ring
def test_single_slots(full_engine, num_slots):
    engine = full_engine(num_slots)
    for i, block_id in enumerate(SCATTERED):
        assert torch.equal(use_slot(engine, i % num_slots, 2, block_id), tokens_of(2, [block_id]))


def test_views_of_a_slot(full_engine):
    engine = full_engine()
    engine.load_to_slot_layer(3, 1, 8)
    engine.wait_slot_layer(3)
    keys, values = engine.get_kv_for_slot(3)
    assert keys.shape == values.shape == (1, BLOCK, KV_HEADS, DIM)
    assert torch.equal(engine.get_k_for_slot(3), keys)
    assert keys.data_ptr() == engine._slots[3, 0].data_ptr()
    assert torch.equal(torch.cat([keys, values]), tokens_of(1, [8]))


def test_slots_load_beside_each_other(full_engine):
    engine = full_engine()
    for slot in range(4):
        engine.load_to_slot_layer(slot, 0, SCATTERED[slot])
    for slot in (2, 0, 3, 1):
        engine.wait_slot_layer(slot)
        tokens = torch.stack(engine.get_kv_for_slot(slot))[:, 0]
        assert torch.equal(tokens, tokens_of(0, [SCATTERED[slot]]))


def test_keys_alone(full_engine):
    """The values are not loaded: they are undefined, here poison."""
    engine = full_engine()
    engine.load_k_only_to_slot_layer(0, 1, 8)
    engine.wait_slot_layer(0)
    assert torch.equal(engine.get_k_for_slot(0)[0], tokens_of(1, [8])[0])
    assert engine.get_kv_for_slot(0)[1].isnan().all()
    assert bytes_of(engine) == (LAYOUT.layer_block_bytes // 2, 0)
    assert num_copies(engine) == 1


@every_ring
def test_single_slots_between_loads(full_engine, num_slots):
    engine = full_engine(num_slots)
    start = 0
    for piece in engine.load_blocks(0, SCATTERED):
        stop = start + len(piece[0]) // BLOCK
        for slot in range(num_slots):
            assert torch.equal(use_slot(engine, slot, 1, 20 + slot), tokens_of(1, [20 + slot]))
        assert torch.equal(torch.stack(piece), tokens_of(0, SCATTERED[start:stop]))
        start = stop
    assert start == len(SCATTERED)


# Whatever comes in whatever order.

LAYERS = st.integers(0, NUM_LAYERS - 1)
BLOCKS = st.integers(0, 7)
SOME_BLOCKS = st.one_of(
    st.lists(BLOCKS, max_size=7),
    st.builds(lambda first, n: list(range(first, min(8, first + n))), BLOCKS, st.integers(1, 8)),
)
DISTINCT_BLOCKS = st.lists(BLOCKS, min_size=1, max_size=5, unique=True)
CALLS = st.one_of(
    st.tuples(st.just("load"), LAYERS, SOME_BLOCKS, st.none() | st.integers(0, 3)),
    st.tuples(st.just("advance"), st.integers(0, 5)),
    st.tuples(st.just("write"), LAYERS, DISTINCT_BLOCKS),
    st.tuples(st.just("slot"), st.integers(0, 1), LAYERS, BLOCKS),
    st.tuples(st.just("read"), LAYERS, BLOCKS),
    st.tuples(st.just("drop")),
)


class Calls:
    """Makes calls in any order and compares what comes with what was written last."""

    def __init__(self, device, num_slots, num_staging):
        self.engine = make_engine(device, num_slots, num_staging)
        self.versions = {}
        self.open = []
        for layer_id in range(NUM_LAYERS):
            self.write(layer_id, range(8))

    def write(self, layer_id, block_ids):
        for block_id in block_ids:
            key = (layer_id, block_id)
            self.versions[key] = self.versions.get(key, -1) + 1
        chunk = chunk_of(block_ids, 0, len(block_ids) * BLOCK)
        self.engine.recent.reserve(chunk.num_tokens)
        store(self.engine, layer_id, chunk, self.newest(layer_id, block_ids))

    def newest(self, layer_id, block_ids):
        blocks = [tokens_of(layer_id, [i], self.versions[layer_id, i]) for i in block_ids]
        return torch.cat([tokens_of(layer_id, []), *blocks], 1)

    def load(self, layer_id, block_ids, ahead, num_pieces):
        self.open.append((self.engine.load_blocks(layer_id, block_ids, ahead), layer_id, block_ids))
        self.advance(len(self.open) - 1, num_pieces)

    def advance(self, place, num_pieces=1):
        """Ask a generator for that many pieces; None means all."""
        generator, layer_id, rest = self.open[place]
        while num_pieces is None or num_pieces > 0:
            piece = next(generator, None)
            if piece is None:
                assert not rest
                del self.open[place]
                return
            count = len(piece[0]) // BLOCK
            assert count == min(len(rest), self.engine.piece_blocks)
            assert torch.equal(torch.stack(piece), self.newest(layer_id, rest[:count]))
            rest = rest[count:]
            num_pieces = None if num_pieces is None else num_pieces - 1
        self.open[place] = (generator, layer_id, rest)

    def read(self, layer_id, block_id):
        block = self.engine.read_host_block(layer_id, block_id).transpose(1, 2)
        assert torch.equal(block, self.newest(layer_id, [block_id]))

    def slot(self, slot, layer_id, block_id):
        tokens = use_slot(self.engine, slot, layer_id, block_id)
        assert torch.equal(tokens, self.newest(layer_id, [block_id]))


@settings(max_examples=200)
@given(
    num_slots=st.sampled_from(RINGS),
    num_staging=st.integers(1, 5),
    calls=st.lists(
        st.tuples(CALLS, st.none() | st.tuples(LAYERS, SOME_BLOCKS)), min_size=6, max_size=30
    ),
)
def test_any_calls_in_any_order(num_slots, num_staging, calls):
    """A load is told either the next load, as a good prediction, or anything."""
    loads = [call[1:3] for call, _ in calls if call[0] == "load"][1:]
    with checked_device() as device:
        state = Calls(device, num_slots, num_staging)
        for (name, *arguments), guess in calls:
            match name:
                case "load":
                    layer_id, block_ids, num_pieces = arguments
                    following = loads.pop(0) if loads else None
                    state.load(layer_id, block_ids, guess or following, num_pieces)
                case "advance":
                    if state.open:
                        state.advance(arguments[0] % len(state.open))
                case "write":
                    state.write(*arguments)
                case "slot":
                    state.slot(*arguments)
                case "read":
                    state.read(*arguments)
                case "drop":
                    state.engine.drop_loads()
        while state.open:
            state.advance(0, None)
        state.engine.close()


# To the host.


@pytest.mark.parametrize("num_staging", [1, 2, 3, 5])
@pytest.mark.parametrize("block_ids", [[7], ADJACENT, SCATTERED, list(range(NUM_BLOCKS))], ids=str)
def test_blocks_come_back_as_they_were_written(device, num_staging, block_ids):
    engine = make_engine(device, num_staging=num_staging)
    for version in range(2):
        for layer_id in range(NUM_LAYERS):
            write(engine, layer_id, block_ids, version)
        for layer_id in range(NUM_LAYERS):
            for block_id in block_ids:
                block = engine.read_host_block(layer_id, block_id)
                assert block.shape == LAYOUT.block_shape
                assert torch.equal(block.transpose(1, 2), tokens_of(layer_id, [block_id], version))
    size = 2 * NUM_LAYERS * len(block_ids) * LAYOUT.layer_block_bytes // 2
    assert bytes_of(engine, "d2h") == (size, size)


def test_neighbours_in_the_host_are_left_alone(device):
    engine = make_engine(device)
    write(engine, 1, [8, 9, 10])
    write(engine, 1, [9], version=1)
    for block_id, version in ((8, 0), (9, 1), (10, 0)):
        block = engine.read_host_block(1, block_id).transpose(1, 2)
        assert torch.equal(block, tokens_of(1, [block_id], version))


@pytest.mark.parametrize(
    ("num_history", "num_tokens", "device_start", "full"),
    [
        (0, 3, 0, []),
        (0, 4, 0, [0]),
        (2, 1, 0, []),
        (2, 2, 0, [0]),
        (3, 9, 0, [0, 1, 2]),
        (6, 7, 4, [1, 2]),
        (9, 2, 0, []),  # a later chunk of a layer: what is before it is at hand too
        (9, 8, 0, [2, 3]),
    ],
)
def test_only_what_a_chunk_makes_full_is_written(
    device, num_history, num_tokens, device_start, full
):
    engine = make_engine(device)
    table = [9, 3, 4, 20, 5]
    tokens = tokens_of(1, table)
    engine.recent.reserve(5 * BLOCK)
    if num_history > device_start:
        earlier = chunk_of(table, device_start, num_history - device_start)
        store(engine, 1, earlier, tokens[:, device_start:num_history])
        engine.stats.reset()
    chunk = chunk_of(table, num_history, num_tokens, device_start)
    store(engine, 1, chunk, tokens[:, num_history : chunk.context_len])
    size = len(full) * LAYOUT.layer_block_bytes // 2
    assert bytes_of(engine, "d2h") == (size, size)
    for place in full:
        block = engine.read_host_block(1, table[place]).transpose(1, 2)
        assert torch.equal(block, tokens_of(1, [table[place]]))
    keys, values = engine.get_prefill_buffer_slice(1, chunk.num_device_tokens)
    assert torch.equal(torch.stack([keys, values]), tokens[:, device_start : chunk.context_len])


@pytest.mark.parametrize(
    ("num_staging", "num_expected"),
    [(1, 8), (2, 8), (4, 4), (5, 3), (8, 2), (16, 1)],
)
def test_adjacent_blocks_are_written_in_one_copy(device, num_staging, num_expected):
    """As far as one stream's share of the staging buffers reaches: of five, 3 and 2 in turn."""
    engine = make_engine(device, num_staging=num_staging)
    write(engine, 0, ADJACENT)
    assert num_copies(engine, "d2h") == num_expected
    engine.stats.reset()
    write(engine, 0, [4, 6, 8])
    assert num_copies(engine, "d2h") == 3


def test_both_offload_streams_are_used(device):
    engine = make_engine(device, num_staging=2)
    names = [stream.name for stream in engine.prefill_offload_streams]
    write(engine, 0, [0, 1])
    writers = [device._order._buffers[("host", 0), block_id].writer for block_id in (0, 1)]
    assert writers == names


def test_events_of_finished_copies_are_forgotten(device):
    engine = make_engine(device, num_staging=3)
    writer = engine._writer
    for i in range(200):
        write(engine, i % NUM_LAYERS, [i % 17, (i + 5) % 17], version=i)
        assert len(writer._host_ready) <= 2 * 3
        assert len(writer._in_flight) <= 3
    device.synchronize()
    write(engine, 0, [20])  # looks after the others
    assert len(writer._host_ready) <= 1


def test_a_write_in_flight_is_remembered(device):
    engine = make_engine(device)
    write(engine, 1, [8])
    assert len(list(engine._writer.host_ready(1, 8))) == 1
    assert not list(engine._writer.host_ready(1, 9))
    assert not list(engine._writer.host_ready(0, 8))


def test_blocks_of_one_copy_share_an_event(device):
    engine = make_engine(device, num_staging=8)
    write(engine, 1, [8, 9, 10, 11, 14])
    assert len(list(engine._writer.host_ready(1, 8, 4))) == 1
    assert len(list(engine._writer.host_ready(1, 10, 5))) == 2


# What is counted.


def test_copies_are_counted_by_phase(full_engine):
    engine = full_engine()
    half = LAYOUT.layer_block_bytes // 2
    load(engine, 0, [1, 3, 5])
    engine.stats.phase = "decode"
    load(engine, 0, [2, 9])
    engine.load_k_only_to_slot_layer(0, 0, 9)
    write(engine, 1, [4])
    assert bytes_of(engine) == (3 * half, 3 * half)
    assert num_copies(engine) == 3
    assert bytes_of(engine, phase="decode") == (3 * half, 2 * half)
    assert num_copies(engine, phase="decode") == 3
    assert bytes_of(engine, "d2h") == (0, 0)
    assert bytes_of(engine, "d2h", "decode") == (half, half)
    assert num_copies(engine, "d2h", "decode") == 1
    engine.stats.reset()
    assert bytes_of(engine, phase="decode") == (0, 0)
    assert engine.stats.phase == "decode"


def test_device_bytes(device):
    engine = make_engine(device, num_slots=5, num_staging=3)
    block = LAYOUT.layer_block_bytes
    ring, window, staging, tails = 5 * block, 2 * block, 3 * block, NUM_LAYERS * block
    assert engine.num_device_bytes == ring + window + staging + tails
    engine.recent.reserve(9)
    assert engine.num_device_bytes == ring + window + staging + tails + 3 * block


def test_closing_waits_for_copies_and_gives_memory_back(device):
    engine = make_engine(device)
    write(engine, 0, [1])
    memory = engine.pool.blocks(0, 1)
    engine.close()
    assert torch.equal(memory[0].transpose(1, 2), tokens_of(0, [1]))
    assert engine.pool.num_bytes == 0
