"""The GPU attention kernels inside PyTorch, called where they return the LSE."""

import torch

from nanovllm.ops.backends.base import AttentionBackend, compute_capability, gpu_reasons


class CudnnAttention(AttentionBackend):
    """cuDNN's fused attention; compiles a plan for each new pair of lengths."""

    name = "cudnn"
    masks_bottom_right = False

    def reasons_against(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
        reasons = gpu_reasons(device, dtype, head_dim, limit=128)
        if not torch.backends.cudnn.is_available():
            reasons.append("this PyTorch has no cuDNN")
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
        out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            None,
            True,
            0.0,
            causal,
            False,
            scale=softmax_scale,
        )
        batch, q_len, num_heads, _ = query.shape
        return out.transpose(1, 2), lse.view(batch, num_heads, q_len)


class AtenFlashAttention(AttentionBackend):
    """FlashAttention-2 as bundled with PyTorch."""

    name = "flash"
    masks_bottom_right = False

    def reasons_against(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
        reasons = gpu_reasons(device, dtype, head_dim, limit=256)
        if not reasons and compute_capability(device)[0] < 8:
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
        out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            0.0,
            causal,
            False,
            scale=softmax_scale,
        )
        # The kernel pads the LSE's rows to a multiple of its tile.
        return out.transpose(1, 2), lse[..., : query.shape[1]]
