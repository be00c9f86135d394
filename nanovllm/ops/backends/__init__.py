"""The tables of attention backends, and the choice among them by what the machine can do."""

from importlib import import_module
from typing import Any

import torch

from nanovllm.errors import BackendUnavailableError
from nanovllm.log import get_logger
from nanovllm.ops.backends.base import AttentionBackend, TileBackend

__all__ = [
    "AttentionBackend",
    "TileBackend",
    "has_dense_form",
    "resolve_backend",
    "resolve_tile_backend",
]

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
_TILE_TABLE: dict[str, str] = {
    "fa4": "nanovllm.ops.backends.flash_attn:FlashAttention4Tiles",
    "flex": "nanovllm.ops.backends.flex:FlexTiles",
    "torch": "nanovllm.ops.backends.torch_block_sparse:TorchBlockSparse",
}


def _load(name: str) -> AttentionBackend:
    backend: AttentionBackend = _class_at(_TABLE[name])()
    return backend


def _load_tile(name: str) -> TileBackend:
    backend: TileBackend = _class_at(_TILE_TABLE[name])()
    return backend


def _class_at(place: str) -> Any:
    module, _, class_name = place.partition(":")
    return getattr(import_module(module), class_name)


def reasons_against(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> list[str]:
    """Return why the backend called `name` cannot run such attention; empty if it can."""
    if name not in _TABLE:
        return [f"it has no dense form; those that have one are {', '.join(_TABLE)}"]
    return _load(name).reasons_against(device, dtype, head_dim)


def has_dense_form(name: str) -> bool:
    """Return whether there is a dense backend called `name`."""
    return name in _TABLE


def resolve_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> AttentionBackend:
    """Return the backend called `name`, or with `auto` the first that can run here.

    Raises:
        BackendUnavailableError: the named backend has no dense form or cannot run here; a named one
            is never replaced.
    """
    if name != "auto":
        if reasons := reasons_against(name, device, dtype, head_dim):
            raise BackendUnavailableError(
                f"attention_backend={name!r} cannot run here: {'; '.join(reasons)}"
            )
        return _load(name)
    for candidate in _TABLE:
        backend = _load(candidate)
        reasons = backend.reasons_against(device, dtype, head_dim)
        if not reasons:
            logger.info("attention backend: %s", candidate)
            return backend
        logger.debug("attention backend %s not used: %s", candidate, "; ".join(reasons))
    raise BackendUnavailableError(f"no attention backend runs on {device} with {dtype}")


def tile_reasons_against(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> list[str]:
    """Return why `name` cannot run such tile-sparse attention; empty if it can."""
    if name not in _TILE_TABLE:
        return [f"it has no tile-sparse form; those that have one are {', '.join(_TILE_TABLE)}"]
    return _load_tile(name).reasons_against(device, dtype, head_dim)


def resolve_tile_backend(
    name: str, device: torch.device, dtype: torch.dtype, head_dim: int
) -> TileBackend:
    """Return the tile-sparse backend called `name`, or with `auto` the first that can run here.

    Raises:
        BackendUnavailableError: the named backend has no tile-sparse form or cannot run here; a
            named one is never replaced.
    """
    if name != "auto":
        if reasons := tile_reasons_against(name, device, dtype, head_dim):
            raise BackendUnavailableError(
                f"attention_backend={name!r} cannot run tile-sparse attention here: "
                f"{'; '.join(reasons)}"
            )
        return _load_tile(name)
    refusals = []
    for candidate in _TILE_TABLE:
        reasons = tile_reasons_against(candidate, device, dtype, head_dim)
        if not reasons:
            logger.info("tile-sparse attention backend: %s", candidate)
            return _load_tile(candidate)
        refusals.append(f"{candidate} {', '.join(reasons)}")
        logger.debug("tile-sparse attention backend %s not used: %s", candidate, reasons)
    raise BackendUnavailableError(
        f"no tile-sparse attention runs on {device} with {dtype}: {'; '.join(refusals)}"
    )
