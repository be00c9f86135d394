"""Random delays on every stream of a CUDA device, so that a missing wait shows in the results."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from nanovllm.device.cuda import CudaStream

MAX_CYCLES = 400_000
"""About a quarter of a millisecond: longer than most copies and kernels of a small model."""


@contextmanager
def delayed_streams(seed: int, share: float = 0.2) -> Iterator[dict[str, int]]:
    """Delay a share of all copies, waits and recorded points by up to `MAX_CYCLES`.

    Yields how often each stream, by its name, was delayed.
    """
    chooser = random.Random(seed)
    delays: dict[str, int] = {}

    def delay(stream: CudaStream) -> None:
        if chooser.random() < share:
            with stream.entered():
                torch.cuda._sleep(chooser.randrange(MAX_CYCLES))
            delays[stream.name] = delays.get(stream.name, 0) + 1

    def before(method):
        def delayed(self, *args, **kwargs):
            delay(self)
            return method(self, *args, **kwargs)

        return delayed

    with pytest.MonkeyPatch.context() as patch:
        for name in ("copy", "record", "wait"):
            patch.setattr(CudaStream, name, before(getattr(CudaStream, name)))
        yield delays
