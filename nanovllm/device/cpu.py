"""The CPU as a device, with streams that copy at once or, under check, as late as they may."""

import platform
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from nanovllm.device.base import Device, Replay
from nanovllm.device.hazards import CheckedStream
from nanovllm.device.host import HostMemory, free_host_bytes, read_lines, total_host_bytes
from nanovllm.device.stream import Event, Span, Stream


class CpuDevice(Device):
    """Runs everything in the calling thread and PyTorch's worker threads.

    Copies are done when they are asked for. With `NANOVLLM_CHECK_STREAMS=1` they are deferred:
    each stream is a queue that moves only when someone waits for it, as on a device whose copies
    take for ever. So a missing wait is seen in the result too.
    """

    runs_triton = False
    records_graphs = False

    def __init__(self) -> None:
        super().__init__()
        self.torch_device = torch.device("cpu")
        self.name = _cpu_name()
        # Only with AMX tiles do bfloat16 matrix products beat float32 ones (docs/experiments.md).
        self.default_dtype = torch.bfloat16 if torch.cpu._is_amx_tile_supported() else torch.float32
        self._deferred: list[_DeferredStream] = []
        self._current: list[str] = ["default"]
        compute: Stream = _EagerStream("compute", self._current)
        if self._order is not None:
            compute = CheckedStream(compute, self._order, self._poison)
        self.compute_stream = compute

    def _make_stream(self, name: str, is_urgent: bool) -> Stream:
        if self._order is None:
            return _EagerStream(name, self._current)
        stream = _DeferredStream(name, self._current)
        self._deferred.append(stream)
        return stream

    def _current_stream_name(self) -> str:
        return self._current[-1]

    def _poison(self, stream: Stream, tensor: torch.Tensor) -> None:
        tensor.fill_(float("nan"))

    def allocate_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> HostMemory:
        return HostMemory(torch.empty(shape, dtype=dtype), is_pinned=True)

    def range(self, name: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(name)

    def free_memory_bytes(self) -> int:
        return free_host_bytes()

    def total_memory_bytes(self) -> int:
        return total_host_bytes()

    def peak_memory_bytes(self, run: Callable[[], Any]) -> int:
        return 0  # activations are small beside main memory, and nothing counts them

    def max_memory_bytes(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def reset_max_memory(self) -> None:
        pass

    def release_cached_memory(self) -> None:
        pass

    def _synchronize(self) -> None:
        for stream in self._deferred:
            stream.run_until(None)

    def upload(
        self, values: Any, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        host = torch.as_tensor(values, dtype=dtype)
        return host if out is None else out.copy_(host)

    def capture(self, run: Callable[[], Any]) -> Replay:
        raise NotImplementedError("a CPU launches nothing that could be recorded")


class _EagerEvent(Event):
    """A point that is passed when it is made."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def is_done(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def ms_since(self, start: Event) -> float:
        assert isinstance(start, _EagerEvent)
        return (self._time - start._time) * 1e3


class _EagerStream(Stream):
    """Does its work in the calling thread, at once."""

    def __init__(self, name: str, current: list[str]) -> None:
        self.name = name
        self._current = current

    def record(self, timed: bool = False) -> Event:
        return _EagerEvent()

    def wait(self, event: Event) -> None:
        event.synchronize()

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        target.copy_(source)

    def discard(self, tensor: torch.Tensor, span: Span) -> None:
        pass

    @contextmanager
    def entered(self) -> Iterator[None]:
        self._current.append(self.name)
        try:
            yield
        finally:
            self._current.pop()


class _DeferredEvent(_EagerEvent):
    """A point in a queue: everything before place `end` of all that was ever queued."""

    def __init__(self, stream: "_DeferredStream", end: int) -> None:
        super().__init__()
        self._stream, self._end = stream, end

    def is_done(self) -> bool:
        return self._stream.num_done >= self._end

    def synchronize(self) -> None:
        self._stream.run_until(self._end)


class _DeferredStream(_EagerStream):
    """Queues its work, and does it when someone waits for it."""

    def __init__(self, name: str, current: list[str]) -> None:
        super().__init__(name, current)
        self.num_done = 0
        self._lock = threading.RLock()  # the device may wait while another thread's copies run
        self._queue: deque[Callable[[], Any]] = deque()

    def run_until(self, end: int | None) -> None:
        """Do the work up to place `end` of all that was ever queued; None means all."""
        with self._lock:
            while self._queue and (end is None or self.num_done < end):
                self._queue.popleft()()
                self.num_done += 1

    def record(self, timed: bool = False) -> Event:
        with self._lock:
            return _DeferredEvent(self, self.num_done + len(self._queue))

    def wait(self, event: Event) -> None:
        self._queue.append(event.synchronize)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._queue.append(lambda: target.copy_(source))


def _cpu_name() -> str:
    for line in read_lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "CPU"
