"""KV blocks in main memory: pinned, made in pieces, in the background."""

import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import product

import torch

from nanovllm.device import Device, HostMemory
from nanovllm.errors import CapacityError
from nanovllm.kvcache.layout import KVLayout
from nanovllm.log import get_logger

logger = get_logger(__name__)

_PIECE_TOKENS = 8192  # 32 MiB a layer of an 8B model, copied at full speed and pinned in 9 ms


class HostPool:
    """A pool of `num_blocks` KV blocks for all layers, of which only what was asked for exists.

    A piece holds a range of blocks in one layer, `[n, 2, num_kv_heads, block_size, head_dim]`: one
    block's K is contiguous, so is its V, and so is one head of either. Pinning runs at a few GB/s
    at most, so a thread makes pieces in the order in which `reserve` asks for them, and only who
    needs one that is not there yet waits.
    """

    def __init__(self, device: Device, layout: KVLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_bytes = 0
        """Bytes of the pieces that exist."""
        self._device = device
        self._piece_blocks = max(1, min(num_blocks, _PIECE_TOKENS // layout.block_size))
        self._pieces: dict[tuple[int, int], Future[HostMemory]] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="nanovllm-host-pool")
        self._probe_stream = device.new_stream("probe")
        self._warned = False

    def reserve(self, block_ids: Iterable[int]) -> None:
        """Begin to make the pieces that hold some blocks, layer by layer. Does not wait."""
        indices = sorted({block_id // self._piece_blocks for block_id in block_ids})
        for key in product(range(self.layout.num_layers), indices):
            if key not in self._pieces:
                self._pieces[key] = self._worker.submit(self._make_piece, key[1])

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
        if (layer_id, index) not in self._pieces:
            self.reserve([first])
        try:
            tensor = self._pieces[layer_id, index].result().tensor
        except (MemoryError, OSError, RuntimeError) as error:
            del self._pieces[layer_id, index]  # there may be memory for it later
            raise CapacityError(
                f"the host KV cache cannot grow beyond {self.num_bytes / 2**30:.1f} of "
                f"{self.num_blocks * self.layout.block_bytes / 2**30:.1f} GiB: {error}. "
                "Lower cpu_memory_gb, or free memory"
            ) from error
        return tensor[start : start + num_blocks]

    def close(self) -> None:
        """Give the memory back. No copy may be in flight."""
        self._worker.shutdown(wait=True, cancel_futures=True)
        for piece in self._pieces.values():
            if not piece.cancelled() and piece.exception() is None:
                piece.result().release()
        self._pieces.clear()
        self.num_bytes = 0

    def _make_piece(self, index: int) -> HostMemory:
        num_blocks = self.num_adjacent(index * self._piece_blocks)
        shape = (num_blocks, *self.layout.block_shape)
        memory = self._device.allocate_host(shape, self.layout.dtype)
        is_first = self.num_bytes == 0
        self.num_bytes += memory.tensor.nbytes
        if not memory.is_pinned and not self._warned:
            self._warned = True
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
        """Return the rates of copies to the device and back, in GB/s."""
        device = torch.empty_like(tensor, device=self._device.torch_device)
        rates = []
        for target, source in ((device, tensor), (tensor, device)):
            for _ in range(2):  # the first warms up
                before = time.perf_counter()
                self._probe_stream.copy(target, source)
                self._probe_stream.record().synchronize()
                seconds = time.perf_counter() - before
            rates.append(tensor.nbytes / seconds / 1e9)
        return rates[0], rates[1]
