"""The waits that streams need, one by one: with it the data are right, without it a check fails.

The rows are those of the table of ordering rules, and three that the engine's own way adds. Where
copies that come as late as they may make the fault visible in the data, that is shown too.
"""

from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch
from offload_inputs import checked_device, load, make_engine, tokens_of, write

from nanovllm.device import HazardError
from nanovllm.device.hazards import CheckedEvent, CheckedStream, StreamOrder
from nanovllm.kvcache.offload_engine import OffloadEngine

BLOCKS = [9, 2, 21, 3, 17, 6]


@pytest.fixture
def engine():
    """Four slots, two staging buffers, and a host pool that is poison but for layer 1."""
    with checked_device() as device:
        engine = make_engine(device)
        for layer_id in range(engine.pool.layout.num_layers):
            for block_id in range(engine.pool.num_blocks):
                engine.pool.blocks(layer_id, block_id).fill_(float("nan"))
        write(engine, 1, BLOCKS)
        device.synchronize()
        yield engine


# What is done: each returns what it got and what it should have got.


def read_slot(engine):
    engine.load_to_slot_layer(0, 1, 9)
    engine.wait_slot_layer(0)
    keys, values = engine.get_kv_for_slot(0)
    tokens = torch.cat([keys, values]).clone()
    engine.record_slot_compute_done(0)
    return tokens, tokens_of(1, [9])


def use_slots_in_turn(engine):
    """As one does who loads the next block into one slot while computing with another."""
    tokens = []
    for slot in (0, 1):
        engine.load_to_slot_layer(slot, 1, BLOCKS[slot])
    for i in range(len(BLOCKS)):
        engine.wait_slot_layer(i % 2)
        tokens.append(torch.cat(engine.get_kv_for_slot(i % 2)).clone())
        if i > 0 and i + 1 < len(BLOCKS):
            engine.load_to_slot_layer((i - 1) % 2, 1, BLOCKS[i + 1])
        engine.record_slot_compute_done(i % 2)
    return torch.cat(tokens, 1), tokens_of(1, BLOCKS)


def load_blocks(engine):
    return load(engine, 1, BLOCKS), tokens_of(1, BLOCKS)


def write_and_read(engine):
    write(engine, 0, [4])
    return engine.read_host_block(0, 4).transpose(1, 2).clone(), tokens_of(0, [4])


def write_many(engine):
    write(engine, 0, BLOCKS)
    engine.device.synchronize()
    tokens = [engine.pool.blocks(0, block_id)[0].transpose(1, 2) for block_id in BLOCKS]
    return torch.cat(tokens, 1), tokens_of(0, BLOCKS)


def write_and_load(engine):
    write(engine, 0, [4])
    return load(engine, 0, [4]), tokens_of(0, [4])


def write_what_is_loaded_ahead(engine):
    load(engine, 1, [9], ahead=(1, [2, 21]))
    write(engine, 1, [2], version=1)
    return load(engine, 1, [2]), tokens_of(1, [2], version=1)


def write_what_was_loaded_in_vain(engine):
    load(engine, 1, [9], ahead=(1, [2]))
    load(engine, 1, [])
    write(engine, 1, [2], version=1)
    return load(engine, 1, [2]), tokens_of(1, [2], version=1)


def write_twice(engine):
    write(engine, 0, [4])
    write(engine, 0, [4], version=1)
    engine.read_host_block(0, 4)
    engine.device.synchronize()
    return engine.pool.blocks(0, 4)[0].transpose(1, 2).clone(), tokens_of(0, [4], version=1)


# What is left out of it.


def forget_waits(patch, waiter, of):
    """Leave out what streams whose names begin with `waiter` wait for of streams `of`."""
    record, wait = CheckedStream.record, CheckedStream.wait
    recorded_by = {}

    def record_with_name(self, timed=False):
        event = record(self, timed)
        recorded_by[event] = self.name
        return event

    def wait_or_not(self, event):
        if not (self.name.startswith(waiter) and recorded_by.get(event, "").startswith(of)):
            wait(self, event)

    patch.setattr(CheckedStream, "record", record_with_name)
    patch.setattr(CheckedStream, "wait", wait_or_not)


