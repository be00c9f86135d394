"""The arrays that describe a step's tokens, built on the host."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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
    prefills: Seq[tuple[Sequence, int]],
    decodes: Seq[Sequence | None],
    block_size: int,
    max_blocks: int,
    scrap_block: int,
) -> StepInputs:
    """Describe a step's tokens.

    Args:
        prefills: as `Step.prefills`.
        decodes: the sequence of each decoding row; None for one that only fills up a graph, whose
            token goes to the last slot of the scrap block.
        block_size: tokens in a KV block.
        max_blocks: width of the block tables.
        scrap_block: the block that belongs to nobody.
    """
    num_tokens = sum(n for _, n in prefills) + len(decodes)
    size = 3 * num_tokens + len(decodes) * (1 + max_blocks)
    data = np.zeros(size, dtype=np.int32)
    inputs = StepInputs(data, num_tokens, len(decodes), max_blocks)
    tokens, lens, tables = inputs.split(data)
    start = 0
    for seq, count in prefills:
        _fill(tokens[:, start : start + count], seq, block_size)
        start += count
    for row, decoding in enumerate(decodes):
        if decoding is None:
            tokens[2, start + row] = (scrap_block + 1) * block_size - 1
            lens[row] = 1  # it attends to one token of the scrap block
            tables[row, 0] = scrap_block
            continue
        _fill(tokens[:, start + row : start + row + 1], decoding, block_size)
        lens[row] = decoding.num_tokens
        tables[row, : len(decoding.block_table)] = decoding.block_table
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
