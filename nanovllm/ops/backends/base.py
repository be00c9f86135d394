"""What an attention backend is, dense or tile-sparse."""

from abc import ABC, abstractmethod

import torch

TILE = 128
"""Tokens along either side of a tile of the attention mask."""


class AttentionBackend(ABC):
    """Dense attention with log-sum-exp by one kernel library."""

    name: str
    masks_bottom_right: bool
    """Whether `causal` works for fewer queries than keys, aligning the last rows and columns."""

    @abstractmethod
    def reasons_against(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
        """Return why this backend cannot run such attention here; empty if it can."""

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        softmax_scale: float,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute `softmax(scale * query @ key^T) @ value` and the LSE of its logits.

        Args:
            query: `[batch, q_len, num_q_heads, head_dim]`.
            key, value: `[batch, k_len, num_kv_heads, head_dim]`; heads are shared, not expanded.
            softmax_scale: factor of the logits.
            causal: mask keys after a query. `q_len == k_len` unless `masks_bottom_right`.

        Returns:
            Output like `query`, and the LSE, fp32 `[batch, num_q_heads, q_len]`.
        """


class TileBackend(ABC):
    """Causal attention inside chosen tiles, with log-sum-exp, by one kernel library."""

    name: str

    @abstractmethod
    def reasons_against(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
        """Return why this backend cannot run such attention here; empty if it can."""

    @abstractmethod
    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        tiles: torch.Tensor,
        diagonal: int,
        softmax_scale: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attend inside the kept tiles: what `ops.block_sparse` promises, of inputs it has checked.

        Args:
            query: `[q_len, num_q_heads, head_dim]`, at least one row.
            key, value: `[k_len, num_kv_heads, head_dim]`, at least one row.
            tiles: bool `[num_q_heads, num_q_tiles, num_k_tiles]`. Those wholly after their queries
                count as not kept.
            diagonal: key tile `i + diagonal` holds the very tokens of query tile i, so that inside
                it keys after a query are hidden. It may be negative, and such a tile may not exist.
            softmax_scale: factor of the logits.

        Returns:
            Output like `query`, contiguous, and the LSE, fp32 `[num_q_heads, q_len]`.
        """


def gpu_reasons(device: torch.device, dtype: torch.dtype, head_dim: int, limit: int) -> list[str]:
    """Return the reasons that all half-precision GPU kernels share."""
    reasons = []
    if device.type != "cuda":
        reasons.append(f"needs a CUDA device, not {device.type}")
    if dtype not in (torch.float16, torch.bfloat16):
        reasons.append(f"needs float16 or bfloat16, not {dtype}")
    if head_dim % 8 or head_dim > limit:
        reasons.append(
            f"needs a head_dim that is a multiple of 8 and at most {limit}, not {head_dim}"
        )
    return reasons


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Return the GPU's compute capability, (9, 0) for Hopper."""
    major, minor = torch.get_device_module(device).get_device_capability(device)
    return major, minor
