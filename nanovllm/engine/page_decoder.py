"""Decodes sequences whose KV cache is in host memory, page by page."""

from collections.abc import Mapping
from collections.abc import Sequence as Seq

import torch

from nanovllm.device import Device
from nanovllm.engine.decode_graph import DecodeGraph
from nanovllm.engine.forward import forward
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
        self._graphs: list[DecodeGraph] = []
        # Whose pages the rows have.
        self._known: list[Sequence | None] = [None] * hot.num_rows

    def capture_graphs(self) -> None:
        """Record a step for each of a few numbers of rows, largest first."""
        most = self._hot.num_rows
        sizes = {most, *(1 << i for i in range(most.bit_length()))}
        for size in sorted(sizes, reverse=True):
            inputs = self._inputs([None] * size)
            self._graphs.insert(0, DecodeGraph(self._device, inputs, self._compute))

    def forget(self, row: int) -> None:
        """Forget a row's sequence: its blocks may change, or another has the row."""
        self._known[row] = None

    def run(self, rows: Mapping[int, Sequence]) -> torch.Tensor:
        """Compute the newest token of the sequence in each row.

        Returns:
            Logits `[len(rows), vocab_size]`, in the order of `rows`.
        """
        for row, seq in rows.items():
            self._learn_blocks(row, seq)
        num_rows = max(rows) + 1
        graph = next((graph for graph in self._graphs if graph.size >= num_rows), None)
        size = num_rows if graph is None else graph.size
        inputs = self._inputs([rows.get(row) for row in range(size)])
        if graph is not None:
            logits = graph.run(inputs)
        else:
            logits = self._compute(*inputs.split(self._device.upload(inputs.data, torch.int32)))
        for row, seq in rows.items():
            num_full, num_left = divmod(seq.num_tokens, self._layout.block_size)
            if num_left == 0:
                self._engine.write_tails(row, seq.block_table[num_full - 1])
        if list(rows) == list(range(len(rows))):
            return logits[: len(rows)]
        return logits[self._device.upload(list(rows), torch.int64)]

    def _learn_blocks(self, row: int, seq: Sequence) -> None:
        """Let the step read the sequence's full blocks in host memory."""
        if seq is not self._known[row]:
            self._known[row] = seq
            self._hot.begin_sequence(row)
        blocks = seq.block_table[: seq.num_computed_tokens // self._layout.block_size]
        num_known = self._hot.num_host_blocks(row)
        if new := blocks[num_known:]:
            self._hot.add_host_blocks(row, self._engine.pool, new)
        self._engine.let_read(blocks, num_known)

    def _compute(
        self, tokens: torch.Tensor, context_lens: torch.Tensor, block_tables: torch.Tensor
    ) -> torch.Tensor:
        token_ids, positions, slots = tokens
        self._hot.begin_step()
        cos, sin = self._rotary.angles(positions)
        first_slots = self._hot.first_tail_slots[: len(slots)]
        step = HotAttention(
            hot=self._hot,
            attention=self._attention,
            block_tables=block_tables,
            context_lens=context_lens,
            tail_slots=first_slots + slots % self._layout.block_size,
            cache_slots=slots,
            cos=cos,
            sin=sin,
        )
        return forward(self._model, token_ids, step)

    def _inputs(self, rows: Seq[Sequence | None]) -> StepInputs:
        """Describe a step. A row of no sequence writes to the last place of its tail.

        That is free in the tail of a sequence that is not in the step: it is not full.
        """
        return build_step_inputs(
            (), rows, self._layout.block_size, self._max_blocks, self._hot.scrap_block
        )
