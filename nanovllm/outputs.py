"""What a request gives back: a plain dict, so that it prints and serialises, with attributes."""

from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]


class _Record(dict[str, Any]):
    """A dict whose keys are also attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class RequestOutput(_Record):
    """The result of one request, with the keys below. `output["text"]` is `output.text`."""

    text: str
    """The answer, without end-of-sequence tokens and stop strings. Empty without a tokenizer."""
    token_ids: list[int]
    """Every generated token, the end token and the tokens of a stop string among them."""
    finish_reason: FinishReason
    """`stop`: end token or stop string; `length`: `max_tokens` or `max_model_len` reached;
    `abort`: cancelled; `error`: see `error`, and there are no tokens."""
    stop_reason: int | str | None
    """The stop string or stop token id that ended the request, if one did."""
    error: str | None
    """Why the request failed, and how to mend it; None if it did not."""
    num_prompt_tokens: int
    num_cached_tokens: int
    """Prompt tokens whose KV came from the prefix cache instead of being computed."""
    ttft_ms: float
    """From the request's arrival to its first token, waiting included; NaN if there was none."""
    decode_ms: float
    """From the first token to the last."""
    logprobs: list[dict[int, float]] | None
    """For each token the log-probabilities asked for, best first, the token's own among them."""


class StreamOutput(_Record):
    """What a step added to one streamed request."""

    index: int
    """Position of the request's prompt in the call."""
    text: str
    """New text. The pieces of a request join to the `text` of its result."""
    token_ids: list[int]
    """New tokens. Their text may come in a later piece, when a character or a match is complete."""
    output: RequestOutput | None
    """The whole result, in the last piece of a request; None before."""
