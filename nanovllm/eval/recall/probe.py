"""The policy that attends densely and looks at what other policies would keep."""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from random import Random

import torch

from nanovllm.eval.recall.dense_tile import measure_tile
from nanovllm.eval.recall.figures import Recall
from nanovllm.kvcache.source import KVPiece, KVSource
from nanovllm.kvcache.sparse.policy import PolicyContext, SparsePolicy, attend_to_pieces
from nanovllm.kvcache.sparse.tile_policy import TilePolicy
from nanovllm.ops.block_sparse import TILE, num_causal_tiles


class RecallProbe(SparsePolicy):
    """Attends densely, and measures what other policies would keep of the same attention.

    Args:
        policies: by name. They choose tiles and attend to nothing.
        layers: those to measure; None for all. No policy is asked in another one.
    """

    supports_prefill = True
    supports_decode = False
    works_on_tiles = True

    def __init__(
        self, policies: Mapping[str, TilePolicy], layers: Collection[int] | None = None
    ) -> None:
        self.query_tiles: Collection[int] = ()
        """The query tiles to measure, counted from a prompt's first token; those that a prompt does
        not have are left out. Tile densities are of all query tiles."""
        self.recalls: dict[str, Recall] = {}
        """By name of the policy, since the last `reset_stats`."""
        self._policies = dict(policies)
        self._layers = layers
        self.reset_stats()

    def reset_stats(self) -> None:
        """Forget what was measured."""
        self.recalls = {name: Recall() for name in self._policies}

    def select_blocks(
        self, available_blocks: Seq[int], source: KVSource, ctx: PolicyContext
    ) -> Seq[int]:
        return available_blocks

    def compute_chunked_prefill(self, source: KVSource, ctx: PolicyContext) -> torch.Tensor:
        is_measured = self._layers is None or ctx.layer_id in self._layers
        # Keys come before values: policies ask for keys only.
        choices = self._choose(source, ctx) if is_measured else []
        keys, values = source.load(source.available_blocks)
        if is_measured:
            self._measure(keys, values, choices, ctx)
        return attend_to_pieces([KVPiece(keys, values, holds_chunk=True)], ctx)

    def _choose(self, source: KVSource, ctx: PolicyContext) -> list[torch.Tensor]:
        """Return the tiles that each policy chooses, in the order of the policies."""
        q_len, num_q_heads, _ = ctx.query.shape
        num_causal = num_causal_tiles(q_len, ctx.num_history_tokens)
        shape = (num_q_heads, -(-q_len // TILE), -(-(ctx.num_history_tokens + q_len) // TILE))
        choices = []
        for name, policy in self._policies.items():
            tiles = policy.select_tiles(source, ctx)
            if tiles is None:
                tiles = ctx.query.new_ones(shape, dtype=torch.bool)
            self.recalls[name].density.add(ctx.layer_id, tiles, num_causal)
            choices.append(tiles)
        return choices

    def _measure(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        choices: list[torch.Tensor],
        ctx: PolicyContext,
    ) -> None:
        first = ctx.num_history_tokens // TILE
        for row, query in enumerate(ctx.query.split(TILE)):
            q_tile = first + row
            if q_tile not in self.query_tiles:
                continue
            visible = slice(0, q_tile * TILE + len(query))
            chosen = [tiles[:, row, : q_tile + 1] for tiles in choices]
            found = measure_tile(query, keys[visible], values[visible], ctx.softmax_scale, chosen)
            for recall, tile in zip(self.recalls.values(), found, strict=True):
                recall.add(ctx.layer_id, tile)


def draw_query_tiles(num_tokens: int, count: int, random: Random) -> list[int]:
    """Draw query tiles of a prompt, in ascending order; all that there are if they are fewer.

    None is of the prompt's first quarter: there is little that could be skipped.
    """
    num_tiles = -(-num_tokens // TILE)
    candidates = range(num_tiles // 4, num_tiles)
    return sorted(random.sample(candidates, min(count, len(candidates))))
