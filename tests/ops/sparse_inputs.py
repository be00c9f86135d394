"""What the tests of tile-sparse attention share: inputs, the truth in fp64, computed cells."""

import torch
from op_inputs import INF, randn
from tolerances import assert_close, assert_lse_close

from nanovllm.ops.block_sparse import TILE, block_sparse_attention

HEADS = [(4, 2), (9, 3), (4, 4), (8, 1)]


def num_tiles(length):
    return -(-length // TILE)


# Lengths and offsets of queries and keys: q_len, k_len, q_offset, k_offset.
OFFSETS = [
    (1, 257, 256, 0),  # one row after a history
    (5, 389, 384, 0),
    (130, 642, 512, 0),
    (300, 300, 1024, 1024),  # far from the start of the prompt
    (200, 328, 384, 256),  # a piece that holds some history and the chunk
    (130, 256, 512, 128),  # history alone
    (130, 200, 512, 0),  # history whose last tile is partial
    (385, 200, 128, 128),  # rows that go on after the last, partial tile of keys
    (385, 256, 128, 128),  # and after a whole one
    (150, 40, 128, 128),  # rows that all lie in the first query tiles
    (300, 700, 256, 128),  # keys before, beside and after the queries
    (385, 300, 0, 128),  # rows before the piece
    (700, 200, 0, 128),  # rows before, beside and after it
    (256, 300, 0, 512),  # a piece wholly after the queries
]


def make_piece(q_len, k_len, heads, dim=64, dtype=torch.float32, seed=0, device="cpu"):
    """Return queries, keys and values as a model has them: views of one token's row."""
    num_q_heads, num_kv_heads = heads
    q = randn(q_len, num_q_heads + 2, dim, dtype=dtype, seed=seed, device=device)
    kv = randn(k_len, 2 * num_kv_heads + 1, dim, dtype=dtype, seed=seed + 1, device=device)
    return q[:, 1:-1], kv[:, :num_kv_heads], kv[:, num_kv_heads:-1]


def random_tiles(num_q_heads, q_len, k_len, share=0.4, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_q_heads, num_tiles(q_len), num_tiles(k_len))
    return (torch.rand(shape, generator=generator) < share).to(device)


def visible_cells(tiles, q_len, k_len, q_offset=0, k_offset=0):
    """Return which (head, query, key) are computed, from the definition of a tile."""
    queries = torch.arange(q_len, device=tiles.device)
    keys = torch.arange(k_len, device=tiles.device)
    kept = tiles[:, (queries // TILE)[:, None], keys // TILE]
    return kept & (k_offset + keys <= (q_offset + queries)[:, None])


def masked_attention(query, key, value, visible, scale):
    """Compute attention over `visible` cells densely, in fp64."""
    group = query.shape[1] // key.shape[1]
    q = query.double().transpose(0, 1)
    k, v = (t.double().transpose(0, 1).repeat_interleave(group, 0) for t in (key, value))
    # [num_q_heads, q_len, k_len]
    logits = (q @ k.mT * scale).masked_fill(~visible, -INF)
    lse = logits.logsumexp(-1)
    weights = (logits - lse.masked_fill(lse == -INF, 0)[..., None]).exp()
    return (weights @ v).transpose(0, 1), lse


def assert_is_attention(result, truth, dtype):
    """Assert output and LSE to rounding, and that rows without keys are exactly 0 and -inf."""
    (out, lse), (true_out, true_lse) = result, truth
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    empty = true_lse == -INF
    assert torch.equal(lse == -INF, empty)
    assert not out.transpose(0, 1)[empty].any()
    if not empty.all():
        assert_close(out, true_out)
        assert_lse_close(lse, true_lse, dtype)


def check(piece, tiles, q_offset=0, k_offset=0, scale=0.125, backend=None):
    """Assert that tile-sparse attention over a piece of keys is what masking cells gives."""
    query, key, value = piece
    visible = visible_cells(tiles, len(query), len(key), q_offset, k_offset)
    result = block_sparse_attention(query, key, value, tiles, q_offset, k_offset, scale, backend)
    assert result[0].shape == query.shape
    assert result[0].is_contiguous()
    assert_is_attention(result, masked_attention(*piece, visible, scale), query.dtype)


def computed_cells(tiles, q_len, k_len, q_offset=0, k_offset=0):
    """Return which (head, query, key) the op computed, read off its own output.

    With queries of 0 all visible keys weigh the same, and value j is the j-th unit vector.
    """
    heads = len(tiles)
    query, key = torch.zeros(q_len, heads, k_len), torch.ones(k_len, 1, k_len)
    value = torch.eye(k_len)[:, None]
    out, lse = block_sparse_attention(query, key, value, tiles, q_offset, k_offset, 1.0)
    cells = out.transpose(0, 1) > 0
    torch.testing.assert_close(lse.exp(), cells.sum(-1).float())
    return cells
