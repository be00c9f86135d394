"""The pool of host memory: what its pieces hold, when they are made, and when they go."""

import gc
import logging
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from nanovllm import CapacityError
from nanovllm.device import HostMemory, create_device
from nanovllm.kvcache import host_pool
from nanovllm.kvcache.host_pool import HostPool
from nanovllm.kvcache.layout import KVLayout

MIB = 1 << 20
LAYOUT = KVLayout(num_layers=3, block_size=4, num_kv_heads=2, head_dim=8, dtype=torch.float32)
NUM_BLOCKS = 10


class Memory:
    """Gives out memory on the CPU, when the test lets it, and counts what comes back."""

    def __init__(self):
        self.device = create_device("cpu")
        self.device.allocate_host = self.allocate
        self.go = threading.Event()
        self.go.set()
        self.begun = threading.Event()
        self.shapes, self.released = [], []
        self.errors_at, self.error = range(0), None
        self.is_pinned = True

    def allocate(self, shape, dtype):
        index = len(self.shapes)
        self.shapes.append(shape)
        self.begun.set()
        self.go.wait()
        if self.error is not None and index in self.errors_at:
            raise self.error
        tensor = torch.full(shape, float("nan"), dtype=dtype)
        return HostMemory(tensor, self.is_pinned, lambda: self.released.append(index))

    @property
    def blocks_made(self):
        return [shape[0] for shape in self.shapes]


@pytest.fixture
def memory():
    memory = Memory()
    yield memory
    memory.go.set()


@pytest.fixture
def pool(memory, monkeypatch):
    """A pool in pieces of 4, 4 and 2 blocks."""
    monkeypatch.setattr(host_pool, "_PIECE_TOKENS", 5 * LAYOUT.block_size - 1)
    pool = HostPool(memory.device, LAYOUT, NUM_BLOCKS)
    yield pool
    memory.go.set()
    pool.close()


@pytest.mark.parametrize(
    ("block_size", "num_blocks", "expected"),
    [(128, 1000, 64), (1024, 1000, 8), (1024, 3, 3), (3072, 1000, 2), (16384, 1000, 1)],
)
def test_size_of_a_piece(block_size, num_blocks, expected):
    """Blocks of 8,192 tokens, one block at least."""
    pool = HostPool(create_device("cpu"), KVLayout(1, block_size, 1, 8, torch.half), num_blocks)
    assert pool.num_adjacent(0) == expected
    pool.close()


def test_a_block_has_one_place_in_each_layer(pool):
    """Bytes of different blocks and layers never meet, and a block is contiguous in each half."""
    for layer_id in range(LAYOUT.num_layers):
        for block_id in range(NUM_BLOCKS):
            pool.blocks(layer_id, block_id).fill_(100 * layer_id + block_id)
    for layer_id in range(LAYOUT.num_layers):
        for block_id in range(NUM_BLOCKS):
            block = pool.blocks(layer_id, block_id)
            assert block.shape == (1, *LAYOUT.block_shape)
            assert block.is_contiguous()
            assert block.eq(100 * layer_id + block_id).all()


def test_only_what_is_asked_for_is_made_layer_by_layer(pool, memory):
    assert memory.shapes == []
    pool.reserve([9, 1])
    pool.blocks(2, 8)
    assert memory.blocks_made == [4, 2] * LAYOUT.num_layers
    assert memory.shapes[0] == (4, *LAYOUT.block_shape)
    pool.reserve([0, 1, 2, 3, 8])
    pool.blocks(2, 3)
    assert len(memory.shapes) == 2 * LAYOUT.num_layers
    pool.reserve(range(NUM_BLOCKS))
    pool.blocks(2, 5)
    assert memory.blocks_made[2 * LAYOUT.num_layers :] == [4] * LAYOUT.num_layers


def test_nothing_is_reserved_by_reserving_nothing(pool, memory):
    pool.reserve([])
    assert memory.shapes == []


