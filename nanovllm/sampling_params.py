"""How the next token of a request is chosen, and when the request ends."""

import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from nanovllm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling options of one request, validated when made.

    Filters apply in vLLM's order: repetition penalty, temperature, `min_p`, `top_k`, `top_p`, each
    over what the one before has left. `logprobs` are those of the raw model output, before any of
    them (vLLM's default).
    """

    temperature: float = 1.0
    """Divides the logits; >= 0. 0 takes the most likely token (greedy) and ignores the filters."""
    max_tokens: int = 64
    """Most tokens to generate; >= 1."""
    ignore_eos: bool = False
    """Whether to run on past the model's end-of-sequence tokens."""
    top_p: float = 1.0
    """Keep the fewest most likely tokens whose probability reaches this share; in (0, 1]."""
    top_k: int = -1
    """Keep this many most likely tokens; -1 and 0 keep all, and so does more than the
    vocabulary."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the most likely one; in [0, 1]."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens seen in prompt or output; > 0."""
    stop: str | tuple[str, ...] | list[str] = ()
    """Strings that end the request; the text ends before the earliest of them. None may be
    empty."""
    stop_token_ids: tuple[int, ...] | list[int] = ()
    """Token ids that end the request, as an end-of-sequence token does, and whatever
    `ignore_eos`."""
    seed: int | None = None
    """Fixes this request's draws, whatever runs beside it. None takes one
    from the engine's seed and the request's number."""
    logprobs: int | None = None
    """Log-probabilities to return a token: this many best, and always the chosen one; >= 0."""

    def __post_init__(self) -> None:
        def normalise(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        normalise("stop", (self.stop,) if isinstance(self.stop, str) else _as_tuple(self.stop))
        normalise("stop_token_ids", _as_tuple(self.stop_token_ids, _as_plain_int))
        for name, allowed, holds in _RULES:
            value = getattr(self, name)
            if not holds(value):
                raise ConfigError(f"SamplingParams: {name}={value!r} is not {allowed}")


def _as_tuple(value: Any, convert: Callable[[Any], Any] = lambda item: item) -> Any:
    """Return an iterable's items, none for None; what else it may be is left to the rules."""
    if value is None:
        return ()
    return tuple(map(convert, value)) if isinstance(value, Iterable) else value


def _as_plain_int(value: Any) -> Any:
    return operator.index(value) if hasattr(value, "__index__") else value


def _is_int(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)


def _all(values: Any, holds: Callable[[Any], Any]) -> bool:
    return isinstance(values, tuple) and all(map(holds, values))


_RULES: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("temperature", "a finite number >= 0", lambda v: _is_finite(v) and v >= 0),
    ("max_tokens", "an integer >= 1", lambda v: _is_int(v) and v >= 1),
    ("ignore_eos", "True or False", lambda v: isinstance(v, bool)),
    ("top_p", "a number in (0, 1]", lambda v: _is_finite(v) and 0 < v <= 1),
    ("top_k", "-1, 0 (all) or an integer >= 1", lambda v: _is_int(v) and v >= -1),
    ("min_p", "a number in [0, 1]", lambda v: _is_finite(v) and 0 <= v <= 1),
    ("repetition_penalty", "a finite number > 0", lambda v: _is_finite(v) and v > 0),
    ("stop", "made of non-empty strings", lambda v: _all(v, lambda s: isinstance(s, str) and s)),
    ("stop_token_ids", "made of ids >= 0", lambda v: _all(v, lambda i: _is_int(i) and i >= 0)),
    ("seed", "None or an integer", lambda v: v is None or _is_int(v)),
    ("logprobs", "None or an integer >= 0", lambda v: v is None or (_is_int(v) and v >= 0)),
)
