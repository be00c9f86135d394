"""Every tile-sparse backend keeps the op's contract.

Without a card the code around the kernels is tested: a stand-in of flash-attn-4's kernel reads the
lists as that kernel's source does, and `flex_attention` runs uncompiled, where it takes only the
mask function, so that a stand-in makes the lists a part of that.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_inputs import DEVICE, INF, truth_of
from sparse_inputs import (
    HEADS,
    OFFSETS,
    assert_is_attention,
    check,
    make_piece,
    masked_attention,
    num_tiles,
    random_tiles,
    visible_cells,
)
from tolerances import assert_close, assert_lse_close
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention import flex_attention as pytorch_flex
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from nanovllm.ops.attention import flash_attn_with_lse, merge_attention_outputs
from nanovllm.ops.backends import _TILE_TABLE, flex, tile_reasons_against
from nanovllm.ops.backends import _load_tile as load
from nanovllm.ops.backends.torch_attention import TorchAttention
from nanovllm.ops.block_sparse import TILE, block_sparse_attention

LENGTHS = [1, 127, 128, 129, 300, 511, 1024]


class BlockSparseTensorsTorch(NamedTuple):
    """What flash-attn-4 takes lists in, as far as the backend fills it."""

    mask_block_cnt: torch.Tensor
    mask_block_idx: torch.Tensor
    full_block_cnt: torch.Tensor
    full_block_idx: torch.Tensor
    cu_total_m_blocks: torch.Tensor | None = None
    cu_block_idx_offsets: torch.Tensor | None = None
    block_size: tuple[int, int] | None = None


def stand_in_of_flash_attn_func(
    q, k, v, *, softmax_scale, causal, pack_gqa, block_sparse_tensors, return_lse
):
    """Do what `consume_block_sparse_loads` and `apply_mask` of flash_attn.cute do on Hopper.

    Columns past the keys count as keys of 0, as TMA fills them, unless the causal mask or, in the
    first tile taken from a list, the mask of the length hides them.
    """
    assert return_lse
    assert not pack_gqa
    lists = block_sparse_tensors
    assert lists.block_size == (TILE, TILE)
    (_, q_len, num_heads, _), k_len = q.shape, k.shape[1]
    for count, index in (lists[:2], lists[2:4]):
        assert count.dtype == index.dtype == torch.int32
        assert count.shape == (1, num_heads, num_tiles(q_len))
        assert index.shape[:3] == count.shape
        assert index.shape[3] <= num_tiles(k_len)
        assert index.stride(3) == 1
    padded = num_tiles(k_len) * TILE
    cells = torch.zeros(num_heads, q_len, padded, dtype=torch.bool)
    columns = torch.arange(TILE)
    for head, tile in torch.cartesian_prod(torch.arange(num_heads), torch.arange(num_tiles(q_len))):
        rows = torch.arange(tile * TILE, min((tile + 1) * TILE, q_len))
        for count, index in (lists[:2], lists[2:4]):
            taken = index[0, head, tile][: count[0, head, tile]].tolist()
            for i, column in enumerate(reversed(taken)):
                keys = column * TILE + columns
                seen = torch.ones(len(rows), TILE, dtype=torch.bool)
                if causal:
                    seen &= keys <= (rows + k_len - q_len)[:, None]
                if i == 0:
                    seen &= keys < k_len
                cells[head, rows[0] : rows[-1] + 1, keys[0] : keys[-1] + 1] = seen
    keys, values = (torch.cat((t[0], t.new_zeros(padded - k_len, *t.shape[2:]))) for t in (k, v))
    out, lse = masked_attention(q[0], keys, values, cells, softmax_scale)
    return out[None].to(q.dtype).contiguous(), lse[None].float()


def flex_attention_of_lists(query, key, value, *, block_mask, **options):
    """Call `flex_attention` with the lists of tiles made a part of the mask function."""
    shape = (query.shape[1], num_tiles(query.shape[2]), num_tiles(key.shape[2]))

    def dense(count, index):
        assert count.shape[1:] == shape[:2]
        assert index.shape[1:] == shape
        listed = torch.arange(shape[2]) < count[0, ..., None]
        tiles = torch.zeros(*shape[:2], shape[2] + 1, dtype=torch.bool)
        return tiles.scatter_(2, torch.where(listed, index[0].long(), shape[2]), True)

    assert block_mask.BLOCK_SIZE == (TILE, TILE)
    masked = dense(block_mask.kv_num_blocks, block_mask.kv_indices)
    whole = dense(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    within = block_mask.mask_mod

    def mask_mod(batch, head, q, k):
        tile = (head, q // TILE, k // TILE)
        return whole[tile] | masked[tile] & within(batch, head, q, k)

    mask = BlockMask.from_kv_blocks(
        *(block_mask.kv_num_blocks, block_mask.kv_indices),
        BLOCK_SIZE=TILE,
        mask_mod=mask_mod,
        seq_lengths=block_mask.seq_lengths,
        compute_q_blocks=False,
    )
    return flex_attention(query, key, value, block_mask=mask, **options)


@pytest.fixture(scope="module", params=_TILE_TABLE)
def backend(request):
    """A backend on the CPU, its kernel stood in for if it needs a card."""
    with pytest.MonkeyPatch.context() as patch:
        package, cute = ModuleType("flash_attn"), ModuleType("flash_attn.cute")
        interface = SimpleNamespace(flash_attn_func=stand_in_of_flash_attn_func)
        sparsity = SimpleNamespace(BlockSparseTensorsTorch=BlockSparseTensorsTorch)
        for name, module in (
            ("flash_attn", package),
            ("flash_attn.cute", cute),
            ("flash_attn.cute.interface", interface),
            ("flash_attn.cute.block_sparsity", sparsity),
        ):
            patch.setitem(sys.modules, name, module)
        patch.setattr(pytorch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
        patch.setattr(flex, "flex_attention", flex_attention_of_lists)
        patch.setattr(flex, "_compiled", lambda: flex._attend)
        yield load(request.param)


without_card = pytest.mark.skipif(DEVICE.type != "cpu", reason="kernels are not interpreted here")


@without_card
@pytest.mark.parametrize("length", [1, 128, 129, 300])
def test_all_tiles_are_dense_attention(backend, length):
    piece = make_piece(length, length, (4, 2))
    tiles = torch.ones(4, num_tiles(length), num_tiles(length), dtype=torch.bool)
    out, lse = block_sparse_attention(*piece, tiles, 0, 0, 0.125, backend)
    whole = (t[None] for t in piece)
    dense, dense_lse = flash_attn_with_lse(*whole, 0.125, True, TorchAttention())
    assert_close(out, dense[0])
    assert_lse_close(lse, dense_lse[0], torch.float32)


@without_card
@pytest.mark.parametrize(("q_len", "k_len", "q_offset", "k_offset"), OFFSETS)
def test_offsets(backend, q_len, k_len, q_offset, k_offset):
    piece = make_piece(q_len, k_len, (9, 3), 32)
    for share in (0.5, 1.0):
        tiles = random_tiles(9, q_len, k_len, share)
        check(piece, tiles, q_offset, k_offset, backend=backend)


@without_card
@settings(max_examples=25)
@given(
    q_len=st.integers(1, 400),
    k_len=st.integers(1, 400),
    q_tile=st.integers(0, 4),
    k_tile=st.integers(0, 4),
    seed=st.integers(0, 1 << 20),
)
def test_any_tiles(backend, q_len, k_len, q_tile, k_tile, seed):
    tiles = random_tiles(4, q_len, k_len, seed=seed)
    piece = make_piece(q_len, k_len, (4, 2), 16)
    check(piece, tiles, q_tile * TILE, k_tile * TILE, backend=backend)


@without_card
def test_rows_without_tiles(backend):
    """What lies behind the end of a list, here the largest integer, is not read."""
    piece = make_piece(300, 300, (4, 2))
    tiles = torch.ones(4, 3, 3, dtype=torch.bool)
    tiles[1], tiles[2, 0], tiles[3, 2], tiles[0, 1, 1] = False, False, False, False
    torch.use_deterministic_algorithms(True)
    try:
        check(piece, tiles, backend=backend)
        check(piece, torch.zeros_like(tiles), backend=backend)
    finally:
        torch.use_deterministic_algorithms(False)


@without_card
def test_wrong_lists_are_seen(backend, monkeypatch):
    """Controls: a mistake in what reaches a kernel shows in the result."""
    if backend.name == "torch":
        pytest.skip("reads the tiles themselves")
    from nanovllm.ops.kernels import tile_lists as module

    piece = make_piece(300, 428, (4, 2))
    tiles = random_tiles(4, 300, 428, 0.6)
    tiles[:, torch.arange(3), torch.arange(3) + 1] = True
    right = module.tile_lists

    def listed(change, q_offset=TILE):
        monkeypatch.setattr(module, "tile_lists", lambda *args: change(right(*args)))
        with pytest.raises(AssertionError):
            check(piece, tiles, q_offset, backend=backend)
        monkeypatch.setattr(module, "tile_lists", right)
        check(piece, tiles, q_offset, backend=backend)

    listed(lambda lists: lists._replace(full_count=lists.full_count.clamp(max=1)))
    listed(lambda lists: lists._replace(full_index=torch.zeros_like(lists.full_index)))
    listed(lambda lists: lists._replace(diagonal_count=torch.zeros_like(lists.full_count)))
    if backend.name == "fa4":  # a partial tile of history has to be the last of its list
        piece, tiles = make_piece(130, 200, (4, 2)), torch.ones(4, 2, 2, dtype=torch.bool)
        listed(lambda lists: lists._replace(full_index=lists.full_index.flip(2)), q_offset=512)


@without_card
def test_flex_compiles_few_times(monkeypatch):
    """Not once more for a longer history, another last chunk, or another prompt."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(flex._attend, fullgraph=True, backend=counter)
    monkeypatch.setattr(flex, "_compiled", lambda: compiled)
    backend = load("flex")
    with torch.inference_mode():
        for q_len, offset in [(256, 0), (256, 256), (256, 512), (200, 768), (300, 0), (150, 0)]:
            piece = make_piece(q_len, offset + q_len, (4, 2), 16)
            tiles = random_tiles(4, q_len, offset + q_len)
            block_sparse_attention(*piece, tiles, offset, 0, 0.2, backend)
    assert counter.frame_count == 1


