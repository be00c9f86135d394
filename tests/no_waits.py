"""Watches an engine's steps for anything that makes the host wait for the device."""

from __future__ import annotations

from typing import Any

import torch

from nanovllm import LLM


def forbid_waits(llm: LLM) -> list[int]:
    """From now on, let a step that waits fail; return a list that gets each step's token count."""
    run, calls = llm.engine._runner.run, []

    def watched(step: Any) -> torch.Tensor:
        calls.append(step.num_tokens)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return run(step)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    llm.engine._runner.run = watched
    return calls
