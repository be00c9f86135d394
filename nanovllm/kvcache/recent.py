"""The newest tokens of a sequence, on the device while its older ones are in host memory."""

import torch

from nanovllm.device import Device
from nanovllm.kvcache.chunk import Chunk
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.resident import LayerKV


class RecentKV:
    """A tail block for each layer and sequence, and one prefill buffer that all use in turn.

    The tail holds a sequence's last block while it is not full. A chunk that fits into it is
    stored there; a longer one is stored in the prefill buffer, behind a copy of the tail, and what
    it leaves of an unfinished block becomes the tail. Before that the buffer may hold blocks that
    were gathered from host memory. Both are token-major, as attention reads.
    """

    def __init__(self, device: Device, layout: KVLayout, tails: torch.Tensor | None = None) -> None:
        self._layout = layout
        self._device = device.torch_device
        # [2, num_rows, num_layers, block_size, num_kv_heads, head_dim]
        self._tails = self._empty(layout.num_layers)[:, None] if tails is None else tails
        self.row = 0
        """Whose tail is meant: the row of the sequence that is computed."""
        self._buffer = self._empty(0)

    @property
    def num_bytes(self) -> int:
        """Device memory of tails and buffer."""
        return self._tails.nbytes + self._buffer.nbytes

    def reserve(self, num_tokens: int) -> None:
        """Let the prefill buffer hold that many tokens. What it held is lost if it must grow."""
        num_blocks = self._layout.num_blocks_for(num_tokens)
        if num_blocks > max(1, self._buffer.shape[1]):
            self._buffer = self._empty(0)  # both need not fit
            self._buffer = self._empty(num_blocks)

    def storage(self, layer_id: int, num_tokens: int) -> LayerKV:
        """Return where a layer's part on the device lies, if it has `num_tokens` tokens."""
        if num_tokens <= self._layout.block_size:
            keys, values = self._tails[:, self.row, layer_id : layer_id + 1]
        else:
            keys, values = self._buffer
        return LayerKV(keys, values)

    def begin(self, layer_id: int, chunk: Chunk) -> LayerKV:
        """Return where a chunk's keys and values are to be stored, after those before them."""
        target = self.storage(layer_id, chunk.num_buffer_tokens)
        if chunk.follows_tail:
            earlier = chunk.num_earlier_tokens
            start = chunk.device_start - chunk.buffer_start
            tail = self.storage(layer_id, earlier)
            self._copy(target, slice(start, start + earlier), tail, slice(0, earlier))
        return target

    def end(self, layer_id: int, chunk: Chunk) -> None:
        """Keep what a stored chunk leaves of an unfinished block."""
        num_left = chunk.context_len % self._layout.block_size
        if chunk.is_last and num_left and not chunk.in_tail:
            source = self.storage(layer_id, chunk.num_buffer_tokens)
            last = slice(chunk.num_buffer_tokens - num_left, chunk.num_buffer_tokens)
            self._copy(self.storage(layer_id, num_left), slice(0, num_left), source, last)

    @staticmethod
    def _copy(target: LayerKV, to: slice, source: LayerKV, of: slice) -> None:
        for into, from_ in zip(target.read(to), source.read(of), strict=True):
            into.copy_(from_)

    def _empty(self, num_blocks: int) -> torch.Tensor:
        """Return `[2, num_blocks, block_size, num_kv_heads, head_dim]`."""
        layout = self._layout
        shape = (2, num_blocks, layout.block_size, *layout.token_shape)
        return torch.empty(shape, dtype=layout.dtype, device=self._device)