# On the card


@pytest.fixture
def on_card():
    """Return what gets a backend on the card by name, with nothing compiled by PyTorch yet."""
    torch.compiler.reset()

    def get(name, dtype, dim):
        if reasons := tile_reasons_against(name, DEVICE, dtype, dim):
            pytest.skip("; ".join(reasons))
        return load(name)

    return get


GPU_BACKENDS = sorted(set(_TILE_TABLE) - {"torch"})
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Each compiles kernels of its own, for seconds: all of them for the backend that is used most.
ON_CARD = [
    *(("fa4", heads, dim, BF16) for heads in HEADS for dim in (64, 96, 128)),
    *(("fa4", (9, 3), dim, dtype) for dim, dtype in ((80, BF16), (64, FP16), (128, FP16))),
    *(("flex", heads, 64, BF16) for heads in HEADS),
    *(("flex", (9, 3), dim, BF16) for dim in (80, 96, 128)),
    *(("flex", (9, 3), dim, dtype) for dim, dtype in ((64, FP16), (64, FP32), (128, FP32))),
]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "heads", "dim", "dtype"), ON_CARD, ids=str)
def test_contract_on_the_card(on_card, name, heads, dim, dtype):
    """Lengths and offsets; all tiles as dense attention; first column and diagonal as a policy."""
    backend = on_card(name, dtype, dim)
    scale = dim**-0.5
    for length in LENGTHS:
        piece = make_piece(length, length, heads, dim, dtype, device=DEVICE)
        every = torch.ones(heads[0], *2 * [num_tiles(length)], dtype=torch.bool, device=DEVICE)
        out, lse = block_sparse_attention(*piece, every, 0, 0, scale, backend)
        dense, dense_lse = truth_of(*(t[None] for t in piece), True, scale)
        assert_is_attention((out, lse), (dense[0], dense_lse[0]), dtype)
        forced = random_tiles(heads[0], length, length, 0.3, device=DEVICE)
        forced[:, :, 0] = True
        forced |= torch.eye(num_tiles(length), dtype=torch.bool, device=DEVICE)
        check(piece, forced, scale=scale, backend=backend)
    for q_len, k_len, q_offset, k_offset in OFFSETS:
        piece = make_piece(q_len, k_len, heads, dim, dtype, device=DEVICE)
        for share in (0.5, 1.0):
            tiles = random_tiles(heads[0], q_len, k_len, share, device=DEVICE)
            check(piece, tiles, q_offset, k_offset, scale, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_rows_without_tiles_on_the_card(on_card, name):
    """Whole query tiles, one head, and everything, amid poison beside and after the views."""
    backend = on_card(name, BF16, 64)
    views = []
    for tensor in make_piece(300, 300, (4, 2), dtype=BF16, device=DEVICE):
        wide = tensor.new_full((310, 3, *tensor.shape[1:]), float("nan"))
        wide[:300, 1] = tensor
        views.append(wide[:300, 1])
    tiles = torch.ones(4, 3, 3, dtype=torch.bool, device=DEVICE)
    tiles[1], tiles[2, 0], tiles[3, 2], tiles[0, 1, 1] = False, False, False, False
    check(views, tiles, backend=backend)
    check(views, torch.zeros_like(tiles), backend=backend)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_pieces_merge_on_the_card(on_card, name):
    """Keys cut at every tile border merge to attention over all of them."""
    backend = on_card(name, BF16, 128)
    q_len, k_len, offset = 700, 1724, 1024
    query, key, value = make_piece(q_len, k_len, (8, 2), 128, BF16, device=DEVICE)
    tiles = random_tiles(8, q_len, k_len, 0.4, device=DEVICE)
    visible = visible_cells(tiles, q_len, k_len, offset)
    truth = masked_attention(query, key, value, visible, 0.09)
    for cut in range(TILE, k_len, TILE):
        parts = []
        for keys in (slice(0, cut), slice(cut, k_len)):
            columns = slice(keys.start // TILE, num_tiles(keys.stop))
            out, lse = block_sparse_attention(
                query,
                key[keys],
                value[keys],
                tiles[:, :, columns],
                offset,
                keys.start,
                0.09,
                backend,
            )
            parts += [out[None], lse[None]]
        out, lse = merge_attention_outputs(*parts)
        assert torch.equal(lse[0] == -INF, truth[1] == -INF)
        assert_close(out[0], truth[0])
        assert_lse_close(lse[0], truth[1], BF16)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_no_synchronisation_on_the_card(on_card, name):
    backend = on_card(name, BF16, 128)
    piece = make_piece(512, 1024, (8, 2), 128, BF16, device=DEVICE)
    tiles = random_tiles(8, 512, 1024, device=DEVICE)
    block_sparse_attention(*piece, tiles, 512, 0, 0.09, backend)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        block_sparse_attention(*piece, tiles, 512, 0, 0.09, backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
