"""Checks that streams wait for each other where they must: vector clocks over every buffer.

Each stream, and the host, has a clock: how far it knows each stream to have come. Work given to a
stream knows what the host knew then, and what the events knew that the stream was told to wait for.
An access is right if it knows of the last write to its buffer and, if it writes, of every read
since. So a missing wait is found whether or not the machine's timing shows it.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from nanovllm.device.stream import Event, Span, Stream

HOST = "host"
Clock = dict[str, int]


class HazardError(RuntimeError):
    """Two streams, or a stream and the host, use a buffer in no order."""


@dataclass(slots=True)
class _Buffer:
    """Who used a buffer last, and when by their own clock."""

    writer: str | None = None
    written: int = 0
    reads: Clock = field(default_factory=dict)


class StreamOrder:
    """The clocks of all streams of a device, and the buffers that they share.

    May be used by any thread; all threads together are the host.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._clocks: dict[str, Clock] = {HOST: {}}
        self._buffers: dict[tuple[Any, int], _Buffer] = {}

    def record(self, stream: str) -> Clock:
        """Return what is known at the end of the stream's work so far."""
        with self._lock:
            return dict(self._tick(stream))

    def wait(self, waiter: str, clock: Clock) -> None:
        """Let `waiter`, a stream or the host, know what `clock` knows."""
        with self._lock:
            own = self._clocks.setdefault(waiter, {})
            for stream, time in clock.items():
                own[stream] = max(own.get(stream, 0), time)

    def wait_for_all(self) -> None:
        """Let the host know what all streams know."""
        with self._lock:
            for clock in self._clocks.values():
                self.wait(HOST, clock)

    def access(self, user: str, reads: Iterable[Span] = (), writes: Iterable[Span] = ()) -> None:
        """Note that `user`, a stream or the host, reads and writes buffers.

        Raises:
            HazardError: it does not know of a use that must come before.
        """
        with self._lock:
            clock = self._tick(user)
            for span in reads:
                for index, buffer in self._buffers_of(span):
                    self._read(user, clock, span, index, buffer)
            for span in writes:
                for index, buffer in self._buffers_of(span):
                    self._write(user, clock, span, index, buffer)

    def _tick(self, user: str) -> Clock:
        self.wait(user, self._clocks[HOST])
        clock = self._clocks[user]
        clock[user] = clock.get(user, 0) + 1
        return clock

    def _buffers_of(self, span: Span) -> Iterator[tuple[int, _Buffer]]:
        for index in range(span.first, span.first + span.num_buffers):
            yield index, self._buffers.setdefault((span.space, index), _Buffer())

    def _read(self, user: str, clock: Clock, span: Span, index: int, buffer: _Buffer) -> None:
        if buffer.writer is None:
            raise HazardError(f"{user} reads {span.space} {index}, which holds nothing")
        self._check(user, clock, "reads", span, index, buffer)
        buffer.reads[user] = clock[user]

    def _write(self, user: str, clock: Clock, span: Span, index: int, buffer: _Buffer) -> None:
        self._check(user, clock, "writes", span, index, buffer)
        for reader, time in buffer.reads.items():
            if time > clock.get(reader, 0):
                raise HazardError(
                    f"{user} writes {span.space} {index} without waiting until {reader} has read it"
                )
        buffer.writer, buffer.written, buffer.reads = user, clock[user], {}

    @staticmethod
    def _check(user: str, clock: Clock, verb: str, span: Span, index: int, buffer: _Buffer) -> None:
        if buffer.writer is not None and buffer.written > clock.get(buffer.writer, 0):
            raise HazardError(
                f"{user} {verb} {span.space} {index} without waiting until {buffer.writer} has "
                "written it"
            )


class CheckedEvent(Event):
    """An event that remembers what was known at its point.

    Seeing it passed is as good as waiting for it, unless it only measures time: who looks whether
    a measurement is over has not thought of order, and on a CPU would see every kernel done.
    """

    def __init__(self, event: Event, clock: Clock, order: StreamOrder, timed: bool = False) -> None:
        self.event, self.clock = event, clock
        self._order = order
        self._timed = timed

    def is_done(self) -> bool:
        done = self.event.is_done()
        if done and not self._timed:
            self._order.wait(HOST, self.clock)
        return done

    def synchronize(self) -> None:
        self.event.synchronize()
        self._order.wait(HOST, self.clock)

    def ms_since(self, start: Event) -> float:
        return self.event.ms_since(start.event if isinstance(start, CheckedEvent) else start)


class CheckedStream(Stream):
    """A stream whose copies, waits and discarded buffers are checked.

    Args:
        stream: what does the work.
        order: the clocks of the device.
        poison: fills a tensor with NaN at this point of `stream`.
    """

    def __init__(
        self, stream: Stream, order: StreamOrder, poison: Callable[[Stream, torch.Tensor], None]
    ) -> None:
        self.name = stream.name
        self.stream = stream
        self._order = order
        self._poison = poison

    def record(self, timed: bool = False) -> CheckedEvent:
        clock = self._order.record(self.name)
        return CheckedEvent(self.stream.record(timed), clock, self._order, timed)

    def wait(self, event: Event) -> None:
        assert isinstance(event, CheckedEvent)
        self._order.wait(self.name, event.clock)
        self.stream.wait(event.event)

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        *,
        reads: Span | None = None,
        writes: Span | None = None,
    ) -> None:
        self._order.access(self.name, [reads] if reads else (), [writes] if writes else ())
        super().copy(target, source)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self.stream.copy(target, source)

    def entered(self) -> AbstractContextManager[Any]:
        return self.stream.entered()

    def discard(self, tensor: torch.Tensor, span: Span) -> None:
        self._order.access(self.name, writes=[span])
        self._poison(self.stream, tensor)
