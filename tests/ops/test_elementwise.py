"""Ops between the products: torch on a CPU, and the kernels."""

import pytest
import torch
from op_inputs import (
    CPU,
    DEVICE,
    KERNEL_DTYPES,
    NAN,
    randn,
)
from tolerances import assert_close

from nanovllm.ops import elementwise, reference
from nanovllm.ops.kernels import elementwise as kernels

IMPLEMENTATIONS = {"torch": (elementwise, CPU), "kernel": (kernels, DEVICE)}


@pytest.fixture(params=IMPLEMENTATIONS)
def ops(request):
    return IMPLEMENTATIONS[request.param]


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (5, 80), (3, 1537), (2, 3, 17)], ids=str)
def test_rms_norm(ops, shape, dtype):
    module, device = ops
    x = randn(*shape, dtype=dtype, device=device)
    weight = randn(shape[-1], dtype=dtype, seed=1, device=device)
    out = module.rms_norm(x, weight, 1e-2)
    assert out.dtype == dtype
    assert_close(out, reference.rms_norm(x.double(), weight.double(), 1e-2))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (5, 80), (3, 1537)], ids=str)
def test_add_rms_norm(ops, shape, dtype):
    """The norm is of the sum as it is stored; the sum is exactly that of the two tensors."""
    module, device = ops
    x, residual = (randn(*shape, dtype=dtype, seed=i, device=device) for i in range(2))
    weight = randn(shape[-1], dtype=dtype, seed=2, device=device)
    expected = x + residual
    out, total = module.add_rms_norm(x, residual, weight, 1e-2)
    assert torch.equal(total, expected)
    assert_close(out, reference.rms_norm(expected.double(), weight.double(), 1e-2))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (5, 160), (3, 2050)], ids=str)
def test_silu_and_mul(ops, shape, dtype):
    module, device = ops
    gate_up = 5 * randn(*shape, dtype=dtype, device=device)
    out = module.silu_and_mul(gate_up.clone())
    assert out.shape == (shape[0], shape[1] // 2)
    assert_close(out, reference.silu_and_mul(gate_up.double()))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(1, 1, 16), (3, 3, 64), (9, 3, 80), (17, 1, 96), (4, 2, 256)]
)
def test_rotate_and_store(ops, heads, kv_heads, dim, dtype):
    """Queries are rotated in place, keys rotated and values as they are go to their slots only."""
    module, device = ops
    num_tokens, block_size = 5, 16
    # Rows that lie apart, as those of a wider tensor do.
    wide = randn(num_tokens, heads + 2 * kv_heads + 1, dim, dtype=dtype, device=device)
    mixed, query = wide[:, :-1], wide[:, :heads]
    before = wide.double()
    caches = torch.full((2, 3, block_size, kv_heads, dim), NAN, dtype=dtype, device=device)
    slots = torch.tensor([47, 0, 15, 16, 31], dtype=torch.int32, device=device)
    angle = 100 * randn(num_tokens, dim // 2, seed=1, device=device)
    cos, sin = angle.cos(), angle.sin()
    module.rotate_and_store(mixed, *caches, slots, cos, sin)

    assert_close(query, reference.rotate(before[:, :heads], cos, sin))
    keys, values = caches.flatten(1, 2)
    assert_close(keys[slots], reference.rotate(before[:, heads : heads + kv_heads], cos, sin))
    assert torch.equal(values[slots].double(), before[:, heads + kv_heads : -1])
    assert torch.equal(wide[:, -1].double(), before[:, -1])
    others = [slot for slot in range(3 * block_size) if slot not in slots.tolist()]
    assert caches.flatten(1, 2)[:, others].isnan().all()


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (9, 80), (32, 128)])
def test_rotate(ops, heads, dim, dtype):
    module, device = ops
    query = randn(3, heads, dim, dtype=dtype, device=device)
    before = query.double()
    angle = 100 * randn(3, dim // 2, seed=1, device=device)
    module.rotate(query, angle.cos(), angle.sin())
    assert_close(query, reference.rotate(before, angle.cos(), angle.sin()))


# The axes of a cache in memory, outermost first: blocks, tokens, heads.
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1)], ids=str)
@pytest.mark.parametrize("num_blocks", [1, 4])
@pytest.mark.parametrize("room", [0, 1], ids=["dense", "apart"])
def test_store_in_a_cache_of_any_strides(ops, order, num_blocks, room):
    """Slots that follow each other in a block and across blocks, and scattered ones; a view."""
    module, device = ops
    shape = (num_blocks, 6, 2)  # blocks whose size is no power of two
    pool = torch.empty(2, *(shape[axis] + room for axis in order), 16 + room, device=device)
    views = pool.permute(0, *(1 + order.index(axis) for axis in range(3)), 4)
    caches = views[:, :num_blocks, :6, :2, :16]
    last = 6 * num_blocks - 1
    for slots in ([last], [1, 2, 3], list(range(last + 1)), [last, 0, 3, 1], [4, 5, 6][: last - 3]):
        pool.fill_(NAN)
        heads = randn(len(slots), 7, 16, device=device)
        before = heads.double()
        angle = 100 * randn(len(slots), 8, seed=1, device=device)
        where = torch.tensor(slots, dtype=torch.int32, device=device)
        module.rotate_and_store(heads, *caches, where, angle.cos(), angle.sin())
        keys, values = (cache[where // 6, where % 6] for cache in caches)
        assert_close(keys, reference.rotate(before[:, 3:5], angle.cos(), angle.sin()))
        assert torch.equal(values.double(), before[:, 5:])
        assert pool.isfinite().sum() == 2 * keys.numel(), "nothing else was written"


def test_rotated_queries_are_a_view():
    heads, caches = randn(3, 8, 16, device=CPU), torch.empty(2, 1, 16, 2, 16)
    ones = torch.ones(3, 8)
    query = elementwise.rotate_and_store(heads, *caches, torch.arange(3), ones, 0 * ones)
    assert query.data_ptr() == heads.data_ptr()
    assert query.shape == (3, 4, 16)


def test_reference_rotation_by_complex_numbers():
    """Pairs (i, i + dim / 2) are complex numbers, turned by the angle."""
    x, angle = randn(5, 3, 16, device=CPU), randn(5, 8, seed=1, device=CPU)
    turned = torch.complex(*x.chunk(2, dim=-1)) * torch.exp(1j * angle)[:, None]
    out = reference.rotate(x, angle.cos(), angle.sin())
    assert_close(out, torch.cat((turned.real, turned.imag), dim=-1))
