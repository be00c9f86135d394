"""Merging against PEFT's own `merge_and_unload()`, and what is refused (CASES C61)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from nanovllm.errors import ConfigError
from nanovllm.tools.lora import merge_adapter

# PEFT and transformers warn about each other, and about the odd configs that these tests are for.
pytestmark = pytest.mark.filterwarnings("ignore")

QKVO = ["q_proj", "k_proj", "v_proj", "o_proj"]
Q_PROJ = "model.layers.0.self_attn.q_proj.weight"

# Keyword arguments of LoraConfig, and what to change in the saved adapter_config.json.
FORMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({"target_modules": QKVO}, {}),
    "all_linear": ({"target_modules": "all-linear"}, {}),
    "regex": ({"target_modules": r".*layers\.1\..*_proj"}, {}),
    "exclude": ({"target_modules": QKVO, "exclude_modules": ["layers.0.self_attn.k_proj"]}, {}),
    "rslora": ({"target_modules": QKVO, "use_rslora": True}, {}),
    "patterns": (
        {
            "target_modules": QKVO,
            # "proj" alone matches no module; of two that match, the first counts.
            "rank_pattern": {"proj": 7, r"0\.self_attn\.q_proj": 2, "q_proj": 3, "o_proj": 5},
            "alpha_pattern": {"model.layers.1.self_attn.v_proj": 3, "k_.*": 20, "eight": 1},
        },
        {},
    ),
    "patterns_rslora": (
        {"target_modules": QKVO, "use_rslora": True, "rank_pattern": {"q_proj": 9}},
        {},
    ),
    # PEFT saves False here for nn.Linear whatever it was given; other writers do not.
    "fan_in_fan_out": ({"target_modules": [*QKVO, "down_proj"]}, {"fan_in_fan_out": True}),
    "modules_to_save": (
        # "norm" names input_layernorm too: PEFT matches ends, not whole components.
        {"target_modules": QKVO, "modules_to_save": ["norm", "lm_head", "layers.1.mlp"]},
        {},
    ),
    "newer_peft": ({"target_modules": QKVO}, {"a_future_feature": None, "another": False}),
}


def tiny_llama(*, tied: bool = False, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).to(dtype)


def save_adapter(
    folder: Path,
    *,
    base: LlamaForCausalLM | None = None,
    dtype: torch.dtype = torch.float32,
    changes: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """Let PEFT write an adapter with random, non-zero weights into `folder`."""
    lora = peft.LoraConfig(r=4, lora_alpha=10, task_type="CAUSAL_LM", **config)
    model = peft.get_peft_model(base or tiny_llama(), lora)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.copy_(torch.randn_like(parameter))
    model.save_pretrained(folder)
    weights = load_file(folder / "adapter_model.safetensors")
    weights = {name: weight.to(dtype).contiguous() for name, weight in weights.items()}
    save_file(weights, folder / "adapter_model.safetensors")
    edit_config(folder, **(changes or {}))
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("adapter_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("base_dtype", [torch.float32, torch.bfloat16])
def test_equals_merge_and_unload(tmp_path, form, adapter_dtype, base_dtype):
    config, changes = FORMS[form]
    save_adapter(tmp_path, dtype=adapter_dtype, changes=changes, **config)
    base = tiny_llama(dtype=base_dtype)
    before = {name: weight.clone() for name, weight in base.state_dict().items()}
    merged = merge_adapter(base.state_dict(), tmp_path)
    for name, weight in base.state_dict().items():
        assert torch.equal(weight, before[name]), f"{name} was changed in place"

    expected = peft.PeftModel.from_pretrained(base, tmp_path).merge_and_unload().state_dict()
    assert merged.keys() == expected.keys()
    assert any(not torch.equal(merged[name], before[name]) for name in merged)
    for name in merged:
        assert merged[name].dtype == base_dtype
        # Both sum in fp32; they may differ by the order of the factors, then by one rounding.
        rtol = 1e-5 if base_dtype == torch.float32 else 2**-7
        torch.testing.assert_close(
            merged[name], expected[name].to(base_dtype), rtol=rtol, atol=1e-5, msg=name
        )


def test_tied_head_stays_tied(tmp_path):
    base = tiny_llama(tied=True).state_dict()
    base.pop("lm_head.weight")
    merged = merge_adapter(base, save_adapter(tmp_path, target_modules=QKVO))
    assert merged.keys() == base.keys()


def test_scale_is_not_confused(tmp_path):
    """Control: the scales alpha / r and alpha / sqrt(r) give deltas that differ by sqrt(r)."""
    base = tiny_llama().state_dict()
    save_adapter(tmp_path, target_modules=QKVO)
    plain = merge_adapter(base, tmp_path)[Q_PROJ] - base[Q_PROJ]
    edit_config(tmp_path, use_rslora=True)
    stabilised = merge_adapter(base, tmp_path)[Q_PROJ] - base[Q_PROJ]
    torch.testing.assert_close(stabilised, 2 * plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {"peft_type": "LOHA"},
        {"bias": "all"},
        {"bias": "lora_only"},
        {"use_dora": True},
        {"lora_bias": True},
        {"layers_to_transform": [0]},
        {"layer_replication": [[0, 1]]},
        {"trainable_token_indices": [3]},
        {"target_parameters": ["mlp.experts"]},
        {"init_lora_weights": "pissa_niter_4"},
        {"ensure_weight_tying": True},
        {"a_future_feature": {"x": 1}},
        {"r": None},
        {"target_modules": None},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_unsupported_config_is_refused_by_key(tmp_path, changes):
    save_adapter(tmp_path, target_modules=QKVO)
    edit_config(tmp_path, **changes)
    with pytest.raises(ConfigError, match=repr(next(iter(changes)))):
        merge_adapter(tiny_llama().state_dict(), tmp_path)


PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("added", "removed", "named"),
    [
        ({f"{PREFIX}.lora_magnitude_vector": (32,)}, [], "lora_magnitude_vector"),
        ({f"{PREFIX}.lora_B.bias": (32,)}, [], r"q_proj\.lora_B\.bias"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 40)}, [], "embedding_A"),
        ({"base_model.model.model.embed_tokens.weight": (40, 32)}, [], "embed_tokens"),
        ({"model.norm.weight": (32,)}, [], r"model\.norm\.weight"),
        ({f"{PREFIX}.lora_A.weight": (5, 32)}, [], r"q_proj\.lora_A\.weight"),
        ({f"{PREFIX}.lora_B.weight": (32, 5)}, [], r"q_proj\.lora_B\.weight"),
        ({f"{PREFIX}.lora_B.weight": (31, 4)}, [], r"q_proj\.weight.*\(31, 32\)"),
        ({}, [f"{PREFIX}.lora_B.weight"], r"q_proj\.lora_B\.weight"),
        ({}, [f"{PREFIX}.lora_A.weight"], r"q_proj\.lora_B\.weight"),
    ],
)
def test_unfit_tensor_is_refused_by_name(tmp_path, added, removed, named):
    path = save_adapter(tmp_path, target_modules=QKVO) / "adapter_model.safetensors"
    weights = load_file(path) | {name: torch.ones(shape) for name, shape in added.items()}
    save_file({name: weights[name] for name in weights if name not in removed}, path)
    with pytest.raises(ConfigError, match=named):
        merge_adapter(tiny_llama().state_dict(), tmp_path)


def test_missing_base_tensor_is_refused(tmp_path):
    save_adapter(tmp_path, target_modules=QKVO)
    base = tiny_llama().state_dict()
    del base[Q_PROJ]
    with pytest.raises(ConfigError, match=Q_PROJ):
        merge_adapter(base, tmp_path)


def test_module_outside_target_modules_is_refused(tmp_path):
    save_adapter(tmp_path, target_modules=QKVO)
    edit_config(tmp_path, target_modules=["v_proj", "k_proj", "o_proj"])
    with pytest.raises(ConfigError, match=r"q_proj.*'target_modules'"):
        merge_adapter(tiny_llama().state_dict(), tmp_path)


def test_incomplete_modules_to_save_is_refused(tmp_path):
    save_adapter(tmp_path, target_modules=QKVO)
    edit_config(tmp_path, modules_to_save=["norm"])
    with pytest.raises(ConfigError, match=r"modules_to_save.*norm\.weight"):
        merge_adapter(tiny_llama().state_dict(), tmp_path)


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_untying_the_head_is_refused(tmp_path, module):
    save_adapter(tmp_path, target_modules=QKVO, modules_to_save=[module])
    base = tiny_llama().state_dict()
    base.pop("lm_head.weight")
    with pytest.raises(ConfigError, match=module):
        merge_adapter(base, tmp_path)


def test_pickle_is_never_read(tmp_path):
    path = save_adapter(tmp_path, target_modules=QKVO) / "adapter_model.safetensors"
    torch.save(load_file(path), tmp_path / "adapter_model.bin")
    path.unlink()
    with pytest.raises(ConfigError, match=r"Only safetensors"):
        merge_adapter(tiny_llama().state_dict(), tmp_path)


def test_missing_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"adapter_config\.json"):
        merge_adapter({}, tmp_path)
