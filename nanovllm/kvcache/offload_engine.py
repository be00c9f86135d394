"""Moves KV blocks between host memory and the device: the ring of slots, its streams and events.

Kernels run on `compute_stream`, current for a step, but for those that fetch pages ahead; other
streams only copy. Which waits that takes is told in docs/offload.md.
"""

from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from enum import Enum
from typing import NamedTuple, TypeVar

import torch

from nanovllm.device import Device, Event, Span
from nanovllm.kvcache.chunk import Chunk
from nanovllm.kvcache.host_pool import HostPool
from nanovllm.kvcache.host_writer import HostWriter, distinct, wait_timed
from nanovllm.kvcache.hot_pages import HotPages
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.recent import RecentKV
from nanovllm.metrics.transfer import TransferStats
from nanovllm.ops.block_layout import unpack_blocks

T = TypeVar("T")


class Part(Enum):
    """What of a block is loaded; the value picks it out of `[num_blocks, K and V, ...]`."""

    ALL = slice(None)
    KEYS = slice(0, 1)
    VALUES = slice(1, 2)


class _Wish(NamedTuple):
    """A block, or a part of it, that somebody wants on the device."""

    layer_id: int
    block_id: int
    part: Part


class _Load(NamedTuple):
    """A block on its way to a slot."""

    wish: _Wish
    slot: int


