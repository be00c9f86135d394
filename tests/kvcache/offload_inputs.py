"""What tests of the offload engine share: a checked device, small engines, blocks that differ."""

from contextlib import contextmanager

import pytest
import torch

from nanovllm.device import create_device
from nanovllm.kvcache import host_pool
from nanovllm.kvcache.chunk import Chunk
from nanovllm.kvcache.layout import KVLayout
from nanovllm.kvcache.offload_engine import OffloadEngine

BLOCK, KV_HEADS, DIM, NUM_LAYERS = 4, 2, 8, 3
LAYOUT = KVLayout(NUM_LAYERS, BLOCK, KV_HEADS, DIM, torch.float32)
NUM_BLOCKS = 30


@contextmanager
def checked_device():
    """Make a CPU whose copies are deferred and checked, and its compute stream current.

    Host pools come in pieces of 14, 14 and 2 blocks.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOVLLM_CHECK_STREAMS", "1")
        patch.setattr(host_pool, "_PIECE_TOKENS", 14 * BLOCK)
        device = create_device("cpu")
        with device.active():
            yield device


def make_engine(device, num_slots=4, num_staging=2, layout=LAYOUT):
    """Return an engine that holds NaN wherever nothing was written."""
    engine = OffloadEngine(device, layout, NUM_BLOCKS, num_slots, num_staging)
    for tensor in (engine._slots, engine._window, engine._writer._staging, engine.recent._tails):
        tensor.fill_(float("nan"))
    return engine


def tokens_of(layer_id, block_ids, version=0):
    """Return keys and values, `[2, len(block_ids) * BLOCK, KV_HEADS, DIM]`; no number twice."""
    size = 2 * BLOCK * KV_HEADS * DIM
    numbers = torch.arange(size, dtype=torch.float32).view(2, BLOCK, KV_HEADS, DIM)
    blocks = [
        numbers + size * ((version * NUM_LAYERS + layer_id) * NUM_BLOCKS + block_id)
        for block_id in block_ids
    ]
    return torch.cat(blocks, 1) if blocks else numbers[:, :0]


def chunk_of(
    block_table,
    num_history,
    num_tokens,
    device_start=None,
    is_last=True,
    block_size=BLOCK,
    buffer_start=None,
    is_first=True,
):
    """Return a chunk of prefill, by default one whose history's full blocks are in the host."""
    if device_start is None:
        device_start = num_history // block_size * block_size
    if buffer_start is None:
        buffer_start = device_start
    places = torch.arange(num_tokens, dtype=torch.int32) + (num_history - buffer_start)
    return Chunk(
        block_table=block_table,
        num_history_tokens=num_history,
        num_tokens=num_tokens,
        device_start=device_start,
        buffer_start=buffer_start,
        block_size=block_size,
        is_prefill=True,
        is_first=is_first,
        is_last=is_last,
        continues=True,
        slots=places,
        cache_slots=places,
    )


def store(engine, layer_id, chunk, tokens):
    """Store a chunk's keys and values, `[2, num_tokens, KV_HEADS, DIM]`, as attention does."""
    target = engine.recent.begin(layer_id, chunk)
    places = chunk.slots.long()
    target.keys.flatten(0, 1)[places], target.values.flatten(0, 1)[places] = tokens
    engine.write_full_blocks(layer_id, chunk)
    engine.recent.end(layer_id, chunk)


def write(engine, layer_id, block_ids, version=0):
    """Send blocks of `tokens_of` to the host; the tensors that they come from are poisoned then."""
    chunk = chunk_of(block_ids, 0, len(block_ids) * BLOCK)
    engine.recent.reserve(chunk.num_tokens)
    store(engine, layer_id, chunk, tokens_of(layer_id, block_ids, version))
    for tensor in engine.get_prefill_buffer_slice(layer_id, chunk.num_tokens):
        tensor.fill_(float("nan"))


def load(engine, layer_id, block_ids, ahead=None):
    """Return what `load_blocks` yields, all of it, `[2, len(block_ids) * BLOCK, KV_HEADS, DIM]`."""
    pieces = [torch.stack(piece) for piece in engine.load_blocks(layer_id, block_ids, ahead)]
    return torch.cat([torch.empty(2, 0, KV_HEADS, DIM), *pieces], 1)
