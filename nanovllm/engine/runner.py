"""What the engine asks of whatever runs its steps."""

from abc import ABC, abstractmethod
from typing import Any

import torch

from nanovllm.engine.scheduler import Step


class Runner(ABC):
    """A model on its device, with the KV cache that its attention reads."""

    @abstractmethod
    def run(self, step: Step) -> torch.Tensor:
        """Compute the step's tokens and return the logits that follow its sampled sequences.

        Returns:
            `[len(step.sampled), vocab_size]`, rows in the order of `step.sampled`. Does not wait
            for the device.
        """

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return what the KV cache takes and moved, see `LLM.stats`. The device is idle."""

    @abstractmethod
    def reset_stats(self) -> None:
        """Begin to count anew."""

    @abstractmethod
    def close(self) -> None:
        """Give back memory that does not go with the object."""
