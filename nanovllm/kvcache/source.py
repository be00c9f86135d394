"""What a policy reads keys and values from, wherever they lie."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from nanovllm.kvcache.attention_batch import PrefillSegment, slot_index
from nanovllm.kvcache.chunk import Chunk
from nanovllm.kvcache.offload_engine import OffloadEngine, Part
from nanovllm.kvcache.resident import LayerKV


class KVPiece(NamedTuple):
    """Some of a sequence's keys and values in one layer, together on the device."""

    keys: torch.Tensor
    """`[n, num_kv_heads, head_dim]`."""
    values: torch.Tensor
    holds_chunk: bool
    """Whether the last tokens are the chunk's own, to be masked causally."""


class KVSource(ABC):
    """One layer of one sequence, up to the end of a chunk whose keys and values are stored."""

    available_blocks: Seq[int]
    """Ids of the full KV blocks of the chunk's history, oldest first."""
    loads_blocks: bool
    """Whether some of the available blocks are in host memory only."""

    @abstractmethod
    def pieces(self, selected: Seq[int]) -> Iterator[KVPiece]:
        """Yield the keys and values of selected blocks, then of all tokens after those blocks.

        Args:
            selected: some of `available_blocks`, in their order.

        Yields:
            Pieces in the order of the tokens, the chunk's own in the last one. A piece is good for
            kernels on the current stream until the next is asked for.
        """

    @abstractmethod
    def keys(self) -> torch.Tensor:
        """Return all keys up to the end of the chunk, `[context_len, num_kv_heads, head_dim]`.

        Only for policies that `works_on_tiles`, as `load` is.
        """

    @abstractmethod
    def load(self, selected: Seq[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all keys and values up to the end of the chunk, `[context_len, heads, head_dim]`.

        Args:
            selected: some of `available_blocks`, in their order. Others are undefined, but for keys
                that were asked for by `keys`. Either part of a block in host memory is copied once
                for each layer and step.
        """


class ResidentSource(KVSource):
    """A layer of the paged cache on the device: one piece."""

    loads_blocks = False

    def __init__(self, layer_kv: LayerKV, segment: PrefillSegment) -> None:
        self._layer_kv, self._segment = layer_kv, segment
        self.available_blocks = segment.history_blocks
        self._context: tuple[torch.Tensor, torch.Tensor] | None = None

    def pieces(self, selected: Seq[int]) -> Iterator[KVPiece]:
        everything = len(selected) == len(self.available_blocks)
        segment = self._segment
        slots = segment.slots if everything else segment.slots_of(selected)
        yield KVPiece(*self._layer_kv.read(slots), holds_chunk=True)

    def keys(self) -> torch.Tensor:
        return self.load(self.available_blocks)[0]

    def load(self, selected: Seq[int]) -> tuple[torch.Tensor, torch.Tensor]:
        # Scattered blocks are gathered, and not twice.
        if self._context is None:
            self._context = self._layer_kv.read(self._segment.slots)
        return self._context


class OffloadedSource(KVSource):
    """A layer whose older blocks are loaded from host memory, and whose newer ones are at hand.

    In a layer-major prefill all are at hand.

    Args:
        engine: loads the blocks.
        layer_id: the layer.
        next_layer: the layer that will be asked for next; None if that is not known.
        chunk: where the sequence's tokens lie.
    """

    def __init__(
        self, engine: OffloadEngine, layer_id: int, next_layer: int | None, chunk: Chunk
    ) -> None:
        self._engine = engine
        self._layer_id, self._next_layer = layer_id, next_layer
        self._chunk = chunk
        num_full = chunk.num_history_tokens // chunk.block_size
        self.available_blocks = chunk.block_table[:num_full]
        self.loads_blocks = len(chunk.host_blocks) > 0
        self._keys_wanted: Seq[int] | None = None

    def pieces(self, selected: Seq[int]) -> Iterator[KVPiece]:
        chunk = self._chunk
        num_host = len(chunk.host_blocks)
        wanted = set(selected)
        loaded = [block_id for block_id in chunk.host_blocks if block_id in wanted]
        for piece in self._engine.load_blocks(self._layer_id, loaded, self._ahead(loaded)):
            yield KVPiece(*piece, holds_chunk=False)
        keys, values = (
            x[chunk.device_start - chunk.buffer_start :]
            for x in self._engine.get_prefill_buffer_slice(self._layer_id, chunk.num_buffer_tokens)
        )
        at_hand = self.available_blocks[num_host:]
        kept = [place for place, block_id in enumerate(at_hand) if block_id in wanted]
        num_dropped = len(at_hand) - len(kept)
        if num_dropped:
            size = chunk.block_size
            kept += range(len(at_hand), -(-chunk.num_device_tokens // size))
            num_tokens = chunk.num_device_tokens - num_dropped * size
            rows = slot_index(kept, num_tokens, size, self._engine.device)
            keys, values = keys[rows], values[rows]
        yield KVPiece(keys, values, holds_chunk=True)

    def keys(self) -> torch.Tensor:
        self._keys_wanted = self._chunk.host_blocks
        self._gather(self._keys_wanted, Part.KEYS)
        return self._context()[0]

    def load(self, selected: Seq[int]) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = set(selected)
        wanted = [block_id for block_id in self._chunk.host_blocks if block_id in chosen]
        keys = wanted if self._keys_wanted is None else self._keys_wanted
        self._gather(keys, Part.KEYS)
        # A later chunk of the step finds the layer's keys gathered.
        is_done = self._next_layer != self._layer_id
        self._gather(wanted, Part.VALUES, self._ahead(keys) if is_done else None)
        return self._context()

    def _gather(
        self, block_ids: Seq[int], part: Part, ahead: tuple[int, Seq[int]] | None = None
    ) -> None:
        if self._chunk.buffer_start:
            raise ValueError("the chunk's buffer has no place for what lies in host memory")
        self._engine.gather(self._layer_id, self._chunk, block_ids, part, ahead)

    def _context(self) -> tuple[torch.Tensor, torch.Tensor]:
        num_tokens = self._chunk.num_buffer_tokens
        return self._engine.get_prefill_buffer_slice(self._layer_id, num_tokens)

    def _ahead(self, loaded: Seq[int]) -> tuple[int, Seq[int]] | None:
        """Return the layer and blocks that are likely to be wanted next."""
        if self._next_layer is None:
            return None
        chunk = self._chunk
        if self._next_layer < self._layer_id and len(loaded) == len(chunk.host_blocks):
            # The next step: its history has this chunk's blocks too.
            return self._next_layer, chunk.block_table[: chunk.context_len // chunk.block_size]
        return self._next_layer, loaded
