"""The attention layer: stores keys and values, then lets the policy attend.

What a step needs for that goes down the layers as an `AttentionStep`, which has one form for a KV
cache on the device and one for a cache in host memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from nanovllm.kvcache.attention_batch import AttentionBatch
from nanovllm.kvcache.chunk import Chunk
from nanovllm.kvcache.hot_pages import HotPages
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.kvcache.resident import LayerKV
from nanovllm.kvcache.source import OffloadedSource, ResidentSource
from nanovllm.kvcache.sparse.policy import PolicyContext, SparsePolicy
from nanovllm.ops.backends import AttentionBackend, TileBackend
from nanovllm.ops.elementwise import rotate, rotate_and_store
from nanovllm.ops.page_index import update_page_index

Queries = Callable[[torch.Tensor], torch.Tensor]


class AttentionStep(ABC):
    """What attention needs of a step, handed down through the layers."""

    looks_ahead = False
    """Whether `look_ahead` is to be called."""

    def look_ahead(self, layer_id: int, normed: torch.Tensor, queries: Queries) -> None:
        """Begin to bring here what a layer will need, while the MLP before it is computed.

        Args:
            layer_id: the layer after the one whose attention is done.
            normed: `[num_tokens, hidden_size]`, what it would see if it were not for that MLP.
            queries: makes its queries of that, `[num_tokens, num_q_heads, head_dim]`, without
                rotary embedding.
        """
        raise NotImplementedError(f"{type(self).__name__} does not look ahead")

    @abstractmethod
    def attend(self, layer_id: int, heads: torch.Tensor) -> torch.Tensor:
        """Store a step's keys and values in the cache and attend each token to its sequence.

        Args:
            layer_id: which layer of the cache.
            heads: `[num_tokens, num_q_heads + 2 * num_kv_heads, head_dim]`: queries, keys and
                values without rotary embedding. Overwritten.

        Returns:
            `[num_tokens, num_q_heads, head_dim]`, contiguous. Does not wait for the device;
            with offload it may wait for host memory that is still being made.
        """


@dataclass(frozen=True, slots=True)
class Attention:
    """Which attention is computed, and by which kernels: the same for all steps of an engine."""

    prefill: SparsePolicy
    decode: SparsePolicy
    backend: AttentionBackend
    tile_backend: TileBackend | None
    """None if no policy works on tiles."""

    @property
    def caches_answers(self) -> bool:
        """Whether decode attends as prefill does, so that its blocks may serve other prompts."""
        return not self.prefill.works_on_tiles and self.decode.pages is None


@dataclass(frozen=True, slots=True)
class ResidentAttention(AttentionStep):
    """A step of many sequences whose KV cache is on the device."""

    batch: AttentionBatch
    cache: list[LayerKV]
    attention: Attention
    cos: torch.Tensor
    """fp32 `[num_tokens, head_dim / 2]`: rotary angles of the step's tokens."""
    sin: torch.Tensor

    def attend(self, layer_id: int, heads: torch.Tensor) -> torch.Tensor:
        layer_kv = self.cache[layer_id]
        batch, attention = self.batch, self.attention
        query = rotate_and_store(
            heads, layer_kv.keys, layer_kv.values, batch.slot_mapping, self.cos, self.sin
        )
        if layer_kv.page_index is not None:
            assert attention.decode.pages is not None
            update_page_index(
                layer_kv.page_index,
                layer_kv.keys,
                batch.slot_mapping,
                batch.slot_mapping,
                attention.decode.pages.page_size,
            )
        scale = query.shape[-1] ** -0.5
        outputs = []
        for segment in batch.prefills:
            ctx = PolicyContext(
                layer_id=layer_id,
                query=query[segment.rows],
                num_history_tokens=segment.num_history_tokens,
                block_size=segment.block_size,
                softmax_scale=scale,
                backend=attention.backend,
                tile_backend=attention.tile_backend,
            )
            source = ResidentSource(layer_kv, segment)
            outputs.append(attention.prefill.compute_chunked_prefill(source, ctx))
        if (decodes := batch.decodes) is not None:
            rows = query[decodes.rows]
            outputs.append(attention.decode.compute_decode(rows, layer_kv, decodes, scale))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


