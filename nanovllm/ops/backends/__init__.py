"""The table of attention backends, and the choice among them by what the machine can do."""

from importlib import import_module

import torch

from nanovllm.errors import BackendUnavailableError
from nanovllm.log import get_logger
from nanovllm.ops.backends.base import AttentionBackend

__all__ = ["AttentionBackend", "resolve_backend"]

logger = get_logger(__name__)

# Fastest first, as measured on an H200; `auto` takes the first without a reason against it. A
# module is imported when its row is asked, so that a missing package costs nothing until then.
_TABLE: dict[str, str] = {
    "fa4": "nanovllm.ops.backends.flash_attn:FlashAttention4",
    "cudnn": "nanovllm.ops.backends.aten:CudnnAttention",
    "fa2": "nanovllm.ops.backends.flash_attn:FlashAttention2",
    "flash": "nanovllm.ops.backends.aten:AtenFlashAttention",
    "torch": "nanovllm.ops.backends.torch_attention:TorchAttention",
}


def _load(name: str) -> AttentionBackend:
    module, _, class_name = _TABLE[name].partition(":")
    backend: AttentionBackend = getattr(import_module(module), class_name)()
    return backend


def reasons_against(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> list[str]:
    """Return why the backend called `name` cannot run such attention; empty if it can."""
    return _load(name).reasons_against(device, dtype, head_dim)


def resolve_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> AttentionBackend:
    """Return the backend called `name`, or with `auto` the first that can run here.

    Raises:
        BackendUnavailableError: the named backend cannot run here; a named one is never replaced.
    """
    if name != "auto":
        backend = _load(name)
        if reasons := backend.reasons_against(device, dtype, head_dim):
            raise BackendUnavailableError(
                f"attention_backend={name!r} cannot run here: {'; '.join(reasons)}"
            )
        return backend
    for candidate in _TABLE:
        backend = _load(candidate)
        reasons = backend.reasons_against(device, dtype, head_dim)
        if not reasons:
            logger.info("attention backend: %s", candidate)
            return backend
        logger.debug("attention backend %s not used: %s", candidate, "; ".join(reasons))
    raise BackendUnavailableError(f"no attention backend runs on {device} with {dtype}")
