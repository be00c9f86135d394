"""XAttention: the tiles that hold most of an estimated attention mass."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Self

import torch

from nanovllm.errors import ConfigError
from nanovllm.kvcache.source import KVSource
from nanovllm.kvcache.sparse.policy import PolicyContext
from nanovllm.kvcache.sparse.tile_policy import TilePolicy
from nanovllm.ops.block_sparse import TILE, causal_tiles
from nanovllm.ops.tile_estimate import estimate_tiles
from nanovllm.ops.tile_selection import select_tiles


@dataclass(frozen=True, slots=True)
class Parameters:
    """What a choice of tiles goes by; see `XAttentionBSAPolicy`."""

    threshold: float
    stride: int
    guard: float


DEFAULTS: Mapping[str, Parameters] = MappingProxyType(
    {
        "row": Parameters(threshold=0.85, stride=16, guard=0.5),
        "group": Parameters(threshold=0.95, stride=8, guard=1.0),
    }
)
"""By estimator. Those of `row` cost 0.4 points of 100 over eleven tasks of RULER, 1.0 without those
that count words, and most at needles among needles (docs/accuracy.md); those of `group` are the
spec's."""


class XAttentionBSAPolicy(TilePolicy):
    """Estimates each tile's attention mass and keeps the heaviest tiles (Xu et al., 2025).

    Args:
        threshold: share of a query tile's mass that its kept tiles hold, or a tensor
            `[num_layers, num_q_heads]` of shares; from 1 on attention is dense. None, as for
            `stride` and `guard`: what `DEFAULTS` has for the estimator.
        stride: the estimate looks at one of so many products of a query and a key.
        chunk_size: queries that are estimated at a time, a multiple of `TILE`; bounds memory.
        estimator: `"row"`, a softmax for each row, or `"group"`, XAttention's antidiagonal sums.
        guard: keep also tiles into which some row puts more than this share of its mass; 1: none.
        vote_threshold: drop blocks of the history that no more than this share of (KV head, query
            tile) pairs want, but for the first and last; 0 drops none. The only part of the choice
            that depends on how the prompt is cut into chunks.
        dense_layers: layers, from the first on, that attend densely.
        min_len: queries at positions before this attend densely; rounded up to tiles.

    Raises:
        ConfigError: there is no such estimator.
    """

    log_name = "XAttn"

    def __init__(
        self,
        threshold: float | torch.Tensor | None = None,
        stride: int | None = None,
        chunk_size: int = 16384,
        *,
        estimator: str = "row",
        guard: float | None = None,
        vote_threshold: float = 0.0,
        dense_layers: int = 0,
        min_len: int = 0,
    ) -> None:
        super().__init__()
        if estimator not in DEFAULTS:
            raise ConfigError(f"estimator={estimator!r} is none of {', '.join(DEFAULTS)}")
        defaults = DEFAULTS[estimator]
        self.threshold = defaults.threshold if threshold is None else threshold
        self.stride = defaults.stride if stride is None else stride
        self.guard = defaults.guard if guard is None else guard
        self.chunk_size = chunk_size
        self.estimator = estimator
        self.vote_threshold = vote_threshold
        self.dense_layers = dense_layers
        self.min_len = min_len

    @classmethod
    def from_config(cls, config: Any) -> Self:
        return cls(
            threshold=config.sparse_threshold,
            stride=config.sparse_stride,
            chunk_size=config.sparse_chunk_size,
            estimator=config.sparse_estimator,
            guard=config.sparse_guard,
            vote_threshold=config.sparse_vote_threshold,
            dense_layers=config.sparse_dense_layers,
            min_len=config.sparse_min_len,
        )

    def select_tiles(self, source: KVSource, ctx: PolicyContext) -> torch.Tensor | None:
        q_len, q_offset = len(ctx.query), ctx.num_history_tokens
        # Of the chunk's query tiles, those whose tokens come before `min_len`.
        num_dense = max(0, -(-self.min_len // TILE) - q_offset // TILE)
        if ctx.layer_id < self.dense_layers or num_dense * TILE >= q_len:
            return None
        first = num_dense * TILE
        keys = source.keys()
        masses, peaks = estimate_tiles(
            ctx.query[first:],
            keys,
            q_offset + first,
            self.estimator,
            self.stride,
            ctx.softmax_scale,
            with_peaks=self.guard < 1,
            chunk_size=self.chunk_size,
        )
        tiles = self.keep(masses, peaks, (q_offset + first) // TILE, ctx.layer_id)
        if num_dense:
            dense = causal_tiles(first, len(keys), q_offset, 0, tiles.device)
            tiles = torch.cat([dense.expand(len(tiles), -1, -1), tiles], 1)
        if self.vote_threshold > 0:
            tiles = self._drop_outvoted(tiles, keys.shape[1], ctx)
        return tiles

    def keep(
        self, masses: torch.Tensor, peaks: torch.Tensor | None, q_tile0: int, layer_id: int
    ) -> torch.Tensor:
        """Return which tiles a layer keeps by their masses and, if guarded, their peaks.

        Arguments and result as of `ops.tile_selection.select_tiles`.
        """
        threshold = self.threshold
        if isinstance(threshold, torch.Tensor):
            # Kept on the device, so that no layer has to copy it there.
            self.threshold = threshold = threshold.to(masses.device)
            threshold = threshold[layer_id]
        gamma = None if peaks is None else self.guard
        return select_tiles(masses, threshold, q_tile0, peaks, gamma)

    def _drop_outvoted(
        self, tiles: torch.Tensor, num_kv_heads: int, ctx: PolicyContext
    ) -> torch.Tensor:
        """Drop the tiles of history blocks that too few (KV head, query tile) pairs want."""
        num_blocks, per_block = ctx.num_history_tokens // ctx.block_size, ctx.block_size // TILE
        if not num_blocks:
            return tiles
        history = tiles[..., : num_blocks * per_block]
        # A query head's wish is its KV head's. [num_kv_heads, num_q_tiles, num_blocks]
        wants = history.unflatten(2, (num_blocks, per_block)).any(3)
        wants = wants.unflatten(0, (num_kv_heads, -1)).any(1)
        stays = wants.float().mean((0, 1)) > self.vote_threshold
        stays[0] = stays[-1] = True
        history &= stays.repeat_interleave(per_block)
        return tiles
