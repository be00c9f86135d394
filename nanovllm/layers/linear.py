"""Linear layers: several of a checkpoint's in one product, weights packed for the CPU."""

from collections.abc import Mapping

import torch
from torch import nn

from nanovllm.ops.linear import linear

_PACKED_FOR_ROWS = 64  # oneDNN's layout for this many rows served 1 to 4096 well


class Linear(nn.Module):
    """`x @ weight.T + bias`, and the concatenation of the checkpoint's layers that it stands for.

    `parts` maps the name of each layer in the checkpoint to its number of outputs; the rows of
    `weight` are theirs in that order. One entry makes an ordinary linear layer.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool = False) -> None:
        super().__init__()
        self.parts = dict(parts)
        out_features = sum(parts.values())
        self.weight = nn.Parameter(torch.empty(out_features, in_features), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(out_features), requires_grad=False) if bias else None
        self._packed: torch.Tensor | None = None

    def pack(self) -> None:
        """Reorder the weight once as the CPU's matrix kernels read it, where that pays.

        PyTorch otherwise reorders at each call, and computes bfloat16 products of one row 20 times
        slower (docs/experiments.md). The plain weight is given up, unless another layer shares it.
        """
        if _can_pack(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(
                self.weight.detach(), _PACKED_FOR_ROWS
            )
            self.weight = nn.Parameter(torch.empty(0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map `[n, in_features]` to `[n, out_features]`."""
        if self._packed is None:
            return linear(x, self.weight, self.bias)
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return out

    def part(self, x: torch.Tensor, name: str) -> torch.Tensor:
        """Map `[n, in_features]` to the outputs of one of `parts`."""
        first = 0
        for part, size in self.parts.items():
            if part == name:
                break
            first += size
        rows = slice(first, first + self.parts[name])
        if self._packed is None:
            return linear(x, self.weight[rows], None if self.bias is None else self.bias[rows])
        whole: torch.Tensor = self(x)
        return whole[:, rows].contiguous()


def _can_pack(weight: torch.Tensor) -> bool:
    """Return whether packing pays: for half precision. An fp32 row is faster through MKL."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return False
