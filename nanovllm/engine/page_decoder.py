"""Decodes a sequence whose KV cache is in host memory, page by page."""

import torch

from nanovllm.device import Device
from nanovllm.engine.decode_graph import DecodeGraph
from nanovllm.engine.forward import forward
from nanovllm.engine.scheduler import Step
from nanovllm.engine.sequence import Sequence
from nanovllm.engine.step_inputs import StepInputs, build_step_inputs
from nanovllm.kvcache.hot_pages import HotPages
from nanovllm.kvcache.offload_engine import OffloadEngine
from nanovllm.layers.attention import Attention, HotAttention
from nanovllm.layers.rotary_embedding import RotaryEmbedding
from nanovllm.models.llama import LlamaForCausalLM


class PageDecoder:
    """Computes decode steps whose attention reads chosen pages.

    The host says where blocks lie and launches; what is read is decided on the device. So a step
    is one CUDA graph, between whose replays full blocks go to the host.
    """

    def __init__(
        self,
        model: LlamaForCausalLM,
        rotary: RotaryEmbedding,
        engine: OffloadEngine,
        hot: HotPages,
        attention: Attention,
        device: Device,
        max_model_len: int,
    ) -> None:
        self._model = model
        self._rotary = rotary
        self._engine = engine
        self._hot = hot
        self._attention = attention
        self._device = device
        self._layout = engine.pool.layout
        self._max_blocks = self._layout.num_blocks_for(max_model_len)
        self._graph: DecodeGraph | None = None
        self._sequence: Sequence | None = None

    def capture_graph(self) -> None:
        """Record the step. Before any sequence: what it computes overwrites the tail."""
        self._graph = DecodeGraph(self._device, self._inputs(Step()), self._compute)

    def forget(self) -> None:
        """Forget the sequence: its blocks may change, or another has the tail."""
        self._sequence = None

    def run(self, seq: Sequence) -> torch.Tensor:
        """Compute a sequence's newest token and return its logits, `[1, vocab_size]`."""
        self._learn_blocks(seq)
        inputs = self._inputs(Step(decodes=[seq]))
        if self._graph is not None:
            logits = self._graph.run(inputs)
        else:
            logits = self._compute(*inputs.split(self._device.upload(inputs.data, torch.int32)))
        if seq.num_tokens % self._layout.block_size == 0:
            self._engine.write_tails(seq.block_table[seq.num_tokens // self._layout.block_size - 1])
        return logits

    def _learn_blocks(self, seq: Sequence) -> None:
        """Let the step read the sequence's full blocks in host memory."""
        if seq is not self._sequence:
            self._sequence = seq
            self._hot.begin_sequence()
        blocks = seq.block_table[: seq.num_computed_tokens // self._layout.block_size]
        num_known = self._hot.num_host_blocks
        if new := blocks[num_known:]:
            self._hot.add_host_blocks(self._engine.pool, new)
        self._engine.let_read(blocks, num_known)

    def _compute(
        self, tokens: torch.Tensor, context_lens: torch.Tensor, block_tables: torch.Tensor
    ) -> torch.Tensor:
        token_ids, positions, slots = tokens
        self._hot.begin_step()
        cos, sin = self._rotary.angles(positions)
        step = HotAttention(
            hot=self._hot,
            attention=self._attention,
            block_tables=block_tables,
            context_lens=context_lens,
            tail_slots=slots % self._layout.block_size,
            cache_slots=slots,
            cos=cos,
            sin=sin,
        )
        return forward(self._model, token_ids, step)

    def _inputs(self, step: Step) -> StepInputs:
        """Describe a step; one of no sequence as a token alone in a block."""
        return build_step_inputs(
            step, self._layout.block_size, self._max_blocks, scrap_block=0, pad_decodes_to=1
        )
