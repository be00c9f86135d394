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
    _TILE_TABLE,
    AttentionBackend,
    flash_attn,
    flex,
    reasons_against,
    resolve_backend,
    resolve_tile_backend,
    tile_reasons_against,
)
from nanovllm.ops.backends.torch_attention import TorchAttention
from nanovllm.ops.backends.torch_block_sparse import TorchBlockSparse

GPU_BACKENDS = sorted(set(_TABLE) - {"torch"})


def test_options_name_the_table():
    assert set(AttentionBackendName.__args__) == {"auto", *_TABLE, *_TILE_TABLE}


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


@pytest.mark.parametrize("name", ["flex", "no_such_backend"])
def test_backend_without_a_dense_form_is_refused(name):
    with pytest.raises(BackendUnavailableError, match=f"'{name}'.*no dense form") as refused:
        resolve_backend(name, CPU, torch.float16, 64)
    assert str(refused.value).endswith(f"those that have one are {', '.join(_TABLE)}")


# The table of tile-sparse backends


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_auto_takes_torch_tiles_on_a_cpu(dtype, caplog):
    with caplog.at_level("INFO", "nanovllm"):
        backend = resolve_tile_backend("auto", CPU, dtype, 80)
    assert (backend.name, type(backend)) == ("torch", TorchBlockSparse)
    assert type(resolve_tile_backend("torch", CPU, dtype, 80)) is TorchBlockSparse


def test_auto_takes_the_first_tile_backend_without_a_reason(monkeypatch):
    """On Hopper flash-attn-4; where it cannot run, `flex_attention`."""
    card = torch.device("cuda")
    monkeypatch.setattr(flash_attn, "_has_module", lambda module: True)
    for capability, dim, expected in [
        ((9, 0), 128, "fa4"),
        ((9, 0), 80, "fa4"),
        ((9, 0), 192, "flex"),
        ((10, 0), 128, "flex"),
        ((8, 0), 64, "flex"),
    ]:
        monkeypatch.setattr(flash_attn, "compute_capability", lambda device, c=capability: c)
        assert resolve_tile_backend("auto", card, torch.bfloat16, dim).name == expected
    assert resolve_tile_backend("auto", card, torch.float32, 64).name == "flex"


@pytest.mark.parametrize("name", ["cudnn", "fa2", "flash", "no_such_backend"])
def test_backend_without_tiles_is_refused(name):
    with pytest.raises(BackendUnavailableError, match=f"'{name}'.*no tile-sparse") as refused:
        resolve_tile_backend(name, CPU, torch.float16, 64)
    assert str(refused.value).endswith(f"those that have one are {', '.join(_TILE_TABLE)}")


@pytest.mark.parametrize(
    ("name", "dtype", "dim", "reason"),
    [
        ("fa4", torch.float16, 64, "needs a CUDA device, not cpu"),
        ("fa4", torch.float32, 64, "needs float16 or bfloat16, not torch.float32"),
        ("fa4", torch.float16, 192, "at most 128, not 192"),
        ("flex", torch.float32, 64, "needs a CUDA device, not cpu"),
        ("flex", torch.float64, 64, "needs float16, bfloat16 or float32, not torch.float64"),
        ("flex", torch.float16, 8, "needs a head_dim from 16 to 256, not 8"),
        ("torch", torch.float64, 64, "needs float32, float16 or bfloat16, not torch.float64"),
    ],
)
def test_reasons_of_tile_backends(name, dtype, dim, reason):
    with pytest.raises(BackendUnavailableError, match=reason) as refused:
        resolve_tile_backend(name, CPU, dtype, dim)
    assert "; ".join(tile_reasons_against(name, CPU, dtype, dim)) in str(refused.value)


def test_missing_packages_of_tile_backends_are_named(monkeypatch):
    for installed in (False, True):
        monkeypatch.setattr(flash_attn, "_has_module", lambda module, there=installed: there)
        monkeypatch.setattr(flex, "find_spec", lambda module, there=installed: there or None)
        for name, command in (("fa4", "pip install 'nanovllm[cuda]'"), ("flex", "install triton")):
            reasons = tile_reasons_against(name, CPU, torch.float16, 64)
            assert any(command in reason for reason in reasons) != installed


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