def test_blocks_are_made_without_being_reserved(pool, memory):
    pool.blocks(2, 4)
    assert memory.blocks_made == [4] * LAYOUT.num_layers


def test_bytes_of_the_pool(pool, memory):
    assert pool.num_bytes == 0
    pool.blocks(2, 0)
    assert pool.num_bytes == 4 * LAYOUT.block_bytes
    memory.go.clear()
    pool.reserve([9])
    assert pool.num_bytes == 4 * LAYOUT.block_bytes  # what is still being made does not count
    memory.go.set()
    pool.blocks(2, 9)
    assert pool.num_bytes == 6 * LAYOUT.block_bytes


def test_reserving_does_not_wait(pool, memory):
    memory.go.clear()
    pool.reserve(range(NUM_BLOCKS))
    assert memory.begun.wait(60)
    assert not memory.go.is_set()


def test_a_block_waits_for_its_piece_alone(pool, memory):
    pool.blocks(2, 0)
    memory.go.clear()
    pool.reserve(range(NUM_BLOCKS))
    pool.blocks(0, 3)  # is there
    with ThreadPoolExecutor(1) as thread:
        block = thread.submit(pool.blocks, 0, 4)
        assert not block.done()
        memory.go.set()
        assert block.result(60).shape == (1, *LAYOUT.block_shape)


@pytest.mark.parametrize(("block_id", "adjacent"), [*enumerate([4, 3, 2, 1, 4, 3, 2, 1, 2, 1])])
def test_adjacent_blocks(pool, block_id, adjacent):
    assert pool.num_adjacent(block_id) == adjacent
    run = pool.blocks(1, block_id, adjacent)
    assert run.shape == (adjacent, *LAYOUT.block_shape)
    run.copy_(torch.arange(adjacent).view(-1, 1, 1, 1, 1))
    for i in range(adjacent):
        assert pool.blocks(1, block_id + i).eq(i).all()


@pytest.mark.parametrize(
    "error",
    [MemoryError("no pages"), OSError(12, "Cannot allocate memory"), RuntimeError("no pages")],
    ids=lambda error: type(error).__name__,
)
def test_a_pool_that_cannot_grow_says_how_far_it_came(memory, monkeypatch, error):
    layout = KVLayout(1, 8192, 8, 64, torch.float32)  # 32 MiB a block, one in a piece
    monkeypatch.setattr(torch, "full", lambda shape, value, dtype: torch.empty(shape, dtype=dtype))
    pool = HostPool(memory.device, layout, 128)
    memory.errors_at, memory.error = range(3, 4), error
    for block_id in range(3):
        pool.blocks(0, block_id)
    with pytest.raises(
        CapacityError, match=r"beyond 0\.1 of 4\.0 GiB: .*allocate memory|no pages"
    ) as raised:
        pool.blocks(0, 3)
    assert "cpu_memory_gb" in str(raised.value)
    assert raised.value.__cause__ is error
    pool.blocks(0, 2)  # what was there before still is
    pool.reserve([3])
    pool.blocks(0, 3)  # and there is memory by now
    pool.close()
    assert memory.released == [0, 1, 2, 4]


def test_every_piece_that_failed_is_tried_again(pool, memory):
    memory.errors_at, memory.error = range(9), MemoryError("no pages")
    pool.reserve(range(NUM_BLOCKS))
    with pytest.raises(CapacityError):
        pool.blocks(2, 9)
    assert len(memory.shapes) == 9
    pool.reserve(range(NUM_BLOCKS))
    for layer_id in range(LAYOUT.num_layers):
        for block_id in range(NUM_BLOCKS):
            pool.blocks(layer_id, block_id)
    assert len(memory.shapes) == 18


def test_other_errors_stay_what_they_are(pool, memory):
    memory.errors_at, memory.error = range(1), ZeroDivisionError()
    with pytest.raises(ZeroDivisionError):
        pool.blocks(0, 0)


