"""Dense attention and its merging against the plain-torch truth, computed in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from op_inputs import (
    CPU,
    DEVICE,
    DTYPES,
    INF,
    KERNEL_DTYPES,
    LENGTHS,
    NAN,
    make_qkv,
    randn,
    truth_of,
)
from tolerances import assert_close, assert_lse_close, relative_rms

from nanovllm.ops import reference
from nanovllm.ops.attention import flash_attn_with_lse, merge_attention_outputs
from nanovllm.ops.backends.torch_attention import TorchAttention
from nanovllm.ops.kernels import merge as merge_kernel

# The kernel divides by, and takes the logarithm of, the 0 keys of a row that has none.
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in divide:RuntimeWarning"),
]

# The reference


@pytest.mark.parametrize(("q_len", "k_len"), [(1, 1), (5, 5), (3, 8)])
def test_reference_by_rows(q_len, k_len):
    """Row i of a causal chunk attends to the history and to the chunk's keys up to its own."""
    query, key, value = (t.double() for t in make_qkv(q_len, k_len, 4, 2, 16))
    out, lse = truth_of(query, key, value, causal=True)
    for head in range(4):
        for i in range(q_len):
            visible = k_len - q_len + i + 1
            logits = key[0, :visible, head // 2] @ query[0, i, head] / 4
            torch.testing.assert_close(lse[0, head, i], logits.exp().sum().log())
            row = logits.softmax(0) @ value[0, :visible, head // 2]
            torch.testing.assert_close(out[0, i, head], row)


# flash_attn_with_lse on the torch backend


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 17, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_head_dims_and_dtypes(dtype, dim, causal):
    qkv = make_qkv(33, 71, 4, 2, dim, dtype)
    out, lse = flash_attn_with_lse(*qkv, causal=causal)
    truth, truth_lse = truth_of(*qkv, causal)
    assert out.dtype == dtype
    assert_close(out, truth)
    assert_lse_close(lse, truth_lse, dtype)


@pytest.mark.parametrize("heads", [(1, 1), (4, 4), (4, 2), (9, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_heads_and_lengths(heads, lengths, causal):
    qkv = make_qkv(*lengths, *heads, 32, batch=2)
    out, lse = flash_attn_with_lse(*qkv, causal=causal, softmax_scale=0.3)
    truth, truth_lse = truth_of(*qkv, causal, scale=0.3)
    assert_close(out, truth)
    assert_lse_close(lse, truth_lse, torch.float32)


@pytest.mark.parametrize("lengths", [(1, 50), (40, 50)], ids=str)
def test_wrong_attention_is_seen(lengths):
    """Control: a key too few, the wrong KV head and the wrong scale are each beyond rounding."""
    query, key, value = make_qkv(*lengths, 4, 2, 32)
    truth, _ = truth_of(query, key, value, causal=True)
    for wrong in (
        truth_of(query, key[:, 1:], value[:, 1:], causal=True),
        truth_of(query, key.flip(2), value.flip(2), causal=True),
        truth_of(query, key, value, causal=True, scale=0.18),
    ):
        assert relative_rms(wrong[0], truth) > 1e-2


@pytest.mark.parametrize("q_len", [1, 5])
def test_inputs_may_be_views(q_len):
    """Queries, keys and values as a model has them: side by side in one tensor."""
    heads = randn(2, 5, 4 + 2 + 2, 32, device=CPU)
    views = heads.split((4, 2, 2), dim=2)
    views = (views[0][:, :q_len], *views[1:])
    assert not any(view.is_contiguous() for view in views)
    for ours, contiguous in zip(
        flash_attn_with_lse(*views, causal=True),
        flash_attn_with_lse(*(view.contiguous() for view in views), causal=True),
        strict=True,
    ):
        assert torch.equal(ours, contiguous)


class BottomRight(TorchAttention):
    """The reference as a backend that masks chunks itself."""

    masks_bottom_right = True

    def attend(self, query, key, value, softmax_scale, causal):
        return reference.attention_with_lse(query, key, value, softmax_scale, causal)


def test_backend_that_masks_chunks_agrees_with_one_that_does_not():
    qkv = make_qkv(33, 71, 4, 2, 32)
    out, lse = flash_attn_with_lse(*qkv, causal=True, backend=BottomRight())
    merged, merged_lse = flash_attn_with_lse(*qkv, causal=True, backend=TorchAttention())
    assert_close(merged, out)
    assert_lse_close(merged_lse, lse, torch.float32)


def test_more_queries_than_keys():
    query, key, value = make_qkv(5, 4, 2, 2, 16)
    with pytest.raises(ValueError, match="5 queries over only 4 keys"):
        flash_attn_with_lse(query, key, value, causal=True)
    assert flash_attn_with_lse(query, key, value)[0].shape == query.shape


# merge_attention_outputs

MERGES = {
    "torch": (merge_attention_outputs, CPU),
    "kernel": (merge_kernel.merge_attention_outputs, DEVICE),
}


@pytest.fixture(params=MERGES)
def merging(request):
    return MERGES[request.param]


@pytest.fixture
def poisoned_memory():
    """Fill what `torch.empty` returns with NaN."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def attend_to(qkv, keys):
    """Attend to some of the keys. Without any: what an op that ran over nothing may leave."""
    query, key, value = qkv
    if not keys:
        batch, q_len, heads, _ = query.shape
        return torch.full_like(query, NAN), torch.full((batch, heads, q_len), -INF)
    out, lse = truth_of(query, key[:, keys], value[:, keys], causal=False)
    return out.float(), lse.float()


@pytest.mark.parametrize("implementation", MERGES)
@settings(max_examples=50)
@given(parts=st.lists(st.integers(0, 2), min_size=1, max_size=24))
def test_any_split_of_the_keys_merges_to_the_whole(implementation, parts):
    """Key i goes to set parts[i]; sets may be empty, in any order of merging."""
    op, device = MERGES[implementation]
    qkv = make_qkv(3, len(parts), 4, 2, 16)
    truth, truth_lse = truth_of(*qkv, causal=False)
    sets = (attend_to(qkv, [i for i, p in enumerate(parts) if p == s]) for s in range(3))
    a, b, c = ([t.to(device) for t in each] for each in sets)

    def merge(left, right):
        return op(*left, *right)

    for out, lse in (merge(merge(a, b), c), merge(a, merge(b, c)), merge(merge(c, a), b)):
        assert_close(out.cpu(), truth)
        assert_lse_close(lse.cpu(), truth_lse, torch.float32)


def test_sets_empty_for_some_rows(merging):
    """A row without keys on one side is the other side's; without any it is 0."""
    op, device = merging
    out_a, out_b = (randn(1, 3, 2, 16, seed=seed, device=device) for seed in (1, 2))
    lse_a = torch.tensor([[[1.0, -INF, -INF], [1.0, 2.0, -INF]]], device=device)
    lse_b = torch.tensor([[[-INF, 0.5, -INF], [-INF, -INF, -INF]]], device=device)
    out_a[:, 1, 0] = out_a[:, 2] = out_b[:, 0] = out_b[:, 1, 1] = out_b[:, 2] = NAN
    out, lse = op(out_a, lse_a, out_b, lse_b)
    assert torch.equal(lse, torch.maximum(lse_a, lse_b))
    assert torch.equal(out[:, 0], out_a[:, 0])
    assert torch.equal(out[:, 1, 0], out_b[:, 1, 0])
    assert torch.equal(out[:, 1, 1], out_a[:, 1, 1])
    assert torch.equal(out[:, 2], torch.zeros_like(out[:, 2]))


@pytest.mark.parametrize("far", [1e4, -1e4])
def test_far_apart_lse(merging, far):
    """Neither exponential overflows; the side with the greater LSE wins."""
    op, device = merging
    outs = [randn(1, 3, 2, 16, seed=seed, device=device) for seed in (1, 2)]
    lse = torch.zeros(1, 2, 3, device=device)
    out, merged = op(outs[0], lse + far, outs[1], lse)
    assert torch.equal(out, outs[0 if far > 0 else 1])
    assert torch.equal(merged, lse + max(far, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merged_dtype(dtype):
    qkv = make_qkv(3, 20, 4, 2, 16, dtype)
    halves = [attend_to(qkv, range(10)), attend_to(qkv, range(10, 20))]
    (out_a, lse_a), (out_b, lse_b) = halves
    out, lse = merge_attention_outputs(out_a.to(dtype), lse_a, out_b.to(dtype), lse_b)
    assert (out.dtype, lse.dtype) == (dtype, torch.float32)
    assert_close(out, truth_of(*qkv, causal=False)[0])


def make_parts(batch, q_len, heads, dim, device):
    """Return fp32 outputs and LSEs of two sets of keys, and what they merge to, in fp64."""
    outs = [randn(batch, q_len, heads, dim, seed=i, device=device) for i in range(2)]
    lses = [3 * randn(batch, heads, q_len, seed=2 + i, device=device) for i in range(2)]
    lse = torch.stack(lses).double()
    # [2, batch, q_len, num_heads, 1]
    shares = lse.softmax(0).transpose(2, 3)[..., None]
    return outs, lses, (lambda a, b: shares[0] * a + shares[1] * b), lse.logsumexp(0)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dim", [16, 17, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("dtype_a", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("dtype_b", KERNEL_DTYPES, ids=str)
def test_merge_dims_and_dtypes(merging, dim, dtype_a, dtype_b):
    """Either side may be in another dtype; rows neither fill a program nor one program alone."""
    op, device = merging
    outs, lses, merge, truth_lse = make_parts(2, 13, 5, dim, device)
    a, b = outs[0].to(dtype_a), outs[1].to(dtype_b)
    out, lse = op(a, lses[0], b, lses[1])
    assert out.dtype == dtype_a
    assert_close(out, merge(a.double(), b.double()))
    assert_lse_close(lse, truth_lse, torch.float32)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("q_len", [1, 7])
def test_merge_of_views(merging, q_len):
    """Each input has strides of its own, amid poison."""
    op, device = merging
    outs, lses, merge, truth_lse = make_parts(2, q_len, 3, 32, device)

    def view(tensor, order, last):
        """Return `tensor` as a view of a wider one, whose axes lie in `order`."""
        shape = [tensor.shape[axis] + (last if axis == 3 else 2) for axis in order]
        wide = torch.full(shape, NAN, device=device)
        inverse = [order.index(axis) for axis in range(tensor.dim())]
        inside = wide.permute(inverse)[tuple(slice(0, n) for n in tensor.shape)]
        return inside.copy_(tensor)

    inputs = (
        view(outs[0], (0, 2, 1, 3), 0),
        view(lses[0], (0, 2, 1), 0),
        view(outs[1], (1, 0, 2, 3), 32),
        view(lses[1], (2, 1, 0), 0),
    )
    assert len({t.stride() for t in inputs[::2]}) == len({t.stride() for t in inputs[1::2]}) == 2
    out, lse = op(*inputs)
    assert_close(out, merge(*(t.double() for t in outs)))
    assert_lse_close(lse, truth_lse, torch.float32)


def test_merge_of_nothing(merging):
    op, device = merging
    out, lse = torch.empty(2, 0, 3, 16, device=device), torch.empty(2, 3, 0, device=device)
    merged, merged_lse = op(out, lse, out, lse)
    assert (merged.shape, merged_lse.shape) == (out.shape, lse.shape)
