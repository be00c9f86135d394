"""Where the tokens of a step's sequences lie in the paged cache, as attention needs it."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from nanovllm.device import Device

# Places of a sequence's tokens in a cache viewed as one row of slots: a slice where the blocks
# happen to follow each other, so that reading them copies nothing; else int64 indices.
SlotIndex = slice | torch.Tensor


def slot_index(block_ids: Seq[int], num_tokens: int, block_size: int, device: Device) -> SlotIndex:
    """Return the slots of the first `num_tokens` tokens that lie in `block_ids`, in order.

    Does not wait for the device.
    """
    blocks = block_ids[: -(-num_tokens // block_size)]
    first = blocks[0] if blocks else 0
    if all(block == first + i for i, block in enumerate(blocks)):
        return slice(first * block_size, first * block_size + num_tokens)
    starts = device.upload(blocks, torch.int64) * block_size
    offsets = torch.arange(block_size, dtype=torch.int64, device=device.torch_device)
    return (starts[:, None] + offsets).flatten()[:num_tokens]


@dataclass(frozen=True, slots=True)
class PrefillSegment:
    """One sequence's chunk in a step."""

    rows: slice
    """The chunk's rows among the step's tokens."""
    block_table: Seq[int]
    """Ids of the blocks that hold the sequence up to the end of the chunk."""
    num_history_tokens: int
    """Tokens before the chunk."""
    context_len: int
    """Tokens up to the end of the chunk."""
    block_size: int
    slots: SlotIndex
    """Slots of all `context_len` tokens."""
    device: Device

    @property
    def history_blocks(self) -> Seq[int]:
        """The full blocks of the history. A block that the chunk shares is not among them."""
        return self.block_table[: self.num_history_tokens // self.block_size]

    def slots_of(self, selected: Seq[int]) -> SlotIndex:
        """Return the slots of the selected history blocks and of all tokens after the history's."""
        num_available = self.num_history_tokens // self.block_size
        kept = [*selected, *self.block_table[num_available:]]
        dropped = num_available - len(selected)
        num_tokens = self.context_len - dropped * self.block_size
        return slot_index(kept, num_tokens, self.block_size, self.device)


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The sequences of a step that bring one token each."""

    rows: slice
    """Their rows among the step's tokens."""
    block_tables: torch.Tensor
    """int32 `[num_seqs, max_blocks]`."""
    context_lens: torch.Tensor
    """int32 `[num_seqs]`, the new token included."""
    slots: Seq[SlotIndex] | None
    """Slots of each sequence's context, where attention gathers them; None where a kernel reads
    the block tables."""


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """A step's tokens: first the chunks of prefilling sequences, then the decoding ones."""

    slot_mapping: torch.Tensor
    """int32 `[num_tokens]`: the slot that each token's key and value go to."""
    prefills: Seq[PrefillSegment]
    decodes: DecodeBatch | None
