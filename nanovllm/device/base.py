"""What the engine asks of a device."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from nanovllm.device.hazards import HOST, CheckedStream, StreamOrder
from nanovllm.device.host import HostMemory
from nanovllm.device.stream import Span, Stream
from nanovllm.errors import ConfigError

Replay = Callable[[], None]


class Device(ABC):
    """A device that computes. Everything above it is the same code for CUDA and CPU.

    With `NANOVLLM_CHECK_STREAMS=1` in the environment every access to a shared buffer is checked
    for its order (`hazards`), and buffers whose content is wanted no more are poisoned.
    """

    torch_device: torch.device
    name: str
    """The hardware's name."""
    default_dtype: torch.dtype | None
    """The dtype that `dtype="auto"` means here; None takes the checkpoint's."""
    runs_triton: bool
    """Whether Triton kernels run here; elsewhere plain torch does their work."""
    records_graphs: bool
    """Whether `capture` works: work can be recorded once and replayed without launching it."""

    compute_stream: Stream
    """Where all kernels run."""

    def __init__(self) -> None:
        checked = os.environ.get("NANOVLLM_CHECK_STREAMS") == "1"
        self._order = StreamOrder() if checked else None

    @property
    def checks_order(self) -> bool:
        """Whether accesses to shared buffers are checked."""
        return self._order is not None

    def active(self) -> AbstractContextManager[Any]:
        """Return a context in which kernels go to this device's `compute_stream`.

        Whatever was current before; entered once for a whole step.
        """
        return self.compute_stream.entered()

    def new_stream(self, name: str, is_urgent: bool = False) -> Stream:
        """Return a stream beside the compute stream. Names of a device's streams differ.

        Args:
            name: its name.
            is_urgent: whether its kernels go first where those of others wait for room too.
        """
        stream = self._make_stream(name, is_urgent)
        return CheckedStream(stream, self._order, self._poison) if self._order else stream

    def touch(self, *, reads: Span | None = None, writes: Span | None = None) -> None:
        """Say which buffers the kernels launched next use. Does nothing unless order is checked.

        Raises:
            HazardError: the current stream has not waited for the last use of a buffer.
        """
        if self._order is not None:
            name = self._current_stream_name()
            self._order.access(name, [reads] if reads else (), [writes] if writes else ())

    def host_reads(self, span: Span) -> None:
        """Say which buffers the host is about to read, like `touch`."""
        if self._order is not None:
            self._order.access(HOST, reads=[span])

    @abstractmethod
    def _make_stream(self, name: str, is_urgent: bool) -> Stream:
        """Return a new stream without checks."""

    @abstractmethod
    def _current_stream_name(self) -> str:
        """Return the name of the stream that kernels go to."""

    @abstractmethod
    def _synchronize(self) -> None:
        """Wait until all work given to the device is done."""

    @abstractmethod
    def _poison(self, stream: Stream, tensor: torch.Tensor) -> None:
        """Fill a tensor with NaN, not later than at this point of `stream`."""

    @abstractmethod
    def allocate_host(self, shape: tuple[int, ...], dtype: torch.dtype) -> HostMemory:
        """Return main memory for asynchronous copies, its content undefined.

        Takes about a second for a few GiB; may be called from any thread. Memory that the system
        refuses to pin comes back unpinned.
        """

    @abstractmethod
    def range(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that a profiler shows by name: NVTX on CUDA, PyTorch's on a CPU."""

    @abstractmethod
    def free_memory_bytes(self) -> int:
        """Return the memory that new allocations can take, PyTorch's own cache included."""

    @abstractmethod
    def total_memory_bytes(self) -> int:
        """Return all memory of the device."""

    @abstractmethod
    def peak_memory_bytes(self, run: Callable[[], Any]) -> int:
        """Call `run` and return the most bytes that were allocated meanwhile, beyond before."""

    @abstractmethod
    def max_memory_bytes(self) -> int:
        """Return the most bytes in use since the start or `reset_max_memory`.

        On a CPU that is the memory of the whole process, since its start.
        """

    @abstractmethod
    def reset_max_memory(self) -> None:
        """Let `max_memory_bytes` begin anew."""

    @abstractmethod
    def release_cached_memory(self) -> None:
        """Give memory that PyTorch keeps for later allocations back to the system."""

    def synchronize(self) -> None:
        """Wait until all work given to the device is done."""
        self._synchronize()
        if self._order is not None:
            self._order.wait_for_all()

    @abstractmethod
    def upload(
        self, values: Any, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `values`, a list or numpy array, as a tensor on the device: `out` if one is given.

        Does not wait for the copy; work that uses the tensor is ordered after it.
        """

    @abstractmethod
    def capture(self, run: Callable[[], Any]) -> Replay:
        """Record the work of `run` and return what repeats it on the same tensors.

        Only where `records_graphs`.
        """


def create_device(name: str) -> Device:
    """Return the device called `name`: `auto`, `cpu`, `cuda` or `cuda:N`.

    Raises:
        ConfigError: a CUDA device is asked for that PyTorch does not see.
    """
    from nanovllm.device.cpu import CpuDevice
    from nanovllm.device.cuda import CudaDevice

    if name == "cpu" or (name == "auto" and CudaDevice.count() == 0):
        return CpuDevice()
    index = int(name.partition(":")[2] or 0)
    if index >= CudaDevice.count():
        raise ConfigError(
            f"device={name!r}: PyTorch {torch.__version__} sees {CudaDevice.count()} CUDA devices. "
            'Use device="cpu", or install a CUDA build of PyTorch and a driver.'
        )
    return CudaDevice(index)
