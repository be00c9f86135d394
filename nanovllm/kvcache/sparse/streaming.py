"""Sinks and a window: a token attends to the prompt's first tokens and to those just before it."""

import torch

from nanovllm.kvcache.source import KVSource
from nanovllm.kvcache.sparse.policy import PolicyContext
from nanovllm.kvcache.sparse.tile_policy import TilePolicy
from nanovllm.ops.block_sparse import TILE, causal_tiles


class StreamingPolicy(TilePolicy):
    """The pattern of StreamingLLM (Xiao et al., 2023), in whole tiles.

    Blind to what lies between, so prefill loses needles there; decode is dense. A lower bound for
    other policies, and the example of docs/writing-a-policy.md.

    Args:
        num_sink_tokens: tokens from the prompt's first on that everybody sees.
        window_tokens: tokens before a query tile that it sees. Both are rounded up to tiles.
    """

    log_name = "Streaming"

    def __init__(self, num_sink_tokens: int = 128, window_tokens: int = 4096) -> None:
        super().__init__()
        self._sink_tiles = -(-num_sink_tokens // TILE)
        self._window_tiles = -(-window_tokens // TILE)

    def select_tiles(self, source: KVSource, ctx: PolicyContext) -> torch.Tensor:
        q_len, num_q_heads, _ = ctx.query.shape
        q_offset, device = ctx.num_history_tokens, ctx.query.device
        visible = causal_tiles(q_len, q_offset + q_len, q_offset, 0, device)
        num_q_tiles, num_k_tiles = visible.shape
        k_tile = torch.arange(num_k_tiles, device=device)
        q_tile = q_offset // TILE + torch.arange(num_q_tiles, device=device)[:, None]
        kept = (k_tile < self._sink_tiles) | (k_tile >= q_tile - self._window_tiles)
        return (kept & visible).expand(num_q_heads, -1, -1)
