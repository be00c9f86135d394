"""FlashAttention packages: `flash-attn-4` and `flash-attn`. The only file that imports them.

Both install into the namespace `flash_attn`: FlashAttention-4 as `flash_attn.cute`.
"""

from importlib.util import find_spec

import torch

from nanovllm.ops.backends.base import AttentionBackend, compute_capability, gpu_reasons


class FlashAttention4(AttentionBackend):
    """`flash-attn-4`, CuTe kernels compiled at first use (about 4 s); Hopper and Blackwell."""

    name = "fa4"
    masks_bottom_right = True

    def reasons_against(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
        reasons = gpu_reasons(device, dtype, head_dim, limit=128)
        if not _has_module("flash_attn.cute.interface"):
            reasons.append("flash-attn-4 is not installed: pip install 'nanovllm[cuda]'")
        elif not reasons and compute_capability(device)[0] not in (9, 10):
            reasons.append("needs a Hopper or Blackwell GPU (compute capability 9 or 10)")
        return reasons

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        softmax_scale: float,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from flash_attn.cute.interface import flash_attn_func

        out, lse = flash_attn_func(
            query, key, value, softmax_scale=softmax_scale, causal=causal, return_lse=True
        )[:2]
        return out, lse


class FlashAttention2(AttentionBackend):
    """`flash-attn`, compiled from source; Ampere and later."""

    name = "fa2"
    masks_bottom_right = True

    def reasons_against(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
        reasons = gpu_reasons(device, dtype, head_dim, limit=256)
        if not _has_module("flash_attn.flash_attn_interface"):
            reasons.append("flash-attn is not installed: pip install 'nanovllm[flash-attn]'")
        elif not reasons and compute_capability(device)[0] < 8:
            reasons.append("needs compute capability 8 or later")
        return reasons

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        softmax_scale: float,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        from flash_attn.flash_attn_interface import flash_attn_func

        out, lse, _ = flash_attn_func(
            query,
            key,
            value,
            softmax_scale=softmax_scale,
            causal=causal,
            return_attn_probs=True,
        )
        return out, lse


def _has_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # a parent package is missing
        return False
