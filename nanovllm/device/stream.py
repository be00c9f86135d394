"""Streams and events: what the offload engine orders copies and kernels with."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch


class Span(NamedTuple):
    """Buffers that an operation reads or writes, as the order checker knows them."""

    space: str | tuple[str, int]
    """Which row of buffers: `"slot"`, `"staging"`, `"hot"` or `("host", layer_id)`."""
    first: int
    num_buffers: int


class Event(ABC):
    """A point in the work of a stream. Made by `Stream.record`, once for each point."""

    @abstractmethod
    def is_done(self) -> bool:
        """Return whether the work before the point is done. Does not wait."""

    @abstractmethod
    def synchronize(self) -> None:
        """Make the host wait for the point."""

    @abstractmethod
    def ms_since(self, start: "Event") -> float:
        """Return the milliseconds between two points recorded with `timed=True`, both done."""


class Stream(ABC):
    """A queue of work that runs in order, and in no order with other streams unless they wait."""

    name: str

    @abstractmethod
    def record(self, timed: bool = False) -> Event:
        """Return the point after all work given to the stream so far."""

    @abstractmethod
    def wait(self, event: Event) -> None:
        """Let later work of this stream begin only after `event`. The host does not wait."""

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        reads: Span | None = None,
        writes: Span | None = None,
    ) -> None:
        """Queue a copy between contiguous tensors of one shape, one of them in host memory.

        `reads` and `writes` say which buffers that are, for the order checker; None leaves the
        buffer unchecked.

        Raises:
            ValueError: a tensor has gaps. PyTorch would read such a host tensor at once, whatever
                the stream waits for.
        """
        if not (target.is_contiguous() and source.is_contiguous()):
            raise ValueError(
                f"a copy between strides {source.stride()} and {target.stride()}; both tensors "
                "must be contiguous"
            )
        self._copy(target, source)

    @abstractmethod
    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue the copy."""

    @abstractmethod
    def entered(self) -> AbstractContextManager[Any]:
        """Return a context in which kernels go to this stream."""

    @abstractmethod
    def discard(self, tensor: torch.Tensor, span: Span) -> None:
        """Say that what `tensor` holds is wanted no more, from this point of the stream on.

        Does nothing unless order is checked; then the tensor is poisoned with NaN.
        """
