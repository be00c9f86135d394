"""A policy that remembers which tiles it chose."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from nanovllm.kvcache.sparse.xattn_bsa import XAttentionBSAPolicy
from nanovllm.ops.block_sparse import TILE


class Recorder(XAttentionBSAPolicy):
    """Remembers the tiles of every prompt."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.forget()

    def forget(self) -> None:
        """Begin anew: what an engine computed to measure its memory is no prompt."""
        self.rows: dict[tuple[int, int, int], torch.Tensor] = {}
        """Of prompt, layer and query tile; prompts count in the order in which they began."""
        self._num_prompts: Counter[int] = Counter()

    def select_tiles(self, source: Any, ctx: Any) -> torch.Tensor | None:
        tiles = super().select_tiles(source, ctx)
        assert tiles is not None
        first = ctx.num_history_tokens // TILE
        # Of prompts that are computed together only the last one that began is not whole.
        self._num_prompts[ctx.layer_id] += not first
        prompt = self._num_prompts[ctx.layer_id] - 1
        for i in range(tiles.shape[1]):
            self.rows[prompt, ctx.layer_id, first + i] = tiles[:, i, : first + i + 1].clone()
        return tiles
