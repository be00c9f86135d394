"""Needle in a haystack: one fact in a long text, and a question about it at the end."""

import time
from dataclasses import dataclass
from typing import Any

from nanovllm.errors import ConfigError
from nanovllm.eval.haystack import sentences
from nanovllm.llm import LLM
from nanovllm.sampling_params import SamplingParams

DEFAULT_VALUE = "7492618"

_INTRODUCTION = (
    "Somewhere in the text below a magic number is mentioned. Remember it: "
    "at the end there is a question about it.\n\n"
)
_NEEDLE = "The magic number of the lighthouse is {value}. "
_QUESTION = "\n\nWhat is the magic number of the lighthouse that the text above mentions?"
_MARK = "\N{SNOWMAN}"


@dataclass(frozen=True, slots=True)
class NeedleTask:
    """A prompt that hides a value, and what it asks."""

    token_ids: list[int]
    value: str
    position: float
    """Share of the text that comes before the needle; in [0, 1]."""
    needle: str
    question: str

    def is_answered_by(self, answer: str) -> bool:
        """Return whether the value stands in the answer, in any case of its letters."""
        return self.value.lower() in answer.lower()


@dataclass(frozen=True, slots=True)
class NeedleResult:
    """What a model made of a task."""

    task: NeedleTask
    answer: str
    passed: bool
    error: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    ttft_ms: float
    decode_ms: float
    total_s: float


def build_task(
    tokenizer: Any,
    input_len: int,
    position: float = 0.5,
    value: str = DEFAULT_VALUE,
    seed: int = 0,
) -> NeedleTask:
    """Make a task of exactly `input_len` tokens, under the tokenizer's chat template if it has one.

    Args:
        tokenizer: transformers tokenizer of the model.
        input_len: tokens of the whole prompt.
        position: share of the text before the needle, in [0, 1]; moved to the end of a sentence.
        value: what the needle says.
        seed: chooses the text around it.

    Raises:
        ConfigError: `position` is out of range, `input_len` leaves no room for the needle, or
            there is no tokenizer.
    """
    if tokenizer is None:
        raise ConfigError("the model directory has no tokenizer to write the text with")
    if not 0 <= position <= 1:
        raise ConfigError(f"needle position {position} is not in [0, 1]")
    head, tail = _chat_frame(tokenizer)
    needle = _NEEDLE.format(value=value)

    def encode(text: str) -> list[int]:
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return ids

    start, end = encode(head + _INTRODUCTION), encode(_QUESTION + tail)
    needle_ids = encode(needle)
    budget = input_len - len(start) - len(end) - len(needle_ids)
    if budget < 0:
        raise ConfigError(
            f"input_len {input_len} is too short: instruction, needle and question alone take "
            f"{input_len - budget} tokens"
        )
    hay: list[int] = []
    before = 0
    for sentence in sentences(seed):
        if len(hay) <= position * budget:
            before = len(hay)
        if len(hay) >= budget:
            break
        hay += encode(sentence)
    hay = hay[:budget]
    token_ids = start + hay[:before] + needle_ids + hay[before:] + end
    return NeedleTask(token_ids, value, position, needle.strip(), _QUESTION.strip())


def run_task(llm: LLM, task: NeedleTask, max_new_tokens: int = 32) -> NeedleResult:
    """Let the model answer greedily. It passes if the value stands in the answer."""
    params = SamplingParams(temperature=0, max_tokens=max_new_tokens)
    start = time.perf_counter()
    output = llm.generate([task.token_ids], params, use_tqdm=False)[0]
    return NeedleResult(
        task=task,
        answer=output.text,
        passed=task.is_answered_by(output.text),
        error=output.error,
        num_prompt_tokens=output.num_prompt_tokens,
        num_output_tokens=len(output.token_ids),
        ttft_ms=output.ttft_ms,
        decode_ms=output.decode_ms,
        total_s=time.perf_counter() - start,
    )


def describe(result: NeedleResult) -> str:
    """Return a few lines that say what was asked, what came back, and how fast."""
    task = result.task
    lines = [
        f"Prompt:  {result.num_prompt_tokens} tokens; at {task.position:.0%} of the text stands",
        f"         “{task.needle}”",
        f"Asked:   {task.question}",
        f"Answer:  {result.answer.strip() or '(nothing)'}",
        f"Result:  {'PASS' if result.passed else 'FAIL'} (expected {task.value})",
    ]
    if result.error:
        lines.append(f"Error:   {result.error}")
    else:
        prefill = result.num_prompt_tokens / result.ttft_ms * 1e3
        lines.append(f"Prefill: {result.ttft_ms / 1e3:.2f} s, {prefill:.0f} tokens/s")
        if (steps := result.num_output_tokens - 1) > 0:
            per_token = result.decode_ms / steps
            lines.append(f"Decode:  {per_token:.1f} ms a token, {1e3 / per_token:.0f} tokens/s")
    return "\n".join(lines)


def describe_attention(stats: dict[str, Any]) -> list[str]:
    """Return a line on how much of the prefill's attention was computed, from `LLM.stats()`.

    None if the policy computes all of it.
    """
    if not stats["attention"]:
        return []
    density = stats["attention"]["tile_density"]
    by_layer = stats["attention"]["tile_density_by_layer"]
    return [
        f"Attention: {1 - density:.0%} of the prefill's was skipped "
        f"({1 - max(by_layer):.0%} to {1 - min(by_layer):.0%} of a layer's)"
    ]


def describe_transfers(stats: dict[str, Any]) -> list[str]:
    """Return lines on where the KV cache lay and what was copied, from `LLM.stats()`.

    None if it lay on the device.
    """
    if not stats["transfers"]:
        return []
    mib = 1 << 20
    lines = [
        f"KV cache: {stats['kv_host_bytes'] / mib:.0f} MiB in host memory, "
        f"{stats['kv_device_bytes'] / mib:.0f} MiB of buffers on the device"
    ]
    for phase, traffic in stats["transfers"].items():
        written, read = (
            (traffic[direction]["key_bytes"] + traffic[direction]["value_bytes"]) / mib
            for direction in ("d2h", "h2d")
        )
        if phase == "decode":
            read += stats["pages"].get("bytes_fetched", 0) / mib
        lines.append(f"  {phase}: {written:.0f} MiB written to host memory, {read:.0f} MiB read")
    if pages := stats["pages"]:
        lines.append(
            f"  {pages['hit_rate']:.0%} of the pages that decode wanted were on the device"
        )
    return lines


def _chat_frame(tokenizer: Any) -> tuple[str, str]:
    """Return what a chat template puts before and after the user's message."""
    if not getattr(tokenizer, "chat_template", None):
        begin = tokenizer.bos_token
        return begin or "", "\nAnswer:"
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
    )
    head, _, tail = text.partition(_MARK)
    return head, tail
