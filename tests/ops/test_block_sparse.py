"""Tile-sparse attention against attention with masked cells, computed in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_inputs import DTYPES, INF, NAN
from sparse_inputs import (
    HEADS,
    OFFSETS,
    assert_is_attention,
    check,
    computed_cells,
    make_piece,
    masked_attention,
    num_tiles,
    random_tiles,
    visible_cells,
)
from tolerances import assert_close, assert_lse_close, relative_rms

from nanovllm.errors import BackendUnavailableError
from nanovllm.ops.attention import flash_attn_with_lse, merge_attention_outputs
from nanovllm.ops.backends import torch_block_sparse
from nanovllm.ops.block_sparse import (
    TILE,
    block_sparse_attention,
    causal_tiles,
    num_causal_tiles,
)

LENGTHS = [1, 2, 127, 128, 129, 255, 256, 300, 385, 511, 700]


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_all_tiles_are_dense_attention(heads, length):
    piece = make_piece(length, length, heads)
    tiles = torch.ones(heads[0], num_tiles(length), num_tiles(length), dtype=torch.bool)
    out, lse = block_sparse_attention(*piece, tiles, 0, 0, 0.125)
    dense, dense_lse = flash_attn_with_lse(*(t[None] for t in piece), 0.125, causal=True)
    assert_close(out, dense[0])
    assert_lse_close(lse, dense_lse[0], torch.float32)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("length", LENGTHS)
def test_random_tiles(heads, length):
    check(make_piece(length, length, heads), random_tiles(heads[0], length, length))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128])
def test_dtypes_and_head_dims(dtype, dim):
    piece = make_piece(300, 556, (4, 2), dim, dtype)
    check(piece, random_tiles(4, 300, 556, 0.6), q_offset=256, scale=dim**-0.5)


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize(("q_len", "k_len", "q_offset", "k_offset"), OFFSETS)
def test_offsets(heads, q_len, k_len, q_offset, k_offset):
    piece = make_piece(q_len, k_len, heads)
    for share in (0.5, 1.0):
        check(piece, random_tiles(heads[0], q_len, k_len, share), q_offset, k_offset)


@settings(max_examples=60)
@given(
    data=st.data(),
    heads=st.sampled_from(HEADS),
    q_len=st.integers(1, 400),
    k_len=st.integers(1, 400),
    q_tile=st.integers(0, 4),
    k_tile=st.integers(0, 4),
)
def test_any_tiles(data, heads, q_len, k_len, q_tile, k_tile):
    shape = (heads[0], num_tiles(q_len), num_tiles(k_len))
    size = shape[0] * shape[1] * shape[2]
    flags = data.draw(st.lists(st.booleans(), min_size=size, max_size=size))
    tiles = torch.tensor(flags).view(shape)
    check(make_piece(q_len, k_len, heads, 16), tiles, q_tile * TILE, k_tile * TILE)


@settings(max_examples=30)
@given(
    heads=st.sampled_from(HEADS),
    q_len=st.integers(1, 300),
    history=st.integers(1, 3),
    split=st.integers(0, 4),
    seed=st.integers(0, 1 << 20),
)
def test_pieces_merge_to_the_whole(heads, q_len, history, split, seed):
    """Keys cut at any tile border, with a mask that leaves rows empty in one piece or in both."""
    offset, k_len = history * TILE, history * TILE + q_len
    cut = min(split, k_len // TILE) * TILE
    query, key, value = make_piece(q_len, k_len, heads, 32)
    tiles = random_tiles(heads[0], q_len, k_len, seed=seed)
    parts = []
    for keys, columns in (
        (slice(0, cut), slice(0, num_tiles(cut))),
        (slice(cut, None), slice(num_tiles(cut), None)),
    ):
        out, lse = block_sparse_attention(
            query, key[keys], value[keys], tiles[:, :, columns], offset, keys.start, 0.2
        )
        parts += [out[None], lse[None]]
    out, lse = merge_attention_outputs(*parts)
    visible = visible_cells(tiles, q_len, k_len, offset)
    truth = masked_attention(query, key, value, visible, 0.2)
    assert_is_attention((out[0], lse[0]), truth, torch.float32)


def test_rows_without_tiles():
    """Whole query tiles, one head, and everything: 0 and -inf, whatever memory held before."""
    piece = make_piece(300, 300, (4, 2))
    tiles = torch.ones(4, 3, 3, dtype=torch.bool)
    tiles[1], tiles[2, 0], tiles[3, 2] = False, False, False
    tiles[0, 1, 1] = False
    torch.use_deterministic_algorithms(True)  # fills what torch.empty returns with NaN
    try:
        check(piece, tiles)
        check(piece, torch.zeros_like(tiles))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("q_len", "k_len"), [(0, 200), (200, 0), (0, 0)])
def test_nothing_to_attend(q_len, k_len):
    piece = make_piece(q_len, k_len, (4, 2))
    check(piece, random_tiles(4, q_len, k_len), q_offset=256)


def test_batches_of_a_small_buffer(monkeypatch):
    """A group of query tiles split over several calls, and a list longer than the buffer."""
    monkeypatch.setattr(torch_block_sparse, "_GATHERED_BYTES", 3 * TILE * 2 * 64 * 4)
    for share in (0.5, 1.0):
        check(make_piece(700, 700, (9, 3)), random_tiles(9, 700, 700, share))


def test_cells_after_the_keys_are_not_read():
    """Views amid poison: neither the rows beside a view nor those after it reach the result."""
    tiles = random_tiles(4, 300, 300, 0.7)
    views = []
    for tensor in make_piece(300, 300, (4, 2)):
        wide = torch.full((310, 3, tensor.shape[1], 64), NAN)
        wide[:300, 1] = tensor
        views.append(wide[:300, 1])
    check(views, tiles)


# Which cells are computed


@pytest.mark.parametrize(
    ("q_len", "k_len", "q_offset", "k_offset"),
    [(300, 300, 0, 0), (140, 300, 256, 0), (300, 140, 128, 128), (200, 200, 256, 0)],
)
def test_computed_cells(q_len, k_len, q_offset, k_offset):
    tiles = random_tiles(3, q_len, k_len, 0.6)
    cells = computed_cells(tiles, q_len, k_len, q_offset, k_offset)
    for head in range(3):
        for i in range(q_len):
            kept = [
                tiles[head, i // TILE, j // TILE].item() and k_offset + j <= q_offset + i
                for j in range(k_len)
            ]
            assert cells[head, i].tolist() == kept


def test_sinks_are_the_first_keys():
    """Column 0 of the tiles is the first keys, for every query; row 0 would be the first queries.

    The second half is the control: keeping row 0 instead is seen in the count.
    """
    length = 300
    column, row = torch.zeros(2, 1, 3, 3, dtype=torch.bool)
    column[:, :, 0] = True
    row[:, 0] = True
    counts = computed_cells(column, length, length).sum(-1)[0]
    assert counts.tolist() == [min(i + 1, TILE) for i in range(length)]
    triangle = TILE * (TILE + 1) // 2
    assert counts.sum() == triangle + (length - TILE) * TILE
    assert computed_cells(row, length, length).sum() == triangle


@pytest.mark.parametrize(("q_len", "q_offset"), [(1, 0), (128, 128), (300, 0), (129, 640)])
def test_number_of_causal_tiles(q_len, q_offset):
    tiles = causal_tiles(q_len, q_offset + q_len, q_offset, 0, torch.device("cpu"))
    assert num_causal_tiles(q_len, q_offset) == tiles.sum()


def test_causal_tiles():
    """Exactly the tiles that hold a visible cell, so that they are what a density counts."""
    for q_len, k_len, q_offset, k_offset in [
        (300, 300, 0, 0),
        (1, 385, 384, 0),
        (300, 129, 128, 256),
        (129, 300, 0, 512),
    ]:
        tiles = causal_tiles(q_len, k_len, q_offset, k_offset, torch.device("cpu"))
        every = torch.ones(1, *tiles.shape, dtype=torch.bool)
        cells = computed_cells(every, q_len, k_len, q_offset, k_offset)[0]
        for i, j in torch.cartesian_prod(*map(torch.arange, tiles.shape)).tolist():
            tile = cells[i * TILE : (i + 1) * TILE, j * TILE : (j + 1) * TILE]
            assert tile.any() == tiles[i, j]


# Controls


def wrong_results(piece, tiles):
    """Yield results of mistakes that such a kernel can make, on a piece after a history of 128."""
    query, key, value = piece
    visible = visible_cells(tiles, len(query), len(key), TILE)
    every = torch.ones_like(tiles)
    yield "dense", (*piece, visible_cells(every, len(query), len(key), TILE), 0.125)
    yield "offset ignored", (*piece, visible_cells(tiles, len(query), len(key)), 0.125)
    yield "heads shifted", (*piece, visible.roll(1, 0), 0.125)
    yield (
        "mean over the group",
        (
            *piece,
            visible.view(2, 2, *visible.shape[1:]).any(1).repeat_interleave(2, 0),
            0.125,
        ),
    )
    yield "wrong KV head", (query, key.flip(1), value.flip(1), visible, 0.125)
    yield "wrong scale", (*piece, visible, 0.13)
    strict = visible.clone()
    strict[:, range(len(query)), range(TILE, TILE + len(query))] = False
    yield "own key hidden", (*piece, strict, 0.125)


def test_wrong_attention_is_seen():
    piece = make_piece(300, 428, (4, 2))
    tiles = random_tiles(4, 300, 428, 0.5)
    tiles[:, torch.arange(3), torch.arange(3) + 1] = True
    check(piece, tiles, q_offset=TILE)
    out, lse = block_sparse_attention(*piece, tiles, TILE, 0, 0.125)
    for name, inputs in wrong_results(piece, tiles):
        wrong, wrong_lse = masked_attention(*inputs)
        assert relative_rms(out, wrong) > 1e-2, name
        difference = (lse - wrong_lse).abs()
        assert difference[wrong_lse > -INF].max() > 1e-3, name


def test_one_lost_key_is_seen():
    """The last key of a partial tile, or one padded key too many, is beyond the tolerances."""
    query, key, value = make_piece(130, 200, (4, 2))
    tiles = torch.ones(4, 2, 2, dtype=torch.bool)
    result = block_sparse_attention(query, key, value, tiles, 256, 0, 0.125)
    padded = [torch.cat((t, torch.zeros_like(t[:1]))) for t in (key, value)]
    for k, v in ((key[:-1], value[:-1]), padded):
        visible = visible_cells(tiles, 130, len(k), 256)
        truth = masked_attention(query, k, v, visible, 0.125)
        with pytest.raises(AssertionError):
            assert_is_attention(result, truth, torch.float32)


# Refusals


def test_refusals():
    query, key, value = make_piece(130, 200, (4, 2))
    tiles = torch.ones(4, 2, 2, dtype=torch.bool)

    def refused(match, q=query, k=key, v=value, t=tiles, q_offset=256, k_offset=0):
        with pytest.raises(ValueError, match=match):
            block_sparse_attention(q, k, v, t, q_offset, k_offset, 0.125)

    refused("q_offset=100 is no multiple of 128", q_offset=100)
    refused("k_offset=-128 is no multiple of 128", k_offset=-TILE)
    refused("do not fit keys", v=value[1:])
    refused("do not fit keys", q=query[:, :3], t=tiles[:3])
    refused("dtypes differ", k=key.half())
    refused(r"needed are \[4, 2, 2\]", t=tiles[:2])
    refused(r"needed are \[4, 2, 2\]", t=tiles[:, :, :1])
    refused("torch.int64", t=tiles.long())


def test_where_nothing_computes_it():
    piece = [t.to("meta") for t in make_piece(130, 200, (4, 2))]
    tiles = torch.ones(4, 2, 2, dtype=torch.bool, device="meta")
    with pytest.raises(BackendUnavailableError, match="needs a CPU, not meta"):
        block_sparse_attention(*piece, tiles, 256, 0, 0.125)
