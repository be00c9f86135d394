"""The arrays that describe a step's tokens, built on the host."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from nanovllm.engine.scheduler import Step
from nanovllm.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A step's tokens: chunks of prefilling sequences, then one token of each decoding one."""

    tokens: npt.NDArray[np.int64]
    """`[3, num_tokens]`: token ids, positions, slots of the cache that keys and values go to."""
    decode_tables: npt.NDArray[np.int32]
    """`[num_decodes, 1 + max_blocks]`: context length and block table of each decoding sequence."""


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
    num_prefill_tokens = sum(n for _, n in step.prefills)
    tokens = np.zeros((3, num_prefill_tokens + num_decodes), dtype=np.int64)
    start = 0
    for seq, num_tokens in step.prefills:
        _fill(tokens[:, start : start + num_tokens], seq, block_size)
        start += num_tokens
    # A padding row attends to one token of the scrap block.
    tokens[2, start:] = scrap_block * block_size
    tables = np.full((num_decodes, 1 + max_blocks), scrap_block, dtype=np.int32)
    tables[:, 0] = 1
    for row, seq in enumerate(step.decodes):
        _fill(tokens[:, start + row : start + row + 1], seq, block_size)
        tables[row, 0] = seq.num_tokens
        tables[row, 1 : 1 + len(seq.block_table)] = seq.block_table
    return StepInputs(tokens, tables)


def _fill(columns: npt.NDArray[np.int64], seq: Sequence, block_size: int) -> None:
    """Describe the sequence's next uncomputed tokens, one a column."""
    first = seq.num_computed_tokens
    stop = first + columns.shape[1]
    first_block = first // block_size
    blocks = np.asarray(seq.block_table[first_block : -(-stop // block_size)], dtype=np.int64)
    positions = np.arange(first, stop)
    columns[0] = seq.token_ids[first:stop]
    columns[1] = positions
    columns[2] = blocks[positions // block_size - first_block] * block_size + positions % block_size
