"""Tokens per second of prefill and decode, for the progress bar and benchmarks."""

import time


class Throughput:
    """Rates of the steps since the object was made.

    A step counts, with all its tokens and its time, for the phase that has most of its tokens.
    """

    def __init__(self) -> None:
        self._tokens = [0, 0]
        self._seconds = [0.0, 0.0]
        self._last = time.perf_counter()

    def add(self, num_prefill_tokens: int, num_decode_tokens: int) -> None:
        """Count a step that has just ended."""
        now = time.perf_counter()
        phase = int(num_decode_tokens >= num_prefill_tokens)
        self._tokens[phase] += num_prefill_tokens + num_decode_tokens
        self._seconds[phase] += now - self._last
        self._last = now

    def rates(self) -> dict[str, str]:
        """Return both rates as texts; a phase that has not run yet is left out."""
        return {
            name: f"{tokens / seconds:.0f}tok/s"
            for name, tokens, seconds in zip(
                ("prefill", "decode"), self._tokens, self._seconds, strict=True
            )
            if seconds > 0
        }