@dataclass(frozen=True, slots=True)
class OffloadedAttention(AttentionStep):
    """A chunk of one sequence whose KV cache is in host memory."""

    chunk: Chunk
    engine: OffloadEngine
    num_layers: int
    attention: Attention
    cos: torch.Tensor
    """fp32 `[num_tokens, head_dim / 2]`: rotary angles of the chunk's tokens."""
    sin: torch.Tensor

    def attend(self, layer_id: int, heads: torch.Tensor) -> torch.Tensor:
        chunk, engine, attention = self.chunk, self.engine, self.attention
        target = engine.recent.begin(layer_id, chunk)
        query = rotate_and_store(heads, target.keys, target.values, chunk.slots, self.cos, self.sin)
        if engine.hot is not None:
            engine.hot.note(layer_id, target.keys, chunk.slots, chunk.cache_slots)
        # Before attention, so that the copies to the host run beside it.
        engine.write_full_blocks(layer_id, chunk)
        engine.recent.end(layer_id, chunk)
        ctx = PolicyContext(
            layer_id=layer_id,
            query=query,
            num_history_tokens=chunk.num_history_tokens,
            block_size=chunk.block_size,
            softmax_scale=query.shape[-1] ** -0.5,
            backend=attention.backend,
            tile_backend=attention.tile_backend,
            is_prefill=chunk.is_prefill,
        )
        source = OffloadedSource(engine, layer_id, self._next_layer(layer_id), chunk)
        if chunk.is_prefill:
            return attention.prefill.compute_chunked_prefill(source, ctx)
        return attention.decode.compute_chunked_decode(source, ctx)

    def _next_layer(self, layer_id: int) -> int | None:
        """Return the layer whose keys and values are wanted next, as far as one can know."""
        if not self.chunk.is_last:
            return layer_id
        if layer_id + 1 < self.num_layers:
            return layer_id + 1
        return 0 if self.chunk.continues else None


@dataclass(frozen=True, slots=True)
class HotAttention(AttentionStep):
    """A decode step that reads chosen pages of a KV cache in host memory: its first rows."""

    hot: HotPages
    attention: Attention
    block_tables: torch.Tensor
    """int32 `[num_rows, max_blocks]`."""
    context_lens: torch.Tensor
    """int32 `[num_rows]`, the new token included."""
    tail_slots: torch.Tensor
    """int32 `[num_rows]`: each token's place among the unfinished blocks of a layer."""
    cache_slots: torch.Tensor
    """int32 `[num_rows]`: its slot among all host blocks."""
    cos: torch.Tensor
    """fp32 `[num_rows, head_dim / 2]`: rotary angles."""
    sin: torch.Tensor

    @property
    def looks_ahead(self) -> bool:  # type: ignore[override]
        pages = self.attention.decode.pages
        return pages is not None and pages.num_ahead > 0

    def look_ahead(self, layer_id: int, normed: torch.Tensor, queries: Queries) -> None:
        hot = self.hot
        with hot.ahead_of(layer_id, normed):
            query = rotate(queries(normed), self.cos, self.sin)
            layer = hot.layer(layer_id, self.block_tables, self.context_lens, is_ahead=True)
            self.attention.decode.fetch_ahead(query, layer, query.shape[-1] ** -0.5)

    def attend(self, layer_id: int, heads: torch.Tensor) -> torch.Tensor:
        hot = self.hot
        keys, values = hot.tails[:, :, layer_id]
        query = rotate_and_store(heads, keys, values, self.tail_slots, self.cos, self.sin)
        with hot.beside_scores(layer_id):
            hot.note(layer_id, keys, self.tail_slots, self.cache_slots)
        layer = hot.layer(layer_id, self.block_tables, self.context_lens)
        return self.attention.decode.attend_to_pages(query, layer, query.shape[-1] ** -0.5)
