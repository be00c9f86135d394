"""Greedy tokens and log-probabilities equal transformers' on random weights, whatever the steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    ARCHITECTURES,
    BFLOAT16_LOGPROBS,
    NEAR_TIE,
    VOCAB_SIZE,
    assert_same_greedy,
    assert_same_logprobs,
    generate,
    greedy,
    logprob_error,
    open_llm,
    prompt_of,
    steps_of,
)

from nanovllm import RequestOutput

Tiny = Callable[..., Path]

every_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)

# Query heads, KV heads, head_dim, hidden_size.
HEADS = {
    "group1_dim16": (4, 4, 16, 64),
    "group2_dim32": (4, 2, 32, 64),
    "group3_dim64": (9, 3, 64, 72),
    "group8_dim96": (8, 1, 96, 64),
    "group2_dim80": (4, 2, 80, 64),
    "group1_dim128": (2, 2, 128, 48),
    "group8_dim128": (16, 2, 128, 64),
}


def heads(name: str) -> dict[str, int]:
    num_q_heads, num_kv_heads, head_dim, hidden_size = HEADS[name]
    return {
        "num_attention_heads": num_q_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_size": hidden_size,
    }


def assert_parity(outputs: list[RequestOutput], directory: Path, prompts: list[list[int]]) -> None:
    for output, prompt in zip(outputs, prompts, strict=True):
        assert_same_greedy(output.token_ids, directory, prompt)
        assert_same_logprobs(output.logprobs, output.token_ids, directory, prompt)


@every_architecture
def test_single_prompt(tiny: Tiny, architecture: str) -> None:
    directory, prompt = tiny(architecture), prompt_of(200)
    with open_llm(directory) as llm:
        (output,) = generate(llm, [prompt], 30, logprobs=VOCAB_SIZE)
    assert_parity([output], directory, [prompt])
    expected, logits = greedy(directory, prompt, 30)
    gaps = logits.topk(2).values.diff().abs()[:, 0]
    certain = next((i for i, gap in enumerate(gaps) if gap < NEAR_TIE), 30)
    assert output.token_ids[:certain] == expected[:certain]


@every_architecture
@pytest.mark.parametrize("shape", HEADS)
def test_head_shapes_in_a_batch(tiny: Tiny, architecture: str, shape: str) -> None:
    config = heads(shape)
    if architecture.startswith("Qwen2"):  # its config has no head_dim
        config["hidden_size"] = config["num_attention_heads"] * config["head_dim"]
    directory = tiny(architecture, **config)
    prompts = [prompt_of(n) for n in (1, 2, 63, 130)]
    with open_llm(directory, kvcache_block_size=64) as llm:
        outputs = generate(llm, prompts, 12, logprobs=VOCAB_SIZE)
    assert_parity(outputs, directory, prompts)


@every_architecture
@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("budget", [64, 100, 129, 300])
def test_chunks_beside_decodes(
    tiny: Tiny, architecture: str, budget: int, block_size: int
) -> None:  # CASES C40
    directory = tiny(architecture)
    prompts = [prompt_of(n) for n in (65, 129, 257, 301, 600)]
    with open_llm(
        directory,
        max_num_batched_tokens=budget,
        kvcache_block_size=block_size,
        num_kvcache_blocks=4096 // block_size,
    ) as llm:
        outputs, counts = steps_of(llm, prompts, 24, logprobs=VOCAB_SIZE)
    assert_parity(outputs, directory, prompts)
    assert all(0 < prefill + decodes <= budget for prefill, decodes in counts)
    assert any(prefill and decodes for prefill, decodes in counts)


@every_architecture
def test_prefix_hits(tiny: Tiny, architecture: str) -> None:
    directory, prompt = tiny(architecture), prompt_of(200)
    prompts = [prompt, prompt[:130] + prompt_of(50, seed=1), prompt + prompt_of(80)]
    with open_llm(directory, kvcache_block_size=32, num_kvcache_blocks=64) as llm:
        first = generate(llm, prompts[:1], 20, logprobs=VOCAB_SIZE)
        rest = generate(llm, prompts, 20, logprobs=VOCAB_SIZE)
    assert [output.num_cached_tokens for output in first + rest] == [0, 192, 128, 192]
    assert_parity(first + rest, directory, prompts[:1] + prompts)


@every_architecture
def test_preemption(tiny: Tiny, architecture: str) -> None:
    directory = tiny(architecture)
    prompts = [prompt_of(n) for n in (30, 60, 31, 45)]
    with open_llm(directory, kvcache_block_size=16, num_kvcache_blocks=13) as llm:
        outputs = generate(llm, prompts, 50, logprobs=VOCAB_SIZE)
        assert llm.engine.num_preemptions > 0
    assert all(output.num_cached_tokens == 0 for output in outputs)
    assert_parity(outputs, directory, prompts)


@every_architecture
@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_heads(tiny: Tiny, architecture: str, tied: bool) -> None:
    directory, prompt = tiny(architecture, tie_word_embeddings=tied), prompt_of(90)
    with open_llm(directory) as llm:
        outputs = generate(llm, [prompt], 16, logprobs=VOCAB_SIZE)
    assert_parity(outputs, directory, [prompt])


@pytest.mark.parametrize(
    "change", [{"rms_norm_eps": 0.3}, {"num_hidden_layers": 1}, {"num_hidden_layers": 5}]
)
def test_other_depth_and_eps(tiny: Tiny, change: dict[str, Any]) -> None:
    directory, prompt = tiny("Qwen3ForCausalLM", **change), prompt_of(90)
    with open_llm(directory) as llm:
        outputs = generate(llm, [prompt], 16, logprobs=VOCAB_SIZE)
    assert_parity(outputs, directory, [prompt])


@every_architecture
def test_bfloat16_logits_are_close(tiny: Tiny, architecture: str) -> None:
    directory, prompt = tiny(architecture, dtype=torch.bfloat16), prompt_of(150)
    with open_llm(directory, dtype="bfloat16", max_num_batched_tokens=64) as llm:
        (output,) = generate(llm, [prompt], 12, logprobs=VOCAB_SIZE)
    assert 1e-4 < logprob_error(output, directory, prompt) < BFLOAT16_LOGPROBS


def test_an_early_token_sways_every_answer(tiny: Tiny) -> None:
    """Control: on these weights an error anywhere in the history shows in the tokens."""
    directory, prompt = tiny(), prompt_of(200)
    expected, _ = greedy(directory, prompt, 24)
    for place in (0, 63, 64, 127, 128):
        changed = [*prompt[:place], (prompt[place] + 1) % VOCAB_SIZE, *prompt[place + 1 :]]
        assert greedy(directory, changed, 24)[0] != expected
        with pytest.raises(AssertionError, match="transformers' is"):
            assert_same_greedy(expected, directory, changed)
