"""Where a chunk's tokens, and the tokens before it, lie while the KV cache is in host memory."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Chunk:
    """Some tokens of a sequence that are computed together.

    The sequence's first blocks may lie in host memory only. From `device_start` on, which is where
    a block begins, its tokens lie together on the device: in the tail block while one block holds
    them, else in the prefill buffer.
    """

    block_table: Seq[int]
    """Ids of the host blocks of the sequence, those of the chunk's tokens among them."""
    num_history_tokens: int
    """Tokens of the sequence before the chunk."""
    num_tokens: int
    device_start: int
    """First token that lies on the device; a multiple of `block_size`."""
    block_size: int
    is_prefill: bool
    is_last: bool
    """Whether the step computes no later chunk of the sequence."""
    continues: bool
    """Whether a later step of the same phase is to be expected."""
    slots: torch.Tensor
    """int32 `[num_tokens]`: the chunk's places in the buffer that it is stored in."""

    @property
    def context_len(self) -> int:
        """Tokens up to the end of the chunk."""
        return self.num_history_tokens + self.num_tokens

    @property
    def num_device_tokens(self) -> int:
        """Tokens on the device, once the chunk is stored."""
        return self.context_len - self.device_start

    @property
    def num_earlier_tokens(self) -> int:
        """Tokens of the history that are on the device when the chunk begins."""
        return self.num_history_tokens - self.device_start

    @property
    def in_tail(self) -> bool:
        """Whether the tail block holds all that is on the device."""
        return self.num_device_tokens <= self.block_size

    @property
    def host_blocks(self) -> Seq[int]:
        """Ids of the blocks that have to be loaded to be attended to, oldest first."""
        return self.block_table[: self.device_start // self.block_size]

    @property
    def full_blocks(self) -> range:
        """Places in the block table of the blocks that the chunk makes full."""
        size = self.block_size
        return range(self.num_history_tokens // size, self.context_len // size)
