"""Runs steps of many sequences, with CUDA graphs of those that only decode."""

from typing import Any

import torch

from nanovllm.device import Device
from nanovllm.engine.decode_graph import DecodeGraph
from nanovllm.engine.forward import forward
from nanovllm.engine.runner import Runner
from nanovllm.engine.scheduler import Step
from nanovllm.engine.step_inputs import StepInputs, build_step_inputs
from nanovllm.kvcache.attention_batch import (
    AttentionBatch,
    DecodeBatch,
    PrefillSegment,
    slot_index,
)
from nanovllm.kvcache.resident import ResidentKVCache
from nanovllm.layers.attention import Attention, ResidentAttention
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.log import get_logger
from nanovllm.models.llama import LlamaForCausalLM

logger = get_logger(__name__)

_GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


class ModelRunner(Runner):
    """Runs steps of many sequences whose KV cache is on the device."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        rotary: RotaryEmbedding,
        cache: ResidentKVCache,
        attention: Attention,
        device: Device,
        max_model_len: int,
    ) -> None:
        self._model = model
        self._rotary = rotary
        self._cache = cache
        self._attention = attention
        self._device = device
        self._max_blocks = -(-max_model_len // cache.block_size)
        self._graphs: dict[int, DecodeGraph] = {}

    @torch.inference_mode()
    def run(self, step: Step) -> torch.Tensor:
        if not step.prefills and (graph := self._graph_for(len(step.decodes))) is not None:
            inputs = self._inputs(step, pad_decodes_to=graph.size)
            return graph.run(inputs)[: len(step.decodes)]
        inputs = self._inputs(step)
        tokens, *decode = inputs.split(self._device.upload(inputs.data, torch.int32))
        batch = AttentionBatch(
            slot_mapping=tokens[2],
            prefills=self._segments(step),
            decodes=self._decode_batch(step, *decode) if step.decodes else None,
        )
        rows = self._device.upload(step.sampled_rows, torch.int64)
        return self._logits(tokens, batch, rows)

    @torch.inference_mode()
    def capture_graphs(self, max_num_seqs: int) -> None:
        """Record a CUDA graph of a decode step for each of a few batch sizes, largest first."""
        largest = min(max_num_seqs, _GRAPH_SIZES[-1])
        for size in [largest, *(size for size in reversed(_GRAPH_SIZES) if size < largest)]:
            inputs = self._inputs(Step(), pad_decodes_to=size)
            self._graphs[size] = DecodeGraph(self._device, inputs, self._decode_logits)
        logger.info("recorded decode graphs for up to %d sequences", max(self._graphs))

    def stats(self) -> dict[str, Any]:
        return {
            "transfers": {},
            "kv_device_bytes": self._cache.num_bytes,
            "kv_host_bytes": 0,
            "attention": self._attention.prefill.stats(),
            "pages": {},
        }

    def reset_stats(self) -> None:
        self._attention.prefill.reset_stats()

    def close(self) -> None:
        pass

    def _decode_logits(
        self, tokens: torch.Tensor, context_lens: torch.Tensor, block_tables: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits of a step that only decodes, from its inputs on the device."""
        batch = AttentionBatch(
            slot_mapping=tokens[2],
            prefills=(),
            decodes=DecodeBatch(
                rows=slice(0, len(block_tables)),
                block_tables=block_tables,
                context_lens=context_lens,
                slots=None,
            ),
        )
        return self._logits(tokens, batch, rows=None)

    def _logits(
        self, tokens: torch.Tensor, batch: AttentionBatch, rows: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the logits of `rows` of the step, or of all."""
        token_ids, positions, _ = tokens
        cos, sin = self._rotary.angles(positions)
        step = ResidentAttention(batch, self._cache.layers, self._attention, cos, sin)
        return forward(self._model, token_ids, step, rows)

    def _inputs(self, step: Step, pad_decodes_to: int = 0) -> StepInputs:
        padding = [None] * max(0, pad_decodes_to - len(step.decodes))
        return build_step_inputs(
            step.prefills,
            [*step.decodes, *padding],
            self._cache.block_size,
            self._max_blocks,
            self._cache.scrap_block,
        )

    def _segments(self, step: Step) -> list[PrefillSegment]:
        segments, start = [], 0
        block_size = self._cache.block_size
        for seq, num_tokens in step.prefills:
            context_len = seq.num_computed_tokens + num_tokens
            segments.append(
                PrefillSegment(
                    rows=slice(start, start + num_tokens),
                    block_table=seq.block_table[: -(-context_len // block_size)],
                    num_history_tokens=seq.num_computed_tokens,
                    context_len=context_len,
                    block_size=block_size,
                    slots=slot_index(seq.block_table, context_len, block_size, self._device),
                    device=self._device,
                )
            )
            start += num_tokens
        return segments

    def _decode_batch(
        self, step: Step, context_lens: torch.Tensor, block_tables: torch.Tensor
    ) -> DecodeBatch:
        slots = None
        if not self._device.runs_triton:
            block_size = self._cache.block_size
            slots = [
                slot_index(seq.block_table, seq.num_tokens, block_size, self._device)
                for seq in step.decodes
            ]
        return DecodeBatch(
            rows=slice(step.num_tokens - len(step.decodes), step.num_tokens),
            block_tables=block_tables,
            context_lens=context_lens,
            slots=slots,
        )

    def _graph_for(self, num_seqs: int) -> DecodeGraph | None:
        size = min((size for size in self._graphs if size >= num_seqs), default=0)
        return self._graphs.get(size)
