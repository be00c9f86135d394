"""The CPU as a device."""

import os
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch

from nanovllm.device.base import Device, Replay


class CpuDevice(Device):
    """Runs everything at once, in the calling thread and PyTorch's worker threads."""

    runs_triton = False
    records_graphs = False

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.name = _cpu_name()
        # Only with AMX tiles do bfloat16 matrix products beat float32 ones (docs/experiments.md).
        self.default_dtype = torch.bfloat16 if torch.cpu._is_amx_tile_supported() else torch.float32

    def active(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def free_memory_bytes(self) -> int:
        free = self.total_memory_bytes()
        for line in _read_lines("/proc/meminfo"):
            if line.startswith("MemAvailable:"):
                free = int(line.split()[1]) * 1024
        return min(free, _container_headroom_bytes(free))

    def total_memory_bytes(self) -> int:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def peak_memory_bytes(self, run: Callable[[], Any]) -> int:
        return 0  # activations are small beside main memory, and nothing counts them

    def release_cached_memory(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def upload(
        self, values: Any, dtype: torch.dtype, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        host = torch.as_tensor(values, dtype=dtype)
        return host if out is None else out.copy_(host)

    def capture(self, run: Callable[[], Any]) -> Replay:
        raise NotImplementedError("a CPU launches nothing that could be recorded")


def _container_headroom_bytes(default: int) -> int:
    """Return what a container's memory limit (cgroup v2) leaves, or `default` without a limit."""
    limit, used = (
        "".join(_read_lines(f"/sys/fs/cgroup/memory.{name}")) for name in ("max", "current")
    )
    return int(limit) - int(used) if limit.isdigit() and used.isdigit() else default


def _cpu_name() -> str:
    for line in _read_lines("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "CPU"


def _read_lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []
