"""Attention ops and kernels against the plain-torch truth, computed in fp64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_close, assert_lse_close, relative_rms

from nanovllm import LLM, BackendUnavailableError
from nanovllm.config import AttentionBackendName
from nanovllm.ops import elementwise, reference
from nanovllm.ops.attention import flash_attn_with_lse, merge_attention_outputs
from nanovllm.ops.backends import (
    _TABLE,
    AttentionBackend,
    flash_attn,
    reasons_against,
    resolve_backend,
)
from nanovllm.ops.backends.torch_attention import TorchAttention
from nanovllm.ops.kernels import elementwise as kernels
from nanovllm.ops.kernels.paged_decode import num_splits, paged_decode_attention
from nanovllm.ops.paged_attention import gathered_decode_attention

# The kernel takes the logarithm of an empty split's sum before it puts -inf in its place.
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2:RuntimeWarning")

CPU = torch.device("cpu")
# Kernels run interpreted without a GPU; there tl.dot is silently wrong in bf16.
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KERNEL_DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE.type == "cuda")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")


def randn(*shape, dtype=torch.float32, seed=0, device=DEVICE):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def make_qkv(q_len, k_len, heads, kv_heads, dim, dtype=torch.float32, batch=1, device=CPU):
    shapes = (
        (batch, q_len, heads, dim),
        (batch, k_len, kv_heads, dim),
        (batch, k_len, kv_heads, dim),
    )
    return [randn(*shape, dtype=dtype, seed=i, device=device) for i, shape in enumerate(shapes)]


def truth_of(query, key, value, causal, scale=None):
    """Return fp64 attention and LSE of inputs as they are rounded to their dtype."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return reference.attention_with_lse(query.double(), key.double(), value.double(), scale, causal)


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

LENGTHS = [(1, 1), (1, 77), (7, 7), (130, 130), (3, 200), (65, 129)]


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


# Decode over a paged cache


