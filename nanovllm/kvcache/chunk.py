"""Where a chunk's tokens, and the tokens before it, lie while the KV cache is in host memory."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some tokens of a sequence that are computed together.

    The sequence's first blocks may lie in host memory only. From `device_start` on, which is where
    a block begins, its tokens lie together on the device: in the tail block while one block holds
    them, else in the prefill buffer. The buffer may begin before them, with places for the blocks
    in host memory, if what is loaded is to lie beside them.
    """

    block_table: Seq[int]
    """Ids of the host blocks of the sequence, those of the chunk's tokens among them."""
    num_history_tokens: int
    """Tokens of the sequence before the chunk."""
    num_tokens: int
    device_start: int
    """First token that lies on the device; a multiple of `block_size`."""
    buffer_start: int
    """First token that has a place in the prefill buffer: `device_start`, or 0."""
    block_size: int
    is_prefill: bool
    is_first: bool
    """Whether the step computes no earlier chunk of the sequence."""
    is_last: bool
    """Whether the step computes no later chunk of the sequence."""
    continues: bool
    """Whether a later step of the same phase is to be expected."""
    slots: torch.Tensor
    """int32 `[num_tokens]`: the chunk's places in the buffer that it is stored in."""
    cache_slots: torch.Tensor
    """int32 `[num_tokens]`: its slots among all host blocks."""

    @property
    def context_len(self) -> int:
        """Tokens up to the end of the chunk."""
        return self.num_history_tokens + self.num_tokens

    @property
    def num_device_tokens(self) -> int:
        """Tokens on the device, once the chunk is stored."""
        return self.context_len - self.device_start

    @property
    def num_buffer_tokens(self) -> int:
        """Tokens that have a place where the chunk is stored, up to its end."""
        return self.context_len - self.buffer_start

    @property
    def num_earlier_tokens(self) -> int:
        """Tokens of the history that are on the device when the chunk begins."""
        return self.num_history_tokens - self.device_start

    @property
    def in_tail(self) -> bool:
        """Whether the chunk is stored in the tail block."""
        return self.num_buffer_tokens <= self.block_size

    @property
    def follows_tail(self) -> bool:
        """Whether the tail block holds the newest tokens before the chunk, and not the chunk."""
        before = self.num_history_tokens - (
            self.device_start if self.is_first else self.buffer_start
        )
        return 0 < before <= self.block_size and not self.in_tail

    @property
    def host_blocks(self) -> Seq[int]:
        """Ids of the blocks that have to be loaded to be attended to, oldest first."""
        return self.block_table[: self.device_start // self.block_size]

    @property
    def full_blocks(self) -> range:
        """Places in the block table of the blocks that the chunk makes full."""
        size = self.block_size
        return range(self.num_history_tokens // size, self.context_len // size)
