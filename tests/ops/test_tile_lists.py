"""Lists of key tiles against what a loop over the tiles finds."""

import pytest
import torch
from op_inputs import DEVICE

from nanovllm.ops.kernels import tile_lists as module
from nanovllm.ops.kernels.tile_lists import tile_lists


def random_tiles(*shape, share=0.5):
    generator = torch.Generator().manual_seed(0)
    return (torch.rand(shape, generator=generator) < share).to(DEVICE)


def assert_lists(tiles, diagonal):
    """Assert each list, and that nothing beyond the counts was promised."""
    lists = tile_lists(tiles, diagonal)
    assert lists.full_index.shape == tiles.shape
    for tensor in lists:
        assert tensor.dtype == torch.int32
        assert tensor.is_contiguous()
    num_columns = tiles.shape[2]
    for head in range(tiles.shape[0]):
        for row in range(tiles.shape[1]):
            kept = tiles[head, row].nonzero()[:, 0].tolist()
            own = num_columns if diagonal is None else row + diagonal
            count = lists.full_count[head, row].item()
            assert lists.full_index[head, row, :count].tolist() == [j for j in kept if j < own]
            assert lists.diagonal_count[head, row] == (own in kept)
            expected = own if 0 <= own < num_columns else 0
            assert lists.diagonal_index[head, row].tolist() == [expected]


@pytest.mark.parametrize("diagonal", [None, -6, -2, 0, 1, 3, 40, 41, 100])
def test_lists(diagonal):
    assert_lists(random_tiles(3, 5, 41), diagonal)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_no_tile_and_every_tile(share):
    for diagonal in (None, 0, 3):
        assert_lists(random_tiles(2, 4, 7, share=share), diagonal)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 3), (2, 3, 1), (4, 2, 16), (1, 2, 1025)])
def test_shapes(shape):
    for diagonal in (None, 0, shape[2] - 1, shape[2]):
        assert_lists(random_tiles(*shape), diagonal)


def test_a_list_over_several_steps(monkeypatch):
    monkeypatch.setattr(module, "_COLUMNS", 16)
    for diagonal in (None, 0, 47, 48, 49, 98):
        assert_lists(random_tiles(2, 3, 100), diagonal)


def test_the_longest_row():
    """2M tokens of keys; the last column is kept."""
    tiles = random_tiles(1, 2, 16384)
    tiles[..., -1] = True
    for diagonal in (None, 16382):
        lists = tile_lists(tiles, diagonal)
        for row in range(2):
            kept = tiles[0, row].nonzero()[:, 0]
            if diagonal is not None:
                kept = kept[kept < diagonal + row]
            count = lists.full_count[0, row]
            assert torch.equal(lists.full_index[0, row, :count], kept.int())


def test_views():
    """A slice of rows and columns, and transposed axes, are read by their strides."""
    tiles = random_tiles(6, 5, 9)
    assert_lists(tiles[1:4, 2:, 3:8], 1)
    assert_lists(tiles[:, :, ::2], 2)
    assert_lists(tiles.permute(2, 0, 1), 0)
