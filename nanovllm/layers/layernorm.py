"""Root-mean-square normalisation."""

import torch
from torch import nn

from nanovllm.ops.elementwise import add_rms_norm, rms_norm


class RMSNorm(nn.Module):
    """RMSNorm over the last axis, with the residual stream's addition where one is given."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size), requires_grad=False)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the normalised `x`."""
        return rms_norm(x, self.weight, self.eps)

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the normalised `x + residual`, and that sum; `x` itself without a residual.

        May overwrite `x` and `residual`.
        """
        if residual is None:
            return rms_norm(x, self.weight, self.eps), x
        return add_rms_norm(x, residual, self.weight, self.eps)