def kernels_elsewhere(patch):
    get_kv_for_slot = OffloadEngine.get_kv_for_slot

    def get_on_other_stream(self, slot):
        with self.device.new_stream("other").entered():
            return get_kv_for_slot(self, slot)

    patch.setattr(OffloadEngine, "get_kv_for_slot", get_on_other_stream)


def read_without_waiting(patch):
    patch.setattr(CheckedEvent, "synchronize", lambda self: None)


def keep_loads(patch):
    patch.setattr(OffloadEngine, "drop_loads", lambda self: None)


def forget_dropped_loads(patch):
    keep_matching = OffloadEngine._keep_matching

    def keep_matching_without_waiting(self, plan):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(OffloadEngine, "_wait", lambda self, events: None)
            return keep_matching(self, plan)

    patch.setattr(OffloadEngine, "_keep_matching", keep_matching_without_waiting)


def no_release(patch):
    patch.setattr(OffloadEngine, "record_slot_compute_done", lambda self, slot: None)


class Row(NamedTuple):
    do: callable
    fault: callable
    message: str
    shows: bool
    """Whether the fault shows in the data as well. Kernels on a CPU are done at once, so that
    nothing can overtake them."""


def waits(waiter, of):
    return lambda patch: forget_waits(patch, waiter, of)


ROWS = {
    "1 kernel on a stream that did not wait": Row(
        read_slot, kernels_elsewhere, "other reads slot .* until transfer", False
    ),
    "2 slot read before its load is done": Row(
        load_blocks, waits("compute", "transfer"), "compute reads slot .* until transfer", True
    ),
    "2 single slot read before its load is done": Row(
        read_slot, waits("compute", "transfer"), "compute reads slot .* until transfer", True
    ),
    "3 load into a slot still being read": Row(
        load_blocks, waits("transfer", "compute"), "transfer . writes slot .* until compute", False
    ),
    "3 load into a single slot still being read": Row(
        use_slots_in_turn, no_release, "transfer . writes slot .* until compute", False
    ),
    "4 copy to the host before compute wrote the data": Row(
        write_and_read, waits("offload", "compute"), "offload . reads staging .* compute", False
    ),
    "5 host reads before the copy is done": Row(
        write_and_read, read_without_waiting, "host reads .* until offload", True
    ),
    "6 staging refilled while its copy is in flight": Row(
        write_many, waits("compute", "offload"), "compute writes staging .* until offload", True
    ),
    "7 load of a block that is on its way to the host": Row(
        write_and_load, waits("transfer", "offload"), "transfer . reads .* until offload", True
    ),
    "8 write of a block that a load begun ahead still reads": Row(
        write_what_is_loaded_ahead, keep_loads, "offload . writes .* until transfer", True
    ),
    "9 write of a block that a load given up still reads": Row(
        write_what_was_loaded_in_vain,
        forget_dropped_loads,
        "offload . writes .* until transfer",
        False,
    ),
    "10 two writes of a block by two streams": Row(
        write_twice, waits("offload", "offload"), "offload 1 writes .* until offload 0", True
    ),
}
every_row = pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)


@contextmanager
def faulty(row, checked=True):
    with pytest.MonkeyPatch.context() as patch:
        row.fault(patch)
        if not checked:
            patch.setattr(StreamOrder, "access", lambda *_, **__: None)
        yield


@every_row
def test_the_right_order_gives_the_right_data(engine, row):
    ours, truth = row.do(engine)
    assert torch.equal(ours, truth)


@every_row
def test_control_without_the_wait_the_check_fails(engine, row):
    with faulty(row), pytest.raises(HazardError, match=row.message):
        row.do(engine)


@pytest.mark.parametrize(
    "row", [row for row in ROWS.values() if row.shows], ids=[k for k, r in ROWS.items() if r.shows]
)
def test_without_the_wait_the_data_are_wrong(engine, row):
    with faulty(row, checked=False):
        ours, truth = row.do(engine)
    assert ours.shape == truth.shape
    assert not torch.equal(ours, truth)


@every_row
def test_control_leaving_nothing_out_changes_nothing(engine, row):
    """What leaves out a wait by name leaves the others in place."""
    with pytest.MonkeyPatch.context() as patch:
        forget_waits(patch, "nobody", "nobody")
        ours, truth = row.do(engine)
    assert torch.equal(ours, truth)
