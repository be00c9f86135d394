"""Attention in plain PyTorch, for any device, dtype and head size."""

import torch

from nanovllm.ops import reference
from nanovllm.ops.backends.base import AttentionBackend

_MAX_LOGITS = 1 << 28  # elements of one piece's logits on a GPU: 1 GiB in fp32


class TorchAttention(AttentionBackend):
    """PyTorch's CPU flash kernel on a CPU; elsewhere the reference, in pieces of query rows."""

    name = "torch"
    masks_bottom_right = False

    def reasons_against(self, device: torch.device, dtype: torch.dtype, head_dim: int) -> list[str]:
        return []

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        softmax_scale: float,
        causal: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if query.device.type == "cpu":
            return _cpu_flash(query, key, value, softmax_scale, causal)
        batch, q_len, num_heads, _ = query.shape
        rows = max(1, _MAX_LOGITS // (batch * num_heads * key.shape[1]))
        pieces = []
        for start in range(0, q_len, rows):
            stop = min(start + rows, q_len)
            visible = key.shape[1] - (q_len - stop if causal else 0)
            pieces.append(
                reference.attention_with_lse(
                    query[:, start:stop],
                    key[:, :visible],
                    value[:, :visible],
                    softmax_scale,
                    causal,
                )
            )
        outs, lses = zip(*pieces, strict=True)
        return torch.cat(outs, dim=1), torch.cat(lses, dim=2)


def _cpu_flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    softmax_scale: float,
    causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, q_len, num_q_heads, head_dim = query.shape
    num_kv_heads = key.shape[2]
    group = num_q_heads // num_kv_heads
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    k, v = key.transpose(1, 2), value.transpose(1, 2)
    # The kernel has no GQA of its own.
    if q_len == 1:  # the heads of a group become the rows of one head
        out, lse = kernel(
            query.view(batch, num_kv_heads, group, head_dim), k, v, 0.0, False, scale=softmax_scale
        )
    else:  # the KV heads become the batch, and a group's heads share one through a stride of 0
        q = query.unflatten(2, (num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(0, 1)
        k, v = (t.flatten(0, 1)[:, None].expand(-1, group, -1, -1) for t in (k, v))
        out, lse = kernel(q, k, v, 0.0, causal, scale=softmax_scale)
        out = out.unflatten(0, (batch, num_kv_heads)).permute(0, 3, 1, 2, 4)
    return out.reshape(query.shape), lse.reshape(batch, num_q_heads, q_len)
