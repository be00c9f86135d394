"""A policy that remembers which tiles it chose."""

from __future__ import annotations

from typing import Any

import torch

from nanovllm.kvcache.sparse.xattn_bsa import XAttentionBSAPolicy
from nanovllm.ops.block_sparse import TILE


class Recorder(XAttentionBSAPolicy):
    """Remembers the tiles of each layer's last prompt, by query tile."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rows: dict[tuple[int, int], torch.Tensor] = {}

    def select_tiles(self, source: Any, ctx: Any) -> torch.Tensor | None:
        tiles = super().select_tiles(source, ctx)
        assert tiles is not None
        first = ctx.num_history_tokens // TILE
        if not first:
            self.rows = {key: rows for key, rows in self.rows.items() if key[0] != ctx.layer_id}
        for i in range(tiles.shape[1]):
            self.rows[ctx.layer_id, first + i] = tiles[:, i, : first + i + 1].clone()
        return tiles
