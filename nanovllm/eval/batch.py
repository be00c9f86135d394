"""Prompts that are answered in one call, and what that took."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from nanovllm.llm import LLM
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Batch:
    """Results in the order of their prompts."""

    outputs: list[RequestOutput]
    ttft_ms: list[float]
    """Milliseconds to the first token, without the wait for prompts before: where requests run one
    at a time, from the end of the one before, else from the first token of the one before, which
    is next to nothing for all but one of those that a step prefills together. NaN for a prompt that
    failed."""
    tile_density: float
    """Share of the causal tiles of attention that the prefill computed, in (0, 1]; the mean of all
    prompts."""

    @property
    def mean_ttft_ms(self) -> float:
        """Mean of the prompts that did not fail; NaN if all did."""
        times = [ttft for ttft in self.ttft_ms if not math.isnan(ttft)]
        return sum(times) / len(times) if times else math.nan


def answer_batch(
    llm: LLM, prompts: Sequence[list[int]], max_new_tokens: int, use_tqdm: bool = False
) -> Batch:
    """Let a model answer prompts greedily. Resets the LLM's statistics.

    Args:
        llm: the model.
        prompts: token ids of each.
        max_new_tokens: most tokens of an answer.
        use_tqdm: whether to show a progress bar.
    """
    params = SamplingParams(temperature=0, max_tokens=max_new_tokens)
    llm.reset_stats()
    outputs = llm.generate(prompts, params, use_tqdm)
    attention = llm.stats()["attention"]
    return Batch(
        outputs,
        _own_ttft_ms(outputs, one_at_a_time=llm.engine.config.enable_offload),
        attention["tile_density"] if attention else 1.0,
    )


def _own_ttft_ms(outputs: Sequence[RequestOutput], one_at_a_time: bool) -> list[float]:
    """Return each prompt's time to the first token without the time when others had their turn.

    All requests arrived together; those that failed have none.
    """
    ttft_ms = [math.nan] * len(outputs)
    done = [i for i, output in enumerate(outputs) if output.error is None]
    before = 0.0
    for i in sorted(done, key=lambda i: outputs[i].ttft_ms):
        ttft_ms[i] = outputs[i].ttft_ms - before
        before = outputs[i].ttft_ms + (outputs[i].decode_ms if one_at_a_time else 0)
    return ttft_ms
