"""Tiny random checkpoints, made offline, and transformers' answers on them as the truth."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from tolerances import relative_rms
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from nanovllm import LLM, RequestOutput, SamplingParams
from nanovllm.device import HostMemory
from nanovllm.engine.offload_runner import OffloadRunner
from nanovllm.kvcache.offload_engine import OffloadEngine

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "MistralForCausalLM": "mistral",
}
NAN = float("nan")
VOCAB_SIZE = 320
NEAR_TIE = 1e-4
"""Logits closer than this may be ordered either way: fp32 sums of a few hundred terms of size 10
differ by some 1e-5 when they are added in another order."""
LOGPROB_TOLERANCE = 2e-4
"""The same rounding: the worst of 7,000 distributions was off by 4e-5."""
BFLOAT16_LOGPROBS = 0.015
"""Relative RMS error of log-probabilities. bfloat16 rounds to 2**-9, ten times and more between
embedding and logits; 0.003 to 0.006 was measured."""
FLOAT16_LOGPROBS = 0.002
"""The same for float16, which rounds to 2**-12: 0.0006 to 0.0007 was measured."""

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def make_model(
    directory: Path,
    architecture: str = "LlamaForCausalLM",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    edit: Callable[[PreTrainedModel], object] | None = None,
    max_shard_size: str = "1GB",
    **overrides: Any,
) -> Path:
    """Write a random checkpoint without tokenizer to `directory` and return the directory.

    Args:
        directory: where to write; made if need be.
        architecture: a key of `ARCHITECTURES`.
        seed: of the weights.
        dtype: of the weights in the file.
        edit: changes the model's weights before they are saved.
        max_shard_size: as in `save_pretrained`.
        overrides: entries of config.json that differ from `SHAPE`.
    """
    config = AutoConfig.for_model(ARCHITECTURES[architecture], **SHAPE | overrides)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    randomise(model, seed)
    if edit is not None:
        with torch.no_grad():
            edit(model)
    model.to(dtype).save_pretrained(directory, max_shard_size=max_shard_size)
    return directory


@torch.no_grad()
def randomise(model: PreTrainedModel, seed: int) -> None:
    """Draw weights under which every part of the model sways the output.

    Activations keep their size through a layer, attention prefers some tokens without forgetting
    the others, and logits have a standard deviation of about 3, so that near ties are rare.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if name.endswith("bias"):
            parameter.copy_(0.5 * noise)
        elif "norm" in name:
            parameter.copy_(1 + 0.3 * noise)
        elif "embed" in name:
            parameter.copy_(noise)
        else:
            gain = 3.0 if "lm_head" in name else 1.5
            parameter.copy_(gain * noise / parameter.shape[1] ** 0.5)


def sharpen(model: torch.nn.Module) -> None:
    """Let attention prefer some tokens so much that a choice among them is worth it."""
    for name, parameter in model.named_parameters():
        if "q_proj" in name:
            parameter *= 2


def copy_model(source: Path, directory: Path, **edits: Any) -> Path:
    """Copy a checkpoint and return the copy. `edits` replace keys of config.json; `...` drops."""
    shutil.copytree(source, directory)
    edit_config(directory, **edits)
    return directory


def edit_config(directory: Path, **edits: Any) -> None:
    """Replace keys of a checkpoint's config.json; those whose new value is `...` are dropped."""
    path = directory / "config.json"
    config = json.loads(path.read_text()) | edits
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Return a random prompt of that many tokens."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(0, VOCAB_SIZE, (length,), generator=generator).tolist()


def whole_distribution(outputs: Sequence[RequestOutput]) -> list[torch.Tensor]:
    """Return each output's log-probabilities of the whole vocabulary, `[tokens, vocab_size]`."""
    return [
        torch.tensor([[row[i] for i in range(VOCAB_SIZE)] for row in output.logprobs])
        for output in outputs
    ]


def assert_same_answer(ours: RequestOutput, theirs: RequestOutput) -> None:
    """Assert equal tokens up to the first near tie, and equal log-probabilities up to rounding.

    Both must have been asked for the log-probabilities of the whole vocabulary.
    """
    num_tokens = len(theirs.token_ids)
    assert len(ours.token_ids) == num_tokens > 0
    pairs = zip(ours.token_ids, theirs.token_ids, strict=True)
    differs = next((i for i, (a, b) in enumerate(pairs) if a != b), num_tokens)
    # Up to and with the first token that differs, both were chosen after the same tokens.
    (our_rows,), (their_rows,) = whole_distribution([ours]), whole_distribution([theirs])
    worst = (our_rows - their_rows)[: differs + 1].abs().max()
    assert worst < LOGPROB_TOLERANCE, f"log-probabilities are off by {worst:.2g}"
    if differs < num_tokens:
        a, b = their_rows[differs][[ours.token_ids[differs], theirs.token_ids[differs]]]
        assert b - a < NEAR_TIE, f"token {differs} of {num_tokens} differs, by {b - a:.2g}"


@lru_cache(maxsize=16)
def load_reference(directory: Path) -> PreTrainedModel:
    """Load a checkpoint with transformers, in fp32 and with its plainest attention."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", local_files_only=True
    )
    return model.eval()


@torch.inference_mode()
def reference_logits(directory: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """Return transformers' logits after each of the tokens, fp32 `[num_tokens, vocab_size]`."""
    logits: torch.Tensor = load_reference(directory)(torch.tensor([list(token_ids)])).logits[0]
    return logits


