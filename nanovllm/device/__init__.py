"""The machine behind one interface: memory, streams, synchronisation, graphs, for CUDA and CPU."""

from nanovllm.device.base import Device, create_device
from nanovllm.device.hazards import HazardError
from nanovllm.device.host import HostMemory, free_host_bytes
from nanovllm.device.stream import Event, Span, Stream

__all__ = [
    "Device",
    "Event",
    "HazardError",
    "HostMemory",
    "Span",
    "Stream",
    "create_device",
    "free_host_bytes",
]