class OffloadEngine:
    """A ring of device slots that KV blocks of all layers pass through.

    `load_blocks` is what policies use: it loads, waits, unpacks and releases in the right order and
    ahead of time. The methods for a single slot are its parts, for policies that want one block.

    Args:
        device: the device.
        layout: shape of the KV cache.
        num_host_blocks: KV blocks that host memory may hold.
        num_slots: slots of the ring, at least 2.
        num_staging: staging buffers for blocks on their way to the host, at least 1.
        hot: where decode's pages lie on the device, if decode chooses pages.
    """

    def __init__(
        self,
        device: Device,
        layout: KVLayout,
        num_host_blocks: int,
        num_slots: int,
        num_staging: int,
        hot: HotPages | None = None,
    ) -> None:
        self.device = device
        self.compute_stream = device.compute_stream
        self.stats = TransferStats()
        self.pool = HostPool(device, layout, num_host_blocks)
        self.hot = hot
        self.recent = RecentKV(device, layout, None if hot is None else hot.tails)
        self._writer = HostWriter(device, self.pool, num_staging, self.stats)
        self.prefill_offload_streams = self._writer.prefill_offload_streams
        self.num_slots = num_slots
        self.piece_blocks = num_slots // 2
        """Blocks that `load_blocks` yields together: while they are computed with, the other half
        of the ring loads."""
        transfer_streams = [device.new_stream(f"transfer {i}") for i in range(2)]
        self.slot_transfer_streams = [
            transfer_streams[slot // self.piece_blocks % 2] for slot in range(num_slots)
        ]
        self.ring_slot_ready: list[Event | None] = [None] * num_slots
        """After which a slot holds its block."""
        self.ring_slot_compute_done: list[Event | None] = [None] * num_slots
        """After which a slot may be overwritten."""
        self._block_size = layout.block_size
        self._slots = torch.empty(
            (num_slots, *layout.block_shape), dtype=layout.dtype, device=device.torch_device
        )
        # What `load_blocks` yields lies here, token-major: a token's keys, then its values.
        self._window = torch.empty(
            (self.piece_blocks * layout.block_size, 2, *layout.token_shape),
            dtype=layout.dtype,
            device=device.torch_device,
        )
        self._next_slot = 0
        self._in_flight: deque[_Load] = deque()
        # Which parts of which blocks were gathered into the prefill buffer, and of which layer.
        self._gathered: set[tuple[int, Part]] = set()
        self._gathered_layer: int | None = None

    @property
    def num_device_bytes(self) -> int:
        """Device memory of ring, window, staging, tails, prefill buffer and pages."""
        pages = 0 if self.hot is None else self.hot.num_bytes
        own = self._slots.nbytes + self._window.nbytes + pages
        return own + self._writer.num_bytes + self.recent.num_bytes

    def close(self) -> None:
        """Give host memory back. Waits for copies in flight."""
        self.pool.close()

    def begin_step(self, row: int, num_buffer_tokens: int) -> None:
        """Make ready for a sequence's tokens: its tail, and room for them in the prefill buffer."""
        self.recent.row = row
        self.recent.reserve(num_buffer_tokens)
        self._gathered_layer = None

    def load_blocks(
        self, layer_id: int, block_ids: Seq[int], ahead: tuple[int, Seq[int]] | None = None
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the keys and values of a layer's blocks, in their order, some blocks at a time.

        Args:
            layer_id: the layer.
            block_ids: blocks in host memory, or on their way there.
            ahead: layer and blocks that are likely to be wanted next; their loads begin as soon as
                slots are free. Another wish later costs time and nothing else.

        Yields:
            Keys and values, `[n * block_size, num_kv_heads, head_dim]` for up to `piece_blocks`
            blocks, good for kernels on the compute stream until the next ones are asked for, of
            this iterator or another: several may take turns, but then load some blocks twice.
            Never waits with the host, unless for memory that is still being made.
        """
        wanted = [_Wish(layer_id, block_id, Part.ALL) for block_id in block_ids]
        wishes = [] if ahead is None else [_Wish(ahead[0], block, Part.ALL) for block in ahead[1]]
        yield from self._arrivals(wanted, wishes, self._unpack_to_window)

    def gather(
        self,
        layer_id: int,
        chunk: Chunk,
        block_ids: Seq[int],
        part: Part,
        ahead: tuple[int, Seq[int]] | None = None,
    ) -> None:
        """Load the keys or the values of host blocks to their places in the prefill buffer.

        What the step has gathered before for this layer is there. Waits with the host for nothing
        but memory that is still being made.

        Args:
            block_ids: some of the chunk's host blocks, in their order.
            part: `Part.KEYS` or `Part.VALUES`.
            ahead: layer and blocks whose keys are likely to be wanted next.
        """
        wishes = [] if ahead is None else [_Wish(ahead[0], block, Part.KEYS) for block in ahead[1]]
        if self._gathered_layer != layer_id:
            self._gathered.clear()
            self._gathered_layer = layer_id
        missing = [block_id for block_id in block_ids if (block_id, part) not in self._gathered]
        self._gathered.update((block_id, part) for block_id in missing)
        buffer = self.recent.storage(layer_id, chunk.num_buffer_tokens)
        target = (buffer.keys if part is Part.KEYS else buffer.values).flatten(0, 1)
        places = {block_id: place for place, block_id in enumerate(chunk.host_blocks)}

        def unpack(loads: Seq[_Load]) -> None:
            self._unpack(loads, part, [places[load.wish.block_id] for load in loads], target)

        wanted = [_Wish(layer_id, block_id, part) for block_id in missing]
        for _ in self._arrivals(wanted, wishes, unpack):
            pass

    def load_to_slot_layer(self, slot: int, layer_id: int, block_id: int) -> None:
        """Begin to load a block's keys and values into a slot."""
        self.drop_loads()
        self._load(slot, _Wish(layer_id, block_id, Part.ALL), 1)

    def load_k_only_to_slot_layer(self, slot: int, layer_id: int, block_id: int) -> None:
        """Begin to load a block's keys into a slot; its values are undefined."""
        self.drop_loads()
        self._load(slot, _Wish(layer_id, block_id, Part.KEYS), 1)

    def wait_slot_layer(self, slot: int) -> None:
        """Let the compute stream wait until a slot holds its block."""
        self._wait([self.ring_slot_ready[slot]])

    def get_kv_for_slot(self, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a slot's keys and values, views `[1, block_size, num_kv_heads, head_dim]`."""
        self.device.touch(reads=Span("slot", slot, 1))
        keys, values = self._slots[slot].transpose(1, 2)
        return keys[None], values[None]

    def get_k_for_slot(self, slot: int) -> torch.Tensor:
        """Return a slot's keys, a view `[1, block_size, num_kv_heads, head_dim]`."""
        return self.get_kv_for_slot(slot)[0]

    def record_slot_compute_done(self, slot: int) -> None:
        """Say that no kernel launched after this reads the slot."""
        self.ring_slot_compute_done[slot] = self.compute_stream.record()

    def get_prefill_buffer_slice(
        self, layer_id: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the newest tokens' keys and values, `[num_tokens, num_kv_heads, head_dim]`.

        `num_tokens` counts from the chunk's `buffer_start` to its end, that of the chunk that was
        stored last. Before its `device_start` there is what was gathered, and nothing else.
        """
        return self.recent.storage(layer_id, num_tokens).read(slice(0, num_tokens))

    def write_full_blocks(self, layer_id: int, chunk: Chunk) -> None:
        """Write the blocks that a stored chunk makes full to host memory.

        Does not wait for the device. If a load begun ahead reads one of them, all are given up.
        """
        places = chunk.full_blocks
        block_ids = chunk.block_table[places.start : places.stop]
        if not block_ids:
            return
        overwritten = set(block_ids)
        if any(
            load.wish.layer_id == layer_id and load.wish.block_id in overwritten
            for load in self._in_flight
        ):
            self.drop_loads()
        keys, values = self.get_prefill_buffer_slice(layer_id, chunk.num_buffer_tokens)
        tokens = slice(
            places.start * self._block_size - chunk.buffer_start,
            places.stop * self._block_size - chunk.buffer_start,
        )
        self._writer.write(layer_id, block_ids, keys[tokens], values[tokens])

    def write_tails(self, row: int, block_id: int) -> None:
        """Write a row's tails, a full block, to host memory. Does not wait for the device."""
        self.drop_loads()
        self.recent.row = row
        for layer_id in range(self.pool.layout.num_layers):
            keys, values = self.get_prefill_buffer_slice(layer_id, self._block_size)
            self._writer.write(layer_id, [block_id], keys, values)

    def let_read(self, block_ids: Seq[int], num_known: int) -> None:
        """Let kernels launched after this read blocks in host memory, in every layer.

        Args:
            block_ids: a sequence's blocks, in order; the first `num_known` were read before.
        """
        for layer_id in range(self.pool.layout.num_layers):
            for block_id in block_ids[num_known:]:
                self._wait(self._writer.host_ready(layer_id, block_id))
            for block_id in block_ids if self.device.checks_order else ():
                self.device.touch(reads=Span(("host", layer_id), block_id, 1))

    def read_host_block(self, layer_id: int, block_id: int) -> torch.Tensor:
        """Return a block in host memory, `[2, num_kv_heads, block_size, head_dim]`.

        Waits with the host until it lies there. Not to be kept beyond the block's next write.
        """
        for event in self._writer.host_ready(layer_id, block_id):
            event.synchronize()
        self.device.host_reads(Span(("host", layer_id), block_id, 1))
        return self.pool.blocks(layer_id, block_id)[0]

    def drop_loads(self) -> None:
        """Give up the loads that were begun ahead."""
        self._keep_matching([])

    def _arrivals(
        self, wanted: Seq[_Wish], ahead: Seq[_Wish], unpack: Callable[[Seq[_Load]], T]
    ) -> Iterator[T]:
        """Load what is wanted, some blocks at a time, and yield what `unpack` makes of them.

        `unpack` moves loaded blocks out of their slots. What `ahead` wants is begun when slots are
        free. Another iterator may load other things in between.
        """
        plan = [*wanted, *ahead]
        if not wanted:
            self._fetch(plan)
        for start in range(0, len(wanted), self.piece_blocks):
            # Who asked for the piece before may have loaded something else since.
            self._fetch(plan)
            count = min(self.piece_blocks, len(wanted) - start)
            arrived = unpack([self._in_flight.popleft() for _ in range(count)])
            del plan[:count]
            self._fetch(plan)
            yield arrived

    def _fetch(self, plan: Seq[_Wish]) -> None:
        """Let the loads in flight be those that `plan` asks for first."""
        self._issue(plan, self._keep_matching(plan))

    def _keep_matching(self, plan: Seq[_Wish]) -> int:
        """Give up loads in flight from the first on that `plan` does not ask for in its turn.

        A whole block serves who asks for a part. Returns how many are kept.
        """
        kept = 0
        for load, wish in zip(self._in_flight, plan, strict=False):
            if load.wish != wish and load.wish != wish._replace(part=Part.ALL):
                break
            kept += 1
        dropped = [self._in_flight.pop() for _ in range(len(self._in_flight) - kept)]
        if dropped:
            # Whatever writes to their host blocks is ordered after the compute stream.
            self._wait([self.ring_slot_ready[load.slot] for load in dropped])
            self._next_slot = dropped[-1].slot
        return kept

    def _issue(self, plan: Seq[_Wish], num_issued: int) -> None:
        """Begin loads, in the order of `plan`, while slots are free; some have begun already."""
        while num_issued < len(plan) and len(self._in_flight) < self.num_slots:
            wish, slot = plan[num_issued], self._next_slot
            limit = min(
                len(plan) - num_issued,
                self.num_slots - len(self._in_flight),
                self.num_slots - slot,
                self.piece_blocks - slot % self.piece_blocks,
                self.pool.num_adjacent(wish.block_id),
            )
            count = 1
            while count < limit and plan[num_issued + count] == wish._replace(
                block_id=wish.block_id + count
            ):
                count += 1
            self._load(slot, wish, count)
            self._in_flight.extend(_Load(plan[num_issued + i], slot + i) for i in range(count))
            self._next_slot = (slot + count) % self.num_slots
            num_issued += count

    def _load(self, slot: int, first: _Wish, count: int) -> None:
        """Begin to load adjacent blocks, `first` and those after it, to slots of one stream."""
        layer_id, block_id, part = first
        slots = slice(slot, slot + count)
        span = Span("slot", slot, count)
        stream = self.slot_transfer_streams[slot]
        for event in distinct(self.ring_slot_compute_done[slots]):
            stream.wait(event)
        for event in self._writer.host_ready(layer_id, block_id, count):
            stream.wait(event)
        target, source = self._slots[slots], self.pool.blocks(layer_id, block_id, count)
        stream.discard(target, span)
        # A part is contiguous within its block only.
        step = count if part is Part.ALL else 1
        for i in range(0, count, step):
            stream.copy(
                target[i : i + step, part.value],
                source[i : i + step, part.value],
                reads=Span(("host", layer_id), block_id + i, step),
                writes=Span("slot", slot + i, step),
            )
        self.ring_slot_ready[slots] = [stream.record()] * count
        half = source.nbytes // 2
        key_bytes, value_bytes = half * (part is not Part.VALUES), half * (part is not Part.KEYS)
        self.stats.add_copies("h2d", count // step, key_bytes, value_bytes)

    def _unpack_to_window(self, loads: Seq[_Load]) -> tuple[torch.Tensor, torch.Tensor]:
        self._unpack(loads, Part.ALL, range(len(loads)), self._window.flatten(1, 2))
        keys, values = self._window[: len(loads) * self._block_size].unbind(1)
        return keys, values

    def _unpack(
        self, loads: Seq[_Load], part: Part, places: Seq[int], target: torch.Tensor
    ) -> None:
        """Let the compute stream wait for loads, move them to `target` and free their slots.

        Args:
            places: where in `target` each goes, in blocks from its start.
            target: token-major, `[num_tokens, num_heads, head_dim]`; of both keys and values, the
                heads of either follow each other.
        """
        self._wait([self.ring_slot_ready[load.slot] for load in loads])
        start = 0
        while start < len(loads):
            slot, place = loads[start].slot, places[start]
            count = 1
            while start + count < len(loads) and (
                loads[start + count].slot == slot + count and places[start + count] == place + count
            ):
                count += 1
            rows = slice(place * self._block_size, (place + count) * self._block_size)
            self.device.touch(reads=Span("slot", slot, count))
            slots = self._slots[slot : slot + count, part.value]
            unpack_blocks(slots.flatten(1, 2), target[rows])
            done = self.compute_stream.record()
            self.ring_slot_compute_done[slot : slot + count] = [done] * count
            start += count

    def _wait(self, events: Seq[Event | None]) -> None:
        wait_timed(self.compute_stream, events, self.stats)
