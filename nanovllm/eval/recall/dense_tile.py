"""Dense attention of one query tile, and what is left of it inside some of its key tiles."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.nn.functional as F

from nanovllm.ops.block_sparse import TILE


class TileRecall(NamedTuple):
    """What some key tiles keep of a query tile's attention. fp32, by query head."""

    kept: torch.Tensor
    """`[num_q_heads, num_rows]`: the share of each row's mass that they hold."""
    oracle: torch.Tensor
    """Like `kept`, if as many key tiles were chosen by the true mass of all rows together."""
    error: torch.Tensor
    """`[num_q_heads]`: sum of squares of the output's error, over rows and dimensions."""
    output: torch.Tensor
    """`[num_q_heads]`: sum of squares of the dense output."""


def measure_tile(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    softmax_scale: float,
    choices: Sequence[torch.Tensor],
) -> list[TileRecall]:
    """Return what each choice of key tiles keeps of a query tile's attention.

    Attention inside a choice has a softmax over the keys of that choice only. Works in fp32, on one
    KV head after the other: memory is a few times `num_q_heads / num_kv_heads * num_rows * k_len`
    floats.

    Args:
        query: `[num_rows, num_q_heads, head_dim]`, at most `TILE` rows.
        keys, values: `[k_len, num_kv_heads, head_dim]`, from the sequence's first token to the
            last row's own. Any dtype, any strides.
        softmax_scale: factor of the logits.
        choices: each bool `[num_q_heads, num_k_tiles]`, whether a tile of `TILE` keys is kept. The
            last tile may be partial.

    Returns:
        One result a choice. A row without a kept key keeps 0, and its output is 0. Does not
        synchronise.
    """
    num_kv_heads = keys.shape[1]
    # [num_kv_heads, heads of each, num_rows, head_dim]
    queries = query.float().transpose(0, 1).unflatten(0, (num_kv_heads, -1))
    by_kv_head = []
    for head in range(num_kv_heads):
        dense = _DenseTile.attend(
            queries[head], keys[:, head].float(), values[:, head].float(), softmax_scale
        )
        own = [tiles.unflatten(0, (num_kv_heads, -1))[head] for tiles in choices]
        by_kv_head.append([dense.keep(tiles) for tiles in own])
    return [
        TileRecall(*map(torch.cat, zip(*parts, strict=True)))
        for parts in zip(*by_kv_head, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _DenseTile:
    """Dense attention of a query tile by the query heads of one KV head."""

    weights: torch.Tensor
    """`[num_heads, num_rows, k_len]`: the softmax."""
    shares: torch.Tensor
    """`[num_heads, num_rows, num_k_tiles]`: sums of the weights by key tile."""
    values: torch.Tensor
    """`[k_len, head_dim]`."""
    output: torch.Tensor
    """`[num_heads, num_rows, head_dim]`."""

    @classmethod
    def attend(
        cls, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, softmax_scale: float
    ) -> Self:
        """Attend `[num_heads, num_rows, head_dim]` causally; the last row is at the last key."""
        num_rows, k_len = query.shape[1], len(keys)
        logits = query @ keys.T * softmax_scale
        hidden = torch.ones(num_rows, k_len, dtype=torch.bool, device=query.device)
        hidden = hidden.triu_(k_len - num_rows + 1)
        weights = logits.masked_fill_(hidden, float("-inf")).softmax(-1)
        whole = F.pad(weights, (0, -k_len % TILE))
        shares = whole.unflatten(-1, (-1, TILE)).sum(-1)
        return cls(weights, shares, values, weights @ values)

    def keep(self, tiles: torch.Tensor) -> TileRecall:
        """Return what is left with the key tiles of bool `[num_heads, num_k_tiles]`."""
        kept = (self.shares * tiles[:, None]).sum(-1)
        visible = tiles.repeat_interleave(TILE, -1)[:, None, : len(self.values)]
        # Without a kept key the sum is 0, and stays so.
        smallest = torch.finfo(kept.dtype).tiny
        output = (self.weights * visible) @ self.values / kept.clamp(min=smallest)[..., None]
        heaviest = _heaviest(self.shares.sum(1), tiles.sum(-1))
        return TileRecall(
            kept=kept,
            oracle=(self.shares * heaviest[:, None]).sum(-1),
            error=(output - self.output).square().sum((1, 2)),
            output=self.output.square().sum((1, 2)),
        )


def _heaviest(masses: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Return where the `counts`, `[num_heads]`, greatest of `[num_heads, num_k_tiles]` are."""
    rank = torch.arange(masses.shape[1], device=masses.device)
    order = masses.argsort(-1, descending=True)
    return torch.zeros_like(masses, dtype=torch.bool).scatter(-1, order, rank < counts[:, None])
