"""A CUDA GPU as a device: the only file that names torch.cuda."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from nanovllm.device.base import Device, Replay


class CudaDevice(Device):
    """One GPU, work given to PyTorch's current stream."""

    default_dtype = None
    runs_triton = True
    records_graphs = True

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)
        self._graph_pool: Any = None

    @staticmethod
    def count() -> int:
        """Return how many CUDA devices PyTorch sees."""
        return torch.cuda.device_count()

    def active(self) -> AbstractContextManager[Any]:
        return torch.cuda.device(self.torch_device)

    def free_memory_bytes(self) -> int:
        device = self.torch_device
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)

    def total_memory_bytes(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[1]

    def peak_memory_bytes(self, run: Callable[[], Any]) -> int:
        self.synchronize()
        before = torch.cuda.memory_allocated(self.torch_device)
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        run()
        self.synchronize()
        return torch.cuda.max_memory_allocated(self.torch_device) - before

    def release_cached_memory(self) -> None:
        torch.cuda.empty_cache()

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def upload(
        self, values: Any, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        # The caching host allocator keeps the pinned copy until the transfer is done.
        host = torch.as_tensor(values, dtype=dtype).pin_memory()
        if out is None:
            return host.to(self.torch_device, non_blocking=True)
        return out.copy_(host, non_blocking=True)

    def capture(self, run: Callable[[], Any]) -> Replay:
        # Kernels compile and libraries allocate workspaces in a run before the recorded one.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._graph_pool):
            run()
        self._graph_pool = self._graph_pool or graph.pool()
        return graph.replay
