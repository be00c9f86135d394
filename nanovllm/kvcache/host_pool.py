"""KV blocks in main memory: pinned, made in pieces, in the background."""

import time
import weakref
from collections.abc import Iterable
from concurrent.futures import Future
from itertools import product
from queue import SimpleQueue
from threading import Thread

import torch

from nanovllm.device import Device, HostMemory
from nanovllm.errors import CapacityError
from nanovllm.kvcache.layout import KVLayout
from nanovllm.log import get_logger

logger = get_logger(__name__)

_PIECE_TOKENS = 8192  # 32 MiB a layer of an 8B model, copied at full speed and pinned in 9 ms
_PROBE_BYTES = 16 << 20  # to measure the rate of copies with


class HostPool:
    """A pool of `num_blocks` KV blocks for all layers, of which only what was asked for exists.

    A piece holds a range of blocks in one layer, `[n, 2, num_kv_heads, block_size, head_dim]`: one
    block's K is contiguous, so is its V, and so is one head of either. Pinning runs at a few GB/s
    at most, so a thread makes pieces in the order in which `reserve` asks for them, and only who
    needs one that is not there yet waits. Memory is given back by `close`, or with the object.
    """

    def __init__(self, device: Device, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._piece_blocks = max(1, min(num_blocks, _PIECE_TOKENS // layout.block_size))
        self._maker = _PieceMaker(device, layout)
        # Also at the interpreter's end: pages must not go while they are pinned.
        self.close = weakref.finalize(self, self._maker.close)
        """Give the memory back, once copies in flight are over."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the pieces that exist."""
        return self._maker.num_bytes

    @property
    def all_pinned(self) -> bool:
        """Whether the system pinned every piece so far, so that kernels may read them."""
        return self._maker.all_pinned

    def reserve(self, block_ids: Iterable[int]) -> None:
        """Begin to make the pieces that hold some blocks, layer by layer. Does not wait."""
        indices = sorted({block_id // self._piece_blocks for block_id in block_ids})
        for layer_id, index in product(range(self.layout.num_layers), indices):
            self._maker.begin((layer_id, index), self.num_adjacent(index * self._piece_blocks))

    def num_adjacent(self, block_id: int) -> int:
        """Return how many blocks, from this one on, lie one behind the other in every layer."""
        stop = (block_id // self._piece_blocks + 1) * self._piece_blocks
        return min(stop, self.num_blocks) - block_id

    def blocks(self, layer_id: int, first: int, num_blocks: int = 1) -> torch.Tensor:
        """Return adjacent blocks of a layer, `[num_blocks, 2, num_kv_heads, block_size, head_dim]`.

        Waits for their piece if it is still being made.

        Raises:
            CapacityError: the system has no memory for the piece.
        """
        index, start = divmod(first, self._piece_blocks)
        if (layer_id, index) not in self._maker.pieces:
            self.reserve([first])
        try:
            tensor = self._maker.pieces[layer_id, index].result().tensor
        except (MemoryError, OSError, RuntimeError) as error:
            raise CapacityError(
                f"the host KV cache cannot grow beyond {self.num_bytes / 2**30:.1f} of "
                f"{self.num_blocks * self.layout.block_bytes / 2**30:.1f} GiB: {error}. "
                "Lower cpu_memory_gb, or free memory"
            ) from error
        return tensor[start : start + num_blocks]


class _PieceMaker:
    """A thread that makes pieces of host memory, one after the other."""

    def __init__(self, device: Device, layout: KVLayout) -> None:
        self.pieces: dict[tuple[int, int], Future[HostMemory]] = {}
        self.num_bytes = 0
        self._device = device
        self._layout = layout
        self._probe = torch.empty(_PROBE_BYTES, dtype=torch.uint8, device=device.torch_device)
        self._probe_stream = device.new_stream("probe")
        self.all_pinned = True
        self._jobs: SimpleQueue[tuple[Future[HostMemory], int] | None] = SimpleQueue()
        # A daemon: the interpreter ends without making what is still asked for.
        self._thread = Thread(target=self._work, name="nanovllm-host-pool", daemon=True)
        self._thread.start()

    def begin(self, key: tuple[int, int], num_blocks: int) -> None:
        """Ask for a piece, unless it is there or on its way; one that failed is tried again."""
        piece = self.pieces.get(key)
        if piece is None or (piece.done() and piece.exception() is not None):
            self.pieces[key] = Future()
            self._jobs.put((self.pieces[key], num_blocks))

    def close(self) -> None:
        """Give the memory back, and make no more."""
        for piece in self.pieces.values():
            piece.cancel()
        self._jobs.put(None)
        self._thread.join()
        self._device.synchronize()
        for piece in self.pieces.values():
            if not piece.cancelled() and piece.exception() is None:
                piece.result().release()
        self.pieces.clear()
        self.num_bytes = 0

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, num_blocks = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(self._make(num_blocks))
            except BaseException as error:
                future.set_exception(error)

    def _make(self, num_blocks: int) -> HostMemory:
        shape = (num_blocks, *self._layout.block_shape)
        memory = self._device.allocate_host(shape, self._layout.dtype)
        is_first = self.num_bytes == 0
        self.num_bytes += memory.tensor.nbytes
        if not memory.is_pinned and self.all_pinned:
            self.all_pinned = False
            logger.warning(
                "the system refused to pin host memory after %.2f GiB: copies of the rest of the "
                "KV cache run at only %.1f GB/s to the device and %.1f GB/s back, and not beside "
                "kernels. Raise the limit of locked memory (ulimit -l), or lower cpu_memory_gb",
                (self.num_bytes - memory.tensor.nbytes) / 2**30,
                *self._measure_gb_s(memory.tensor),
            )
        elif is_first:
            rates = self._measure_gb_s(memory.tensor)
            logger.info("host KV cache: %.1f GB/s to the device, %.1f GB/s back", *rates)
        return memory

    def _measure_gb_s(self, tensor: torch.Tensor) -> tuple[float, float]:
        """Return the rates of copies to the device and back, in GB/s. Overwrites the tensor."""
        host = tensor.view(torch.uint8).flatten()[:_PROBE_BYTES]
        device = self._probe[: len(host)]
        rates = []
        for target, source in ((device, host), (host, device)):
            for _ in range(2):  # the first warms up
                before = time.perf_counter()
                self._probe_stream.copy(target, source)
                self._probe_stream.record().synchronize()
                seconds = time.perf_counter() - before
            rates.append(len(host) / seconds / 1e9)
        return rates[0], rates[1]
