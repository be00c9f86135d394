"""Two turns of a chat whose first answer ends near the end of a block (C44), for every KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import assert_served, generate, open_llm, prompt_of

from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence
from nanovllm.outputs import FinishReason

TURNS = [
    (num_prompt, num_answer + more)
    for num_prompt, num_answer in ((100, 28), (250, 6), (128, 128))
    for more in (-1, 0, 1)
]
"""Tokens of the first prompt and of its answer, around the ends of blocks of 128."""


def assert_two_turns_are_served(
    directory: Path, num_prompt: int, num_answer: int, **options: Any
) -> None:
    """Both answers are transformers', the second after a prefix hit on the first turn's blocks."""
    prompt = prompt_of(num_prompt)
    with open_llm(directory, **options) as llm:
        (first,) = generate(llm, [prompt], num_answer)
        turn = prompt + first.token_ids + prompt_of(10)
        (second,) = generate(llm, [turn], 8)
    assert_served(first, directory, prompt, num_answer)
    assert_served(second, directory, turn, 8)
    # The answer's last token was never fed.
    assert second.num_cached_tokens == (num_prompt + num_answer - 1) // 128 * 128


def take_last_tokens_for_fed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break the scheduler: an ended request's last token is committed, though nothing fed it."""
    proper = Scheduler.finish

    def finish(self: Scheduler, seq: Sequence, reason: FinishReason) -> None:
        self.block_manager.commit(seq, seq.num_uncomputed_tokens)
        proper(self, seq, reason)

    monkeypatch.setattr(Scheduler, "finish", finish)
