"""A request while it is served: its tokens, its blocks, and how it ended."""

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from random import Random

import torch

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.outputs import FinishReason, RequestOutput
from nanovllm.sampling_params import SamplingParams


class Status(Enum):
    """Where a sequence stands."""

    WAITING = auto()
    RUNNING = auto()
    FINISHED = auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One request's tokens and state, changed by scheduler, block manager and engine."""

    seq_id: int
    token_ids: list[int]
    """Prompt, then what was generated."""
    params: SamplingParams
    detokenizer: Detokenizer | None
    random: Random
    """Source of the request's draws: one number a token."""
    arrival_s: float
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the prefix cache supplied when the request first ran; None before."""
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    """Hashes of the full blocks, as far as they were needed."""
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)
    seen: torch.Tensor | None = None
    """Which tokens occur, where a repetition penalty asks for it; kept by the sampler."""
    first_token_s: float = math.nan
    last_token_s: float = math.nan

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.token_ids)

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens that a step has yet to compute."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_decoding(self) -> bool:
        """Whether all that is left to compute is the newest generated token."""
        return self.num_uncomputed_tokens == 1 and self.num_tokens > self.num_prompt_tokens

    def output(self) -> RequestOutput:
        """Return the result of a finished sequence. A failed one has no tokens."""
        failed = self.finish_reason == "error"
        text = self.detokenizer.text if self.detokenizer and not failed else ""
        wants_logprobs = self.params.logprobs is not None and not failed
        return RequestOutput(
            text=text,
            token_ids=[] if failed else self.output_token_ids,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens or 0,
            ttft_ms=(self.first_token_s - self.arrival_s) * 1e3,
            decode_ms=(self.last_token_s - self.first_token_s) * 1e3,
            logprobs=self.logprobs if wants_logprobs else None,
        )
