"""KV blocks in main memory: pinned, made in pieces, in the background."""

import time
from bisect import bisect_right
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from nanovllm.device import Device, HostMemory
from nanovllm.errors import CapacityError
from nanovllm.kvcache.layout import KVLayout
from nanovllm.log import get_logger

logger = get_logger(__name__)

_FIRST_PIECE_BYTES = 256 << 20  # pinned while the first request waits, in a fifth of a second
_LARGEST_PIECE_BYTES = 4 << 30
_PROBE_BYTES = 64 << 20


class HostPool:
    """A pool of `num_blocks` KV blocks for all layers, of which only what was asked for exists.

    A piece holds some blocks of every layer, `[num_layers, n, 2, num_kv_heads, block_size,
    head_dim]`: so one block's K is contiguous, so is its V, and so is one head of either. Pinning
    runs at a few GB/s at most: `reserve` starts it early, and only who needs a block waits.
    """

    def __init__(self, device: Device, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self._device = device
        self._starts = _piece_starts(num_blocks, layout.block_bytes)
        self._pieces: list[Future[HostMemory]] = []
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="nanovllm-host-pool")
        self._probe_stream = device.new_stream("probe")

    @property
    def num_bytes(self) -> int:
        """Bytes of the pieces that exist."""
        done = [piece.result() for piece in self._pieces if piece.done()]
        return sum(memory.tensor.nbytes for memory in done)

    def reserve(self, num_blocks: int) -> None:
        """Begin to make the pieces that hold the first `num_blocks` blocks. Does not wait."""
        while (
            len(self._pieces) < len(self._starts) and self._starts[len(self._pieces)] < num_blocks
        ):
            self._pieces.append(self._worker.submit(self._make_piece, len(self._pieces)))

    def num_adjacent(self, block_id: int) -> int:
        """Return how many blocks, from this one on, lie one behind the other in every layer."""
        piece = bisect_right(self._starts, block_id)
        return (self._starts[piece] if piece < len(self._starts) else self.num_blocks) - block_id

    def blocks(self, layer_id: int, first: int, num_blocks: int = 1) -> torch.Tensor:
        """Return adjacent blocks of a layer, `[num_blocks, 2, num_kv_heads, block_size, head_dim]`.

        Waits for their piece if it is still being made.

        Raises:
            CapacityError: the system has no memory for the piece.
        """
        self.reserve(first + num_blocks)
        piece = bisect_right(self._starts, first) - 1
        try:
            tensor = self._pieces[piece].result().tensor
        except (MemoryError, OSError, RuntimeError) as error:
            raise CapacityError(
                f"the host KV cache cannot grow beyond {self.num_bytes / 2**30:.1f} of "
                f"{self.num_blocks * self.layout.block_bytes / 2**30:.1f} GiB: {error}. "
                "Lower cpu_memory_gb, or free memory"
            ) from error
        start = first - self._starts[piece]
        return tensor[layer_id, start : start + num_blocks]

    def close(self) -> None:
        """Give the memory back. No copy may be in flight."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        for piece in self._pieces:
            if not piece.cancelled() and piece.exception() is None:
                piece.result().release()
        self._pieces.clear()

    def _make_piece(self, index: int) -> HostMemory:
        start, stop = (*self._starts, self.num_blocks)[index : index + 2]
        layout = self.layout
        shape = (layout.num_layers, stop - start, *layout.block_shape)
        before = time.perf_counter()
        memory = self._device.allocate_host(shape, layout.dtype)
        seconds = time.perf_counter() - before
        gib = memory.tensor.nbytes / 2**30
        logger.debug("host KV cache: %.2f GiB more, made in %.2f s", gib, seconds)
        if index == 0 or not memory.is_pinned:
            rates = self._measure_gb_s(memory.tensor)
            if memory.is_pinned:
                logger.info("host KV cache: %.1f GB/s to the device, %.1f GB/s back", *rates)
            else:
                logger.warning(
                    "the system refused to pin %.1f GiB of host KV cache: copies run at only "
                    "%.1f GB/s to the device and %.1f GB/s back, and not beside kernels. Raise "
                    "the limit of locked memory (ulimit -l), or lower cpu_memory_gb",
                    gib,
                    *rates,
                )
        return memory

    def _measure_gb_s(self, tensor: torch.Tensor) -> tuple[float, float]:
        """Return the rates of copies to the device and back, in GB/s."""
        host = tensor.flatten()[: _PROBE_BYTES // tensor.itemsize]
        device = torch.empty_like(host, device=self._device.torch_device)
        rates = []
        for target, source in ((device, host), (host, device)):
            for _ in range(2):  # the first warms up
                before = time.perf_counter()
                self._probe_stream.copy(target, source)
                self._probe_stream.record().synchronize()
                seconds = time.perf_counter() - before
            rates.append(host.nbytes / seconds / 1e9)
        return rates[0], rates[1]


def _piece_starts(num_blocks: int, block_bytes: int) -> list[int]:
    """Return the first block of each piece: a small one first, each twice the one before."""
    starts, start, size = [], 0, _FIRST_PIECE_BYTES
    while start < num_blocks:
        starts.append(start)
        start += max(1, size // block_bytes)
        size = min(2 * size, _LARGEST_PIECE_BYTES)
    return starts
