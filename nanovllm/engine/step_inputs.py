"""The arrays that describe a step's tokens, built on the host."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from nanovllm.engine.scheduler import Step
from nanovllm.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's tokens: chunks of prefilling sequences, then one token of each decoding one.

    All arrays lie in one, `data`, so that one copy takes them to the device.
    """

    data: npt.NDArray[np.int32]
    num_tokens: int
    num_decodes: int
    max_blocks: int
    """Width of the block tables."""

    def split(self, data: Any) -> tuple[Any, Any, Any]:
        """Return views of `data`, which is this object's or a copy of it elsewhere.

        Returns:
            tokens `[3, num_tokens]`: token ids, positions, slots that keys and values go to;
            context lengths `[num_decodes]` and block tables `[num_decodes, max_blocks]` of the
            decoding sequences.
        """
        first = 3 * self.num_tokens
        second = first + self.num_decodes
        tables = data[second:].reshape(self.num_decodes, self.max_blocks)
        return data[:first].reshape(3, -1), data[first:second], tables


def build_step_inputs(
    step: Step, block_size: int, max_blocks: int, scrap_block: int, pad_decodes_to: int = 0
) -> StepInputs:
    """Describe a step's tokens.

    Args:
        step: what to compute.
        block_size: tokens in a KV block.
        max_blocks: width of the block tables.
        scrap_block: the block that belongs to nobody.
        pad_decodes_to: decoding rows to fill up to, with tokens that go to the scrap block.
    """
    num_decodes = max(len(step.decodes), pad_decodes_to)
    num_tokens = sum(n for _, n in step.prefills) + num_decodes
    size = 3 * num_tokens + num_decodes * (1 + max_blocks)
    data = np.zeros(size, dtype=np.int32)
    inputs = StepInputs(data, num_tokens, num_decodes, max_blocks)
    tokens, lens, tables = inputs.split(data)
    start = 0
    for seq, count in step.prefills:
        _fill(tokens[:, start : start + count], seq, block_size)
        start += count
    for row, seq in enumerate(step.decodes):
        _fill(tokens[:, start + row : start + row + 1], seq, block_size)
        lens[row] = seq.num_tokens
        tables[row, : len(seq.block_table)] = seq.block_table
    # A padding row attends to one token, its own, in the scrap block.
    padding = start + len(step.decodes)
    tokens[2, padding:] = scrap_block * block_size
    lens[len(step.decodes) :] = 1
    tables[len(step.decodes) :, 0] = scrap_block
    return inputs


def _fill(columns: npt.NDArray[np.int32], seq: Sequence, block_size: int) -> None:
    """Describe the sequence's next uncomputed tokens, one a column."""
    first = seq.num_computed_tokens
    stop = first + columns.shape[1]
    first_block = first // block_size
    blocks = np.asarray(seq.block_table[first_block : -(-stop // block_size)], dtype=np.int64)
    positions = np.arange(first, stop)
    columns[0] = seq.token_ids[first:stop]
    columns[1] = positions
    columns[2] = blocks[positions // block_size - first_block] * block_size + positions % block_size
