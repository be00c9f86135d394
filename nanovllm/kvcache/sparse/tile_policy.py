"""What policies share that choose tiles of the attention mask, finer than KV blocks."""

import logging
from abc import abstractmethod
from collections.abc import Sequence as Seq
from typing import Any, ClassVar

import torch

from nanovllm.kvcache.source import KVSource
from nanovllm.kvcache.sparse.policy import PolicyContext, SparsePolicy, attend_to_pieces
from nanovllm.log import get_logger
from nanovllm.metrics.density import DensityStats
from nanovllm.ops.block_sparse import TILE, block_sparse_attention, num_causal_tiles

logger = get_logger(__name__)


class TilePolicy(SparsePolicy):
    """Chooses, for each query head and tile of queries, the tiles of keys that are attended to.

    A subclass writes `select_tiles`. Where the KV cache is in host memory and read back, the values
    of only those blocks are loaded that some chosen tile needs; keys are at hand, since most
    policies choose by them. So the same tiles are computed wherever the cache lies.
    """

    supports_prefill = True
    supports_decode = False
    works_on_tiles = True
    log_name: ClassVar[str]
    """What lines of the log call the policy."""

    def __init__(self) -> None:
        self._density = DensityStats()

    @abstractmethod
    def select_tiles(self, source: KVSource, ctx: PolicyContext) -> torch.Tensor | None:
        """Return which tiles of the chunk's attention are computed; None for all.

        Chunks begin at a multiple of `TILE`. Must not synchronise, and must not depend on how the
        prompt is cut into chunks.

        Returns:
            bool `[num_q_heads, num_q_tiles, num_k_tiles]` on the query's device; key tiles count
            from the sequence's first token. Tiles after the queries are ignored.
        """

    def select_blocks(
        self, available_blocks: Seq[int], source: KVSource, ctx: PolicyContext
    ) -> Seq[int]:
        """Return the blocks that some chosen tile needs. Waits for the device."""
        tiles = self.select_tiles(source, ctx)
        if tiles is None:
            return available_blocks
        needed = _needed_blocks(tiles, len(available_blocks), ctx.block_size)
        return _pick(available_blocks, needed)

    def compute_chunked_prefill(self, source: KVSource, ctx: PolicyContext) -> torch.Tensor:
        """Attend the chunk inside the chosen tiles.

        Arguments and result as in the base class. Waits for the device only if blocks have to be
        loaded from host memory.
        """
        available = source.available_blocks
        tiles = self.select_tiles(source, ctx)
        num_causal = num_causal_tiles(len(ctx.query), ctx.num_history_tokens)
        if tiles is None:
            self._density.add_dense(ctx.layer_id, ctx.query.shape[1], num_causal)
            if ctx.layer_id == 0:
                self._density.add_blocks(len(available), len(available))
            return attend_to_pieces(source.pieces(available), ctx)
        self._density.add(ctx.layer_id, tiles, num_causal)
        selected = available
        if source.loads_blocks or ctx.layer_id == 0:
            needed = _needed_blocks(tiles, len(available), ctx.block_size)
            if source.loads_blocks:
                selected = _pick(available, needed)
            if ctx.layer_id == 0:
                self._density.add_blocks(len(available), needed.sum())
                self._log(needed)
        keys, values = source.load(selected)
        out, _ = block_sparse_attention(
            ctx.query,
            keys,
            values,
            tiles,
            ctx.num_history_tokens,
            0,
            ctx.softmax_scale,
            ctx.tile_backend,
        )
        return out

    def get_density_stats(self) -> dict[str, Any]:
        """Return what was chosen since the last reset. Waits for the device.

        Returns:
            The spec's keys, counted in the first layer: `total_available_blocks`,
            `total_selected_blocks`, `num_chunks` and `overall_density`, the block density; and
            `tile_density`, `tile_density_by_layer` and `tile_density_by_head` (a list of heads for
            each layer): tiles computed / causal tiles. A density is 1 where nothing was counted.
        """
        return self._density.summary()

    def print_density_stats(self) -> None:
        """Print `get_density_stats`, layer by layer."""
        print(self._density.describe())

    def stats(self) -> dict[str, Any]:
        return self.get_density_stats()

    def reset_stats(self) -> None:
        self._density.reset()

    def _log(self, needed: torch.Tensor) -> None:
        if not logger.isEnabledFor(logging.DEBUG):
            return  # to count the blocks is to wait for the device
        available, selected = len(needed), int(needed.sum())
        logger.debug(
            "[%s] chunk=%d, available=%d, selected=%d, chunk_density=%.1f%%",
            self.log_name,
            self._density.num_chunks,
            available,
            selected,
            100 * selected / max(1, available),
        )


def _needed_blocks(tiles: torch.Tensor, num_blocks: int, block_size: int) -> torch.Tensor:
    """Return which of the history's first blocks hold a chosen tile, bool `[num_blocks]`."""
    per_block = block_size // TILE
    return tiles[..., : num_blocks * per_block].any(0).any(0).view(num_blocks, per_block).any(1)


def _pick(available: Seq[int], chosen: torch.Tensor) -> list[int]:
    return [block for block, keep in zip(available, chosen.tolist(), strict=True) if keep]
