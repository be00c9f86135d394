"""A decode step recorded as a CUDA graph."""

from collections.abc import Callable

import torch

from nanovllm.device import Device
from nanovllm.engine.step_inputs import StepInputs


class DecodeGraph:
    """A recorded decode step of a fixed number of sequences.

    Args:
        device: the device; one that `records_graphs`.
        inputs: a step of that many sequences, which is computed to record it.
        compute: returns the logits of a step from its inputs on the device, see
            `StepInputs.split`; its launches depend on shapes only.
    """

    _logits: torch.Tensor

    def __init__(
        self,
        device: Device,
        inputs: StepInputs,
        compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        self._device = device
        self._data = device.upload(inputs.data, torch.int32)
        parts = inputs.split(self._data)
        self.size = inputs.num_decodes

        def record() -> None:
            self._logits = compute(*parts)

        self._replay = device.capture(record)

    def run(self, inputs: StepInputs) -> torch.Tensor:
        """Replay the step on other inputs. The logits are overwritten by the next replay."""
        self._device.upload(inputs.data, torch.int32, out=self._data)
        self._replay()
        return self._logits
