"""Every kind of bias is loaded and used (CASES C08)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tiny_models import (
    VOCAB_SIZE,
    assert_same_greedy,
    assert_same_logprobs,
    copy_model,
    generate,
    open_llm,
    prompt_of,
)

Tiny = Callable[..., Path]

QKV = ("q_proj", "k_proj", "v_proj")
MODELS = {
    "llama": (
        {"architecture": "LlamaForCausalLM", "attention_bias": True, "mlp_bias": True},
        (*QKV, "o_proj", "gate_proj", "up_proj", "down_proj"),
    ),
    "llama_attention": (
        {"architecture": "LlamaForCausalLM", "attention_bias": True},
        (*QKV, "o_proj"),
    ),
    "llama_mlp": (
        {"architecture": "LlamaForCausalLM", "mlp_bias": True},
        ("gate_proj", "up_proj", "down_proj"),
    ),
    "qwen2": ({"architecture": "Qwen2ForCausalLM"}, QKV),
    "qwen3": ({"architecture": "Qwen3ForCausalLM", "attention_bias": True}, (*QKV, "o_proj")),
}
PROMPT = prompt_of(150)


def tokens_of(directory: Path) -> list[int]:
    """Generate, and compare with transformers."""
    with open_llm(directory, max_num_batched_tokens=64) as llm:
        (output,) = generate(llm, [PROMPT], 24, logprobs=VOCAB_SIZE)
    assert_same_greedy(output.token_ids, directory, PROMPT)
    assert_same_logprobs(output.logprobs, output.token_ids, directory, PROMPT)
    return output.token_ids


@pytest.mark.parametrize("model", MODELS)
def test_every_bias_counts(tiny: Tiny, tmp_path: Path, model: str) -> None:
    config, kinds = MODELS[model]
    directory = tiny(**config)
    weights = load_file(directory / "model.safetensors")
    assert {name.split(".")[-2] for name in weights if name.endswith("bias")} == set(kinds)

    expected = tokens_of(directory)
    for kind in kinds:  # control: without it the tokens are others
        copy = copy_model(directory, tmp_path / kind)
        zeroed = {
            name: tensor * 0 if name.endswith(f"{kind}.bias") else tensor
            for name, tensor in weights.items()
        }
        save_file(zeroed, copy / "model.safetensors", metadata={"format": "pt"})
        assert tokens_of(copy) != expected, f"the biases of {kind} change nothing"
