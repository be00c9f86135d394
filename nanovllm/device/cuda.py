"""A CUDA GPU as a device: the only file that names torch.cuda."""

import math
import mmap
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch

from nanovllm.device.base import Device, Replay
from nanovllm.device.host import HostMemory
from nanovllm.device.stream import Event, Span, Stream


class CudaDevice(Device):
    """One GPU. Its compute stream is a stream of its own, made current for each step."""

    default_dtype = None
    runs_triton = True
    records_graphs = True

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.torch_device = torch.device("cuda", index)
        self.name = torch.cuda.get_device_name(index)
        self._graph_pool: Any = None
        self._stream_names: dict[int, str] = {}
        self.compute_stream = self.new_stream("compute")

    @staticmethod
    def count() -> int:
        """Return how many CUDA devices PyTorch sees."""
        return torch.cuda.device_count()

    def _make_stream(self, name: str, is_urgent: bool) -> Stream:
        stream = torch.cuda.Stream(self.torch_device, priority=-1 if is_urgent else 0)
        self._stream_names[stream.cuda_stream] = name
        return CudaStream(name, stream)

    def _current_stream_name(self) -> str:
        current = torch.cuda.current_stream(self.torch_device).cuda_stream
        return self._stream_names.get(current, "default")

    def _poison(self, stream: Stream, tensor: torch.Tensor) -> None:
        with stream.entered():
            tensor.fill_(float("nan"))

    def allocate_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> HostMemory:
        num_bytes = math.prod(shape) * dtype.itemsize
        # Not from PyTorch's pinned allocator, which rounds up to a power of two. Large pages, all
        # of them touched by PyTorch's threads, are pinned several times as fast as small ones.
        pages = mmap.mmap(-1, num_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            pages.madvise(mmap.MADV_HUGEPAGE)
        tensor = torch.frombuffer(pages, dtype=dtype).view(shape).zero_()
        runtime = torch.cuda.cudart()
        with torch.cuda.device(self.torch_device):
            if int(runtime.cudaHostRegister(tensor.data_ptr(), num_bytes, 0)) == 0:
                address = tensor.data_ptr()
                return HostMemory(tensor, True, lambda: runtime.cudaHostUnregister(address))
            with suppress(RuntimeError):  # the runtime keeps the error until a call asks for it
                torch.empty(1, device=self.torch_device).zero_()
        return HostMemory(tensor, False)

    def range(self, name: str) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.nvtx.range(name)
        return context

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

    def max_memory_bytes(self) -> int:
        return torch.cuda.max_memory_allocated(self.torch_device)

    def reset_max_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.torch_device)

    def release_cached_memory(self) -> None:
        torch.cuda.empty_cache()

    def _synchronize(self) -> None:
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
        run()
        graph = torch.cuda.CUDAGraph()
        # On the stream that is current, so that others can wait for it and it for them.
        stream = torch.cuda.current_stream(self.torch_device)
        with torch.cuda.graph(graph, pool=self._graph_pool, stream=stream):
            run()
        self._graph_pool = self._graph_pool or graph.pool()
        return graph.replay


class CudaEvent(Event):
    """A recorded CUDA event."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def is_done(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()

    def ms_since(self, start: Event) -> float:
        assert isinstance(start, CudaEvent)
        return float(start.event.elapsed_time(self.event))


class CudaStream(Stream):
    """A CUDA stream."""

    def __init__(self, name: str, stream: torch.cuda.Stream) -> None:
        self.name = name
        self.stream = stream

    def record(self, timed: bool = False) -> Event:
        event = torch.cuda.Event(enable_timing=timed)
        event.record(self.stream)
        return CudaEvent(event)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        with self.entered():
            target.copy_(source, non_blocking=True)

    def discard(self, tensor: torch.Tensor, span: Span) -> None:
        pass

    def entered(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(self.stream)
        return context
