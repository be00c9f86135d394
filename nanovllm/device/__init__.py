"""The machine behind one interface: memory, synchronisation, graphs, for CUDA and CPU."""

from nanovllm.device.base import Device, create_device

__all__ = ["Device", "create_device"]
