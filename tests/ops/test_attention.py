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


def attend_to(qkv, keys):
    """Attend to some of the keys. Without any: what an op that ran over nothing may leave."""
    query, key, value = qkv
    if not keys:
        batch, q_len, heads, _ = query.shape
        return torch.full_like(query, NAN), torch.full((batch, heads, q_len), -INF)
    out, lse = truth_of(query, key[:, keys], value[:, keys], causal=False)
    return out.float(), lse.float()


@settings(deadline=None)
@given(parts=st.lists(st.integers(0, 2), min_size=1, max_size=24))
def test_any_split_of_the_keys_merges_to_the_whole(parts):
    """Key i goes to set parts[i]; sets may be empty, in any order of merging."""
    qkv = make_qkv(3, len(parts), 4, 2, 16)
    truth, truth_lse = truth_of(*qkv, causal=False)
    a, b, c = (attend_to(qkv, [i for i, p in enumerate(parts) if p == s]) for s in range(3))

    def merge(left, right):
        return merge_attention_outputs(*left, *right)

    for out, lse in (merge(merge(a, b), c), merge(a, merge(b, c)), merge(merge(c, a), b)):
        assert_close(out, truth)
        assert_lse_close(lse, truth_lse, torch.float32)


def test_sets_empty_for_some_rows():
    """A row without keys on one side is the other side's; without any it is 0."""
    out_a, out_b = randn(1, 3, 2, 16, seed=1), randn(1, 3, 2, 16, seed=2)
    lse_a = torch.tensor([[[1.0, -INF, -INF], [1.0, 2.0, -INF]]], device=DEVICE)
    lse_b = torch.tensor([[[-INF, 0.5, -INF], [-INF, -INF, -INF]]], device=DEVICE)
    out_a[:, 1, 0] = out_a[:, 2] = out_b[:, 0] = out_b[:, 1, 1] = out_b[:, 2] = NAN
    out, lse = merge_attention_outputs(out_a, lse_a, out_b, lse_b)
    assert torch.equal(lse, torch.maximum(lse_a, lse_b))
    assert torch.equal(out[:, 0], out_a[:, 0])
    assert torch.equal(out[:, 1, 0], out_b[:, 1, 0])
    assert torch.equal(out[:, 1, 1], out_a[:, 1, 1])
    assert torch.equal(out[:, 2], torch.zeros_like(out[:, 2]))


@pytest.mark.parametrize("far", [1e4, -1e4])
def test_far_apart_lse(far):
    """Neither exponential overflows; the side with the greater LSE wins."""
    outs = randn(1, 3, 2, 16, seed=1), randn(1, 3, 2, 16, seed=2)
    lse = torch.zeros(1, 2, 3, device=DEVICE)
    out, merged = merge_attention_outputs(outs[0], lse + far, outs[1], lse)
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