def greedy(
    directory: Path, prompt: Sequence[int], num_tokens: int
) -> tuple[list[int], torch.Tensor]:
    """Return transformers' greedy continuation and the logits that it was chosen from.

    The logits are fp32 `[num_tokens, vocab_size]`.
    """
    out = load_reference(directory).generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits)


def answer_logits(directory: Path, prompt: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
    """Return transformers' logits for each place of an answer: `[len(answer), vocab_size]`."""
    return reference_logits(directory, [*prompt, *answer[:-1]])[len(prompt) - 1 :]


def assert_same_greedy(ours: Sequence[int], directory: Path, prompt: Sequence[int]) -> None:
    """Assert that `ours` is transformers' greedy continuation of `prompt`, near ties aside.

    Each token must be the best, or within `NEAR_TIE` of it, after the prompt and the tokens before
    it. By induction that is equality with `greedy` up to the first near tie.
    """
    assert ours, "no tokens to compare"
    logits = answer_logits(directory, prompt, ours)
    best = logits.argmax(-1)
    gap = logits.max(-1).values - logits.gather(1, torch.tensor(ours)[:, None])[:, 0]
    for place, token_id in enumerate(ours):
        assert gap[place] < NEAR_TIE, (
            f"token {place} of {len(ours)} is {token_id}, transformers' is {best[place]}, "
            f"{gap[place]:.4f} above it; prompt of {len(prompt)} tokens"
        )


def assert_served(output: RequestOutput, directory: Path, prompt: list[int], num: int) -> None:
    """Assert that a request gave `num` tokens, transformers' own."""
    assert (output.finish_reason, len(output.token_ids)) == ("length", num)
    assert_same_greedy(output.token_ids, directory, prompt)


def assert_marked(output: RequestOutput, *words: str) -> None:
    """Assert that a request failed, with a message that holds `words`."""
    assert (output.finish_reason, output.token_ids) == ("error", [])
    assert all(word in output.error for word in words), output.error


def assert_same_logprobs(
    logprobs: Sequence[dict[int, float]],
    ours: Sequence[int],
    directory: Path,
    prompt: Sequence[int],
    tolerance: float = LOGPROB_TOLERANCE,
) -> None:
    """Assert that the log-probabilities reported for `ours` are transformers'."""
    expected = answer_logits(directory, prompt, ours).log_softmax(-1)
    assert len(logprobs) == len(ours)
    for place, reported in enumerate(logprobs):
        values = torch.tensor(list(reported.values()))
        worst = (values - expected[place, list(reported)]).abs().max()
        assert worst < tolerance, f"log-probabilities of token {place} are off by {worst:.2g}"


def logprob_error(output: RequestOutput, directory: Path, prompt: Sequence[int]) -> float:
    """Return the relative RMS error of reported log-probabilities of the whole vocabulary."""
    expected = answer_logits(directory, prompt, output.token_ids).log_softmax(-1)
    return relative_rms(whole_distribution([output])[0], expected)


def open_llm(directory: Path, **options: Any) -> LLM:
    """Load a checkpoint in fp32 on the CPU, with NaN wherever no keys and values were written."""
    llm = LLM(
        directory, **{"device": "cpu", "dtype": "float32", "num_kvcache_blocks": 16} | options
    )
    runner = llm.engine._runner
    if isinstance(runner, OffloadRunner):
        _poison(runner._engine)
    else:
        for layer in runner._cache.layers:
            layer.keys.fill_(NAN)
            layer.values.fill_(NAN)
    return llm


def _poison(engine: OffloadEngine) -> None:
    """Fill all buffers of an offload engine with NaN, and those that it makes later."""
    recent, device = engine.recent, engine.device
    make_buffer, allocate_host = recent._empty, device.allocate_host

    def poisoned_buffer(num_blocks: int) -> torch.Tensor:
        return make_buffer(num_blocks).fill_(NAN)

    def poisoned_host(shape: tuple[int, ...], dtype: torch.dtype) -> HostMemory:
        memory = allocate_host(shape, dtype)
        memory.tensor.fill_(NAN)
        return memory

    made = [piece.result().tensor for piece in engine.pool._maker.pieces.values()]
    on_device = [engine._slots, engine._window, engine._writer._staging]
    for tensor in [*made, *on_device, recent._tails, recent._buffer]:
        tensor.fill_(NAN)
    recent._empty, device.allocate_host = poisoned_buffer, poisoned_host


def generate(
    llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int | Sequence[int], **params: Any
) -> list[RequestOutput]:
    """Generate greedily unless `params` say otherwise; `max_tokens` for all, or for each prompt.

    The books of the KV blocks must balance afterwards.
    """
    each = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
    options = {"temperature": 0.0} | params
    num_free_blocks = llm.engine.num_free_blocks
    outputs = llm.generate(
        prompts, [SamplingParams(max_tokens=n, **options) for n in each], use_tqdm=False
    )
    llm.engine.check_integrity()
    assert llm.engine.num_free_blocks == num_free_blocks, "blocks were lost"
    return outputs


def steps_of(
    llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int, **params: Any
) -> tuple[list[RequestOutput], list[tuple[int, int]]]:
    """Generate greedily, and count what each step computed: prefill tokens and decodes."""
    sampling_params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **params)
    requests = [llm.engine.add_request(list(prompt), sampling_params) for prompt in prompts]
    counts = []
    while llm.engine.has_unfinished():
        step = llm.engine.step()
        llm.engine.check_integrity()
        counts.append((sum(n for _, n in step.prefills), len(step.decodes)))
    return [request.output() for request in requests], counts