class PagedBatch:
    """Sequences of given lengths in a paged cache; whatever belongs to none of them is poison."""

    def __init__(self, lengths, block_size, heads=4, kv_heads=2, dim=64, dtype=torch.float32):
        num_blocks = [-(-length // block_size) for length in lengths]
        generator = torch.Generator().manual_seed(0)
        blocks = torch.randperm(sum(num_blocks) + 2, generator=generator).tolist()
        shape = (len(blocks), block_size, kv_heads, dim)
        self.keys = torch.full(shape, NAN, dtype=dtype, device=DEVICE)
        self.values = self.keys.clone()
        self.lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
        # Past the context the table names a block that is all poison.
        shape = (len(lengths), max(num_blocks) + 1)
        tables = torch.full(shape, blocks.pop(), dtype=torch.int32)
        self.query = randn(len(lengths), heads, dim, dtype=dtype, seed=1)
        self.scale = dim**-0.5
        self.gathered, truths = [], []
        for i, (length, count) in enumerate(zip(lengths, num_blocks, strict=True)):
            mine, blocks = blocks[:count], blocks[count:]
            tables[i, :count] = torch.tensor(mine)
            new = [randn(length, kv_heads, dim, dtype=dtype, seed=2 + 2 * i + j) for j in range(2)]
            for cache, tokens in zip((self.keys, self.values), new, strict=True):
                for start in range(0, length, block_size):
                    piece = tokens[start : start + block_size]
                    cache[mine[start // block_size], : len(piece)] = piece
            self.gathered.append(tuple(new))
            truth, _ = truth_of(self.query[None, i : i + 1], *(t[None] for t in new), False)
            truths.append(truth[0, 0])
        self.tables = tables.to(DEVICE)
        self.truth = torch.stack(truths)

    def attend(self, **options):
        return paged_decode_attention(
            self.query, self.keys, self.values, self.tables, self.lengths, self.scale, **options
        )


ODD_LENGTHS = [1, 16, 17, 64, 130, 257]


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("splits", [1, 2, 4, 8, None])
@pytest.mark.parametrize("block_size", [16, 256])
def test_paged_decode_lengths_and_splits(dtype, splits, block_size):
    batch = PagedBatch(ODD_LENGTHS, block_size, dtype=dtype)
    out = batch.attend(splits=splits)
    assert out.dtype == dtype
    assert_close(out, batch.truth)
    for row, truth in zip(out, batch.truth, strict=True):  # a short one's error shows by itself
        assert_close(row, truth)


@pytest.mark.parametrize("dtype", KERNEL_DTYPES, ids=str)
@pytest.mark.parametrize("heads", [(1, 1), (9, 3), (8, 1), (3, 3), (40, 2)], ids=str)
@pytest.mark.parametrize("dim", [16, 17, 80, 96, 128, 256])
def test_paged_decode_heads(dtype, heads, dim):
    batch = PagedBatch([70, 5], 16, *heads, dim, dtype)
    assert_close(batch.attend(splits=2), batch.truth)


def test_paged_decode_of_a_view():
    """The queries lie beside keys and values, and the cache beside other layers'."""
    batch = PagedBatch([70, 5], 16)
    wide = torch.full((2, 8, 64), NAN, device=DEVICE)
    wide[:, :4] = batch.query
    caches = torch.full((3, *batch.keys.shape), NAN, device=DEVICE)
    caches[1], caches[2] = batch.keys, batch.values
    batch.query, batch.keys, batch.values = wide[:, :4], caches[1], caches[2]
    assert_close(batch.attend(), batch.truth)


@pytest.mark.parametrize("length", [0, 63, 64, 69])
def test_poison_is_seen(length):
    """Control: one NaN within the context reaches the output, so none outside was read."""
    batch = PagedBatch([70], 16)
    block, offset = batch.tables[0, length // 16], length % 16
    batch.keys[block, offset] = NAN
    assert relative_rms(batch.attend(), batch.truth) != pytest.approx(0, abs=1)


def test_reference_of_paged_decode():
    batch = PagedBatch([70, 5], 16)
    out = reference.paged_decode_attention(
        batch.query, batch.keys, batch.values, batch.tables, batch.lengths, batch.scale
    )
    assert_close(out, batch.truth)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", [[70], ODD_LENGTHS], ids=len)
def test_gathered_decode(dtype, lengths):
    batch = PagedBatch(lengths, 16, dtype=dtype)
    out = gathered_decode_attention(batch.query, batch.gathered, batch.scale)
    assert_close(out, batch.truth)


@pytest.mark.parametrize("num_sms", [4, 132])
@pytest.mark.parametrize("num_seqs", [1, 7, 256, 5000])
def test_number_of_splits(num_seqs, num_sms):
    splits = num_splits(num_seqs, 8, num_sms)
    assert splits in (1, 2, 4, 8, 16, 32, 64)
    assert splits == 1 or splits * num_seqs * 8 < 4 * num_sms, "no more than fill the GPU twice"


# Elementwise ops: torch on a CPU, and the kernels

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


# The table of backends

GPU_BACKENDS = sorted(set(_TABLE) - {"torch"})


def test_options_name_the_table():
    assert set(AttentionBackendName.__args__) == {"auto", *_TABLE}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_auto_takes_torch_on_a_cpu(dtype):
    backend = resolve_backend("auto", CPU, dtype, 80)
    assert (backend.name, type(backend)) == ("torch", TorchAttention)
    assert resolve_backend("torch", CPU, dtype, 80).name == "torch"


@pytest.mark.parametrize("name", GPU_BACKENDS)
@pytest.mark.parametrize(
    ("dtype", "dim", "reason"),
    [
        (torch.float16, 64, "needs a CUDA device, not cpu"),
        (torch.float32, 64, "needs float16 or bfloat16, not torch.float32"),
        (torch.float16, 257, "needs a head_dim that is a multiple of 8 and at most"),
        (torch.float16, 17, "multiple of 8 and at most 128, not 17|at most 256, not 17"),
    ],
)
def test_reasons(name, dtype, dim, reason):
    """Each reason is in the list and in the error; those that do not hold are not."""
    with pytest.raises(BackendUnavailableError, match=reason) as refused:
        resolve_backend(name, CPU, dtype, dim)
    reasons = reasons_against(name, CPU, dtype, dim)
    assert str(refused.value) == (
        f"attention_backend={name!r} cannot run here: {'; '.join(reasons)}"
    )
    assert any("head_dim" in r for r in reasons) == (dim != 64)
    assert any("float16" in r for r in reasons) == (dtype == torch.float32)


@pytest.mark.parametrize(
    ("name", "command"),
    [("fa4", "pip install 'nanovllm[cuda]'"), ("fa2", "pip install 'nanovllm[flash-attn]'")],
)
def test_missing_package_is_named(monkeypatch, name, command):
    for installed in (False, True):
        monkeypatch.setattr(flash_attn, "_has_module", lambda module, there=installed: there)
        reasons = reasons_against(name, CPU, torch.float16, 64)
        assert any(command in reason for reason in reasons) != installed


def test_package_without_parent_is_missing():
    assert not flash_attn._has_module("no_such_package.module")
    assert not flash_attn._has_module("nanovllm.no_such_module")
    assert flash_attn._has_module("nanovllm.config")


@pytest.mark.parametrize("name", GPU_BACKENDS)
def test_named_backend_is_never_replaced(tiny, name):
    with pytest.raises(BackendUnavailableError, match=name):
        LLM(tiny(), device="cpu", dtype="float32", num_kvcache_blocks=4, attention_backend=name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("name", _TABLE)
def test_backends_on_the_gpu(name, lengths, dtype):
    if reasons := reasons_against(name, DEVICE, dtype, 64):
        pytest.skip("; ".join(reasons))
    qkv = make_qkv(*lengths, 9, 3, 64, dtype, device=DEVICE)
    backend: AttentionBackend = resolve_backend(name, DEVICE, dtype, 64)
    for causal in (True, False):
        out, lse = flash_attn_with_lse(*qkv, causal=causal, backend=backend)
        truth, truth_lse = truth_of(*qkv, causal)
        assert_close(out, truth)
        assert_lse_close(lse, truth_lse, dtype)
