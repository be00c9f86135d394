"""The way of KV blocks from the device to host memory."""

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq

import torch

from nanovllm.device import Device, Event, Span, Stream
from nanovllm.kvcache.host_pool import HostPool
from nanovllm.metrics.transfer import TransferStats
from nanovllm.ops.block_layout import pack_blocks


class HostWriter:
    """Writes full blocks to the host pool, through a ring of staging buffers.

    Keys and values are packed head-major into staging by the compute stream; a copy stream takes
    them to the host while later kernels run. Whoever reads a block afterwards waits for its event.
    """

    def __init__(
        self, device: Device, pool: HostPool, num_staging: int, stats: TransferStats
    ) -> None:
        self._device = device
        self._pool = pool
        self._stats = stats
        self._staging = torch.empty(
            (num_staging, *pool.layout.block_shape),
            dtype=pool.layout.dtype,
            device=device.torch_device,
        )
        self.prefill_offload_streams = [device.new_stream(f"offload {i}") for i in range(2)]
        self._bank = -(-num_staging // 2)  # staging buffers of each stream
        self._next = 0
        self._staging_free: list[Event | None] = [None] * num_staging
        self._host_ready: dict[tuple[int, int], Event] = {}
        self._in_flight: deque[tuple[Event, list[tuple[int, int]]]] = deque()

    @property
    def num_bytes(self) -> int:
        """Device memory of the staging buffers."""
        return self._staging.nbytes

    def write(
        self, layer_id: int, block_ids: Seq[int], keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Write a layer's blocks to the host. Does not wait for the copies.

        Args:
            layer_id: the layer.
            block_ids: where the blocks go in the host pool.
            keys, values: `[len(block_ids) * block_size, num_kv_heads, head_dim]` on the device,
                written by the compute stream; may be overwritten when the call has returned.
        """
        block_size = self._pool.layout.block_size
        start = 0
        while start < len(block_ids):
            count = self._num_together(block_ids, start)
            rows = slice(start * block_size, (start + count) * block_size)
            self._write_run(layer_id, block_ids[start], count, keys[rows], values[rows])
            start += count

    def host_ready(self, layer_id: int, first: int, num_blocks: int = 1) -> list[Event]:
        """Return the events after which blocks lie in host memory, none for those that do."""
        blocks = range(first, first + num_blocks)
        return distinct(self._host_ready.get((layer_id, block_id)) for block_id in blocks)

    def _num_together(self, block_ids: Seq[int], start: int) -> int:
        """Return how many blocks from `start` on go through staging in one copy."""
        first = block_ids[start]
        limit = min(
            len(block_ids) - start,
            self._bank - self._next % self._bank,
            len(self._staging_free) - self._next,
            self._pool.num_adjacent(first),
        )
        count = 1
        while count < limit and block_ids[start + count] == first + count:
            count += 1
        return count

    def _write_run(
        self, layer_id: int, first: int, count: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        compute = self._device.compute_stream
        stream = self.prefill_offload_streams[self._next // self._bank]
        buffers = slice(self._next, self._next + count)
        span = Span("staging", self._next, count)
        wait_timed(compute, self._staging_free[buffers], self._stats)
        staging = self._staging[buffers]
        self._device.touch(writes=span)
        pack_blocks(keys, staging[:, 0])
        pack_blocks(values, staging[:, 1])
        stream.wait(compute.record())
        for event in self.host_ready(layer_id, first, count):
            stream.wait(event)
        stream.copy(
            self._pool.blocks(layer_id, first, count),
            staging,
            reads=span,
            writes=Span(("host", layer_id), first, count),
        )
        done = stream.record()
        self._staging_free[buffers] = [done] * count
        self._next = (self._next + count) % len(self._staging_free)
        self._note(done, [(layer_id, block_id) for block_id in range(first, first + count)])
        self._stats.add_copies("d2h", 1, staging.nbytes // 2, staging.nbytes // 2)

    def _note(self, done: Event, keys: list[tuple[int, int]]) -> None:
        """Keep the event of copies in flight, and forget those of copies that are done."""
        self._host_ready.update(dict.fromkeys(keys, done))
        self._in_flight.append((done, keys))
        while self._in_flight and self._in_flight[0][0].is_done():
            event, keys = self._in_flight.popleft()
            for key in keys:
                if self._host_ready.get(key) is event:
                    del self._host_ready[key]


def distinct(events: Iterable[Event | None]) -> list[Event]:
    """Return the events that there are, each once: neighbours often share one."""
    return [event for event in dict.fromkeys(events) if event is not None]


def wait_timed(stream: Stream, events: Iterable[Event | None], stats: TransferStats) -> None:
    """Let the compute stream wait for events, and count how long that takes it."""
    if needed := distinct(events):
        before = stream.record(timed=True)
        for event in needed:
            stream.wait(event)
        stats.add_wait(before, stream.record(timed=True))
