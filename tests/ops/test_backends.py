"""The table of attention backends."""

import pytest
import torch
from op_inputs import (
    CPU,
    DEVICE,
    DTYPES,
    LENGTHS,
    make_qkv,
    truth_of,
)
from tolerances import assert_close, assert_lse_close

from nanovllm import LLM, BackendUnavailableError
from nanovllm.config import AttentionBackendName
from nanovllm.ops.attention import flash_attn_with_lse
from nanovllm.ops.backends import (
    _TABLE,
    AttentionBackend,
    flash_attn,
    reasons_against,
    resolve_backend,
)
from nanovllm.ops.backends.torch_attention import TorchAttention

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
