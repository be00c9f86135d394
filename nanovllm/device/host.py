"""Main memory: how much is free, and how a device reaches a piece of it."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(slots=True)
class HostMemory:
    """A tensor in main memory that a device copies from and to."""

    tensor: torch.Tensor
    is_pinned: bool
    """Whether copies run at full speed and beside kernels. On a CPU that is always so."""
    release: Callable[[], None] = lambda: None
    """Undoes the pinning. To be called when no copy is in flight, before the tensor goes."""


def total_host_bytes() -> int:
    """Return all main memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def free_host_bytes() -> int:
    """Return the main memory that a program can take, under a container's limit if there is one."""
    free = total_host_bytes()
    for line in read_lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024
    return min(free, _container_headroom_bytes(free))


def read_lines(path: str) -> list[str]:
    """Return the lines of a file of the system, none if there is no such file."""
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _container_headroom_bytes(default: int) -> int:
    """Return what a container's memory limit (cgroup v2) leaves, or `default` without a limit.

    Files that were read and wait to be read again count as used there, but give way.
    """
    limit, used = (
        "".join(read_lines(f"/sys/fs/cgroup/memory.{name}")) for name in ("max", "current")
    )
    if not (limit.isdigit() and used.isdigit()):
        return default
    cached = 0
    for line in read_lines("/sys/fs/cgroup/memory.stat"):
        if line.startswith("inactive_file "):
            cached = int(line.split()[1])
    return max(0, int(limit) - int(used) + cached)
