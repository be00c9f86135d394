"""Token embedding. The output head is a `Linear` that may share its weight."""

import torch
import torch.nn.functional as F
from torch import nn


class Embedding(nn.Module):
    """Rows of a table, `[vocab_size, hidden_size]`."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size), requires_grad=False)

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Map integer `[n]` to `[n, hidden_size]`."""
        return F.embedding(token_ids, self.weight)
