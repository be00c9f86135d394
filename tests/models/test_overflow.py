"""Activations that a dtype cannot hold mark their request and no other (CASES C16)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from tiny_models import (
    BFLOAT16_LOGPROBS,
    VOCAB_SIZE,
    answer_logits,
    assert_same_greedy,
    assert_same_logprobs,
    generate,
    load_reference,
    logprob_error,
    open_llm,
    prompt_of,
)
from transformers import PreTrainedModel

from nanovllm import RequestOutput

Tiny = Callable[..., Path]

PROMPT = prompt_of(90)


def answer(directory: Path, dtype: str) -> RequestOutput:
    with open_llm(directory, dtype=dtype) as llm:
        return generate(llm, [PROMPT], 12, logprobs=VOCAB_SIZE)[0]


def large_down_proj(model: PreTrainedModel) -> None:
    model.model.layers[0].mlp.down_proj.weight.mul_(1e5)


def test_hidden_states_beyond_float16(tiny: Tiny) -> None:
    directory = tiny(dtype=torch.bfloat16, edit=large_down_proj)
    hidden = load_reference(directory)(torch.tensor([PROMPT]), output_hidden_states=True)
    assert hidden.hidden_states[1].abs().max() > 65_504
    float32 = answer(directory, "float32")
    assert_same_greedy(float32.token_ids, directory, PROMPT)
    assert_same_logprobs(float32.logprobs, float32.token_ids, directory, PROMPT)

    bfloat16 = answer(directory, "bfloat16")
    assert bfloat16.finish_reason == "length"
    assert logprob_error(bfloat16, directory, PROMPT) < BFLOAT16_LOGPROBS

    float16 = answer(directory, "float16")
    assert float16.finish_reason == "error"
    assert float16.token_ids == []
    assert "overflow" in float16.error
    assert "float16" in float16.error


LARGE_TOKEN = 7


def one_large_token(model: PreTrainedModel) -> None:
    """Let only the prompts that hold one token overflow, and let no answer hold it."""
    model.model.embed_tokens.weight[LARGE_TOKEN] = 65_000.0
    model.model.layers[0].mlp.down_proj.weight.mul_(1e3)
    model.lm_head.weight[LARGE_TOKEN] = 0


def test_an_overflow_harms_no_neighbour(tiny: Tiny) -> None:
    directory = tiny(edit=one_large_token)
    good = [[token for token in prompt_of(n) if token != LARGE_TOKEN] for n in (30, 60, 90)]
    bad = [*good[0], LARGE_TOKEN]
    with open_llm(directory, dtype="float16", kvcache_block_size=16) as llm:
        alone = [generate(llm, [prompt], 12)[0].token_ids for prompt in good]
        together = generate(llm, [good[0], bad, good[1], bad, good[2]], 12)
    reasons = [output.finish_reason for output in together]
    assert reasons == ["length", "error", "length", "error", "length"]
    assert [together[i].token_ids for i in (0, 2, 4)] == alone
    for tokens, prompt in zip(alone, good, strict=True):
        assert LARGE_TOKEN not in tokens
        logits = answer_logits(directory, prompt, tokens)
        chosen = logits.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen < 0.2).all()  # float16 rounds to 3 digits
