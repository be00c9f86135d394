"""What the engine asks of a device."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from nanovllm.errors import ConfigError

Replay = Callable[[], None]


class Device(ABC):
    """A device that computes. Everything above it is the same code for CUDA and CPU."""

    torch_device: torch.device
    name: str
    """The hardware's name."""
    default_dtype: torch.dtype | None
    """The dtype that `dtype="auto"` means here; None takes the checkpoint's."""
    runs_triton: bool
    """Whether Triton kernels run here; elsewhere plain torch does their work."""
    records_graphs: bool
    """Whether `capture` works: work can be recorded once and replayed without launching it."""

    @abstractmethod
    def active(self) -> AbstractContextManager[Any]:
        """Return a context in which new work goes to this device, whatever was current before."""

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
    def release_cached_memory(self) -> None:
        """Give memory that PyTorch keeps for later allocations back to the system."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work given to the device is done."""

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