@pytest.fixture
def log():
    """Records of the pool's logger."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    host_pool.logger.addHandler(handler)
    yield records
    host_pool.logger.removeHandler(handler)


def test_unpinned_memory_warns_with_the_measured_speed(pool, memory, log):
    memory.is_pinned = False
    pool.blocks(2, 4)
    (record,) = [record for record in log if record.levelno == logging.WARNING]  # once
    assert "refused to pin" in record.getMessage()
    assert "ulimit -l" in record.getMessage()
    assert all(rate > 0 for rate in record.args[1:])


def test_pinned_memory_does_not_warn(pool, log):
    pool.blocks(2, 9)
    assert not [record for record in log if record.levelno >= logging.WARNING]


def test_measured_speed(pool, monkeypatch):
    """A copy of 16 MiB, of which half a second is taken, is one of 0.034 GB/s."""
    clock = iter([0, 9, 10, 10.5, 20, 29, 30, 30.25])
    monkeypatch.setattr(host_pool, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    rates = pool._maker._measure_gb_s(torch.zeros(20 * MIB // 4))
    assert rates == pytest.approx((16 * MIB / 0.5e9, 16 * MIB / 0.25e9))


@pytest.mark.parametrize("checked", ["0", "1"])
def test_measuring_waits_for_the_copies(monkeypatch, checked):
    """Deferred copies are done too, so that it is their time that is measured."""
    monkeypatch.setenv("NANOVLLM_CHECK_STREAMS", checked)
    pool = HostPool(create_device("cpu"), LAYOUT, 1)
    pool._maker._probe.fill_(1)
    host = torch.full((100,), 2, dtype=torch.uint8)
    pool._maker._measure_gb_s(host)
    assert pool._maker._probe[:101].tolist() == [2] * 100 + [1]
    pool.close()


def test_closing_releases_every_piece_once(pool, memory):
    pool.reserve(range(NUM_BLOCKS))
    pool.blocks(2, 9)
    assert memory.released == []
    pool.close()
    assert sorted(memory.released) == list(range(3 * LAYOUT.num_layers))
    pool.close()
    assert len(memory.released) == 3 * LAYOUT.num_layers
    assert pool.num_bytes == 0


def test_closing_releases_what_is_still_being_made(pool, memory):
    """And does not make what was not begun."""
    memory.go.clear()
    pool.reserve(range(NUM_BLOCKS))
    assert memory.begun.wait(60)
    cancelled = threading.Event()
    pool._maker.pieces[2, 2].add_done_callback(lambda _: cancelled.set())
    with ThreadPoolExecutor(1) as thread:
        closed = thread.submit(pool.close)
        assert cancelled.wait(10)
        assert not closed.done()  # it waits for the first piece
        memory.go.set()
        closed.result(60)
    assert memory.released == [0]
    assert memory.blocks_made == [4]


def test_closing_an_empty_pool(pool, memory):
    pool.close()
    assert memory.released == []


def test_a_pool_that_is_dropped_gives_its_memory_back(memory):
    pool = HostPool(memory.device, LAYOUT, NUM_BLOCKS)
    pool.blocks(2, 9)
    del pool
    gc.collect()
    assert sorted(memory.released) == list(range(LAYOUT.num_layers))


def test_the_interpreter_ends_without_making_what_is_asked_for():
    """Each of 1,000 pieces would take a tenth of a second."""
    program = """
import time, torch
from nanovllm.device import create_device
from nanovllm.kvcache.host_pool import HostPool
from nanovllm.kvcache.layout import KVLayout
device = create_device("cpu")
allocate = device.allocate_host
device.allocate_host = lambda *args: time.sleep(0.1) or allocate(*args)
pool = HostPool(device, KVLayout(1000, 16, 1, 8, torch.float32), 4)
pool.reserve([0])
pool.blocks(0, 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=90)
