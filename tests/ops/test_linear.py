"""Products with a weight: the streaming kernel of one row, and the packed weights of the CPU."""

import pytest
import torch
from op_inputs import DEVICE, randn
from tolerances import assert_close

from nanovllm.layers.linear import Linear
from nanovllm.ops.kernels.gemv import gemv, gemv_pays


# Rows long enough for one a program, columns that no power of two divides, rows left over.
@pytest.mark.parametrize(("n", "k"), [(5, 4096), (8, 512), (7, 576), (3, 80), (6, 2049), (1, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_gemv(n, k, bias):
    dtype = torch.float16
    x = randn(1, k, dtype=dtype)
    weight = randn(n, k, dtype=dtype, seed=1)
    added = randn(n, dtype=dtype, seed=2) if bias else None
    truth = x.double() @ weight.double().T + (added.double() if bias else 0)
    assert_close(gemv(x, weight, added), truth, dtype)


def test_gemv_reads_nothing_beyond_the_weight():
    """The rows and columns that fill up a tile lie in poison."""
    memory = torch.full((20, 576), float("nan"), dtype=torch.float16, device=DEVICE)
    weight, x = memory[4:11], torch.ones(1, 576, dtype=torch.float16, device=DEVICE)
    weight.fill_(0.5)
    assert torch.equal(gemv(x, weight, None), torch.full_like(x[:, :7], 288.0))


@pytest.mark.parametrize(
    ("n", "k", "pays"), [(4096, 4096, True), (576, 576, True), (49152, 576, False)]
)
def test_gemv_pays_where_it_was_measured_to(n, k, pays):
    assert gemv_pays(n, k) == pays


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 9, 200])
def test_packing_changes_nothing(dtype, rows):
    layer = Linear(48, {"a": 20, "b": 13}, bias=True)
    layer.weight.data = randn(33, 48, dtype=dtype, device="cpu")
    layer.bias.data = randn(33, dtype=dtype, seed=1, device="cpu")
    x = randn(rows, 48, dtype=dtype, seed=2, device="cpu")
    truth = x.double() @ layer.weight.double().T + layer.bias.double()
    for _ in range(2):
        assert_close(layer(x), truth, dtype)
        for name, part in (("a", truth[:, :20]), ("b", truth[:, 20:])):
            assert_close(layer.part(x, name), part, dtype)
        layer.pack()


def test_packing_leaves_a_shared_weight_alone():
    layer = Linear(16, {"head": 8})
    shared = torch.nn.Parameter(
        randn(8, 16, dtype=torch.bfloat16, device="cpu"), requires_grad=False
    )
    layer.weight = shared
    layer.pack()
    assert shared.shape == (8, 16)
