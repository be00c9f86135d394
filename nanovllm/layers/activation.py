"""The gated activation of Llama-family MLPs."""

import torch
from torch import nn

from nanovllm.ops.elementwise import silu_and_mul


class SiluAndMul(nn.Module):
    """`silu(gate) * up` of a tensor that holds both, the gate first (SwiGLU; Shazeer, 2020)."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Map `[n, 2 * m]` to `[n, m]`."""
        return silu_and_mul(gate_up)
