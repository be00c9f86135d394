"""Runs steps of sequences whose KV cache is in host memory."""

from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch

from nanovllm.device import Device
from nanovllm.engine.page_decoder import PageDecoder
from nanovllm.engine.rows import Rows
from nanovllm.engine.runner import Runner
from nanovllm.engine.scheduler import Step
from nanovllm.engine.sequence import Sequence
from nanovllm.kvcache.chunk import Chunk
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.layers.attention import Attention, OffloadedAttention
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.llama import LlamaForCausalLM


class OffloadRunner(Runner):
    """Computes a step's prefills one after the other, then its decodes.

    A prefill of more tokens than a chunk holds is computed layer-major: all chunks of a layer
    before the next layer, so that nothing that it computes is read back from the host. Chunk-major
    is a prefill that takes several steps.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        rotary: RotaryEmbedding,
        engine: OffloadEngine,
        attention: Attention,
        device: Device,
        chunk_tokens: int,
        decoder: PageDecoder | None,
        num_rows: int,
        nvtx: bool,
    ) -> None:
        self._model = model
        self._rotary = rotary
        self._engine = engine
        self._attention = attention
        self._device = device
        self._chunk_tokens = chunk_tokens
        self._decoder = decoder
        self._rows = Rows(num_rows)
        self._nvtx = nvtx

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor:
        logits = []
        self._engine.stats.phase = "prefill"
        for seq, num_tokens in step.prefills:
            row = self._rows.row_of(seq)
            if self._decoder is not None:
                self._decoder.forget(row)
            is_sampled = num_tokens == seq.num_uncomputed_tokens
            logits.append(self._run_chunks(seq, row, num_tokens, True, is_sampled))
        if step.decodes:
            self._engine.stats.phase = "decode"
            logits.append(self._decode(step.decodes))
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _decode(self, seqs: Seq[Sequence]) -> torch.Tensor:
        rows = {self._rows.row_of(seq): seq for seq in seqs}
        if self._decoder is not None:
            for seq in seqs:
                self._engine.pool.reserve(seq.block_table[-1:])
            return self._decoder.run(rows)
        return torch.cat([self._run_chunks(seq, row, 1, False, True) for row, seq in rows.items()])

    def _run_chunks(
        self, seq: Sequence, row: int, num_tokens: int, is_prefill: bool, is_sampled: bool
    ) -> torch.Tensor:
        """Compute the next tokens of a sequence; return the logits of the last if it is sampled."""
        engine, device = self._engine, self._device
        start = seq.num_computed_tokens
        layout = engine.pool.layout
        first_block = start // layout.block_size
        engine.pool.reserve(
            seq.block_table[first_block : layout.num_blocks_for(start + num_tokens)]
        )
        token_ids = device.upload(seq.token_ids[start : start + num_tokens], torch.int32)
        chunks = self._chunks(seq, num_tokens, is_prefill)
        engine.begin_step(row, chunks[-1].num_buffer_tokens)
        steps = [self._attention_step(chunk) for chunk in chunks]
        # The residual stream of each chunk, [num_tokens, hidden_size].
        streams = [self._model.embed_tokens(ids) for ids in token_ids.split(self._chunk_tokens)]
        # Of the last layer's output only what is sampled is wanted.
        rows = [torch.empty(0, dtype=torch.int64, device=device.torch_device)] * len(chunks)
        if is_sampled:
            rows[-1] = device.upload([chunks[-1].num_tokens - 1], torch.int64)
        last_layer = len(self._model.layers) - 1
        for layer_id, layer in enumerate(self._model.layers):
            for i, attention in enumerate(steps):
                with self._range(f"layer {layer_id} chunk {i}"):
                    wanted = rows[i] if layer_id == last_layer else None
                    hidden, residual = layer(streams[i], None, attention, wanted)
                    streams[i] = residual.add_(hidden)
        logits: torch.Tensor = self._model.lm_head(self._model.norm(streams[-1]))
        return logits

    def stats(self) -> dict[str, Any]:
        return {
            "transfers": self._engine.stats.summary(),
            "kv_device_bytes": self._engine.num_device_bytes,
            "kv_host_bytes": self._engine.pool.num_bytes,
            "attention": self._attention.prefill.stats(),
            "pages": {} if self._engine.hot is None else self._engine.hot.stats(),
        }

    def reset_stats(self) -> None:
        self._engine.stats.reset()
        if self._engine.hot is not None:
            self._engine.hot.reset_stats()
        self._attention.prefill.reset_stats()

    def close(self) -> None:
        self._engine.close()

    def _chunks(self, seq: Sequence, num_tokens: int, is_prefill: bool) -> Seq[Chunk]:
        block_size, device = self._engine.pool.layout.block_size, self._device
        start = seq.num_computed_tokens
        stop = start + num_tokens
        device_start = start // block_size * block_size
        together = is_prefill and self._attention.prefill.works_on_tiles
        buffer_start = 0 if together else device_start
        slots = torch.arange(
            start - buffer_start,
            stop - buffer_start,
            dtype=torch.int32,
            device=device.torch_device,
        ).split(self._chunk_tokens)
        blocks = np.asarray(seq.block_table[device_start // block_size :], dtype=np.int64)
        offsets = np.arange(start, stop) - device_start
        cache_slots = device.upload(
            blocks[offsets // block_size] * block_size + offsets % block_size, torch.int32
        ).split(self._chunk_tokens)
        # As far as the phase goes, so that what a prefill reads can be told beforehand.
        num_generated = seq.num_tokens - seq.num_prompt_tokens
        more = num_generated + 1 < seq.params.max_tokens
        continues = stop < seq.num_tokens if is_prefill else more
        return [
            Chunk(
                block_table=seq.block_table,
                num_history_tokens=start + i * self._chunk_tokens,
                num_tokens=len(places),
                device_start=device_start,
                buffer_start=buffer_start,
                block_size=block_size,
                is_prefill=is_prefill,
                is_first=i == 0,
                is_last=i == len(slots) - 1,
                continues=continues,
                slots=places,
                cache_slots=own,
            )
            for i, (places, own) in enumerate(zip(slots, cache_slots, strict=True))
        ]

    def _attention_step(self, chunk: Chunk) -> OffloadedAttention:
        positions = torch.arange(
            chunk.num_history_tokens,
            chunk.context_len,
            dtype=torch.int32,
            device=self._device.torch_device,
        )
        cos, sin = self._rotary.angles(positions)
        num_layers = len(self._model.layers)
        return OffloadedAttention(chunk, self._engine, num_layers, self._attention, cos, sin)

    def _range(self, name: str) -> AbstractContextManager[Any]:
        return self._device.range(name) if self._nvtx else nullcontext()
