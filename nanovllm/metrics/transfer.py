"""What crossed the bus, and how long the compute stream waited for it."""

from collections import deque
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, Self

Direction = Literal["h2d", "d2h"]
Phase = Literal["prefill", "decode"]


class TimedEvent(Protocol):
    """A point in a stream's work; see `nanovllm.device.Event`."""

    def is_done(self) -> bool: ...

    def ms_since(self, start: Self) -> float: ...


@dataclass(slots=True)
class Traffic:
    """Copies in one direction."""

    num_copies: int = 0
    key_bytes: int = 0
    value_bytes: int = 0


class TransferStats:
    """Counts copies by phase and direction, and times the compute stream's waits by phase.

    On a CPU copies are done by the computing thread; they count, but are no waits.
    """

    def __init__(self) -> None:
        self.phase: Phase = "prefill"
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._traffic: dict[Phase, dict[Direction, Traffic]] = {
            "prefill": {"h2d": Traffic(), "d2h": Traffic()},
            "decode": {"h2d": Traffic(), "d2h": Traffic()},
        }
        self._wait_ms: dict[Phase, float] = {"prefill": 0.0, "decode": 0.0}
        self._open_waits: deque[tuple[Phase, Any, Any]] = deque()

    def add_copies(
        self, direction: Direction, num_copies: int, key_bytes: int, value_bytes: int
    ) -> None:
        """Count copies of the present phase."""
        traffic = self._traffic[self.phase][direction]
        traffic.num_copies += num_copies
        traffic.key_bytes += key_bytes
        traffic.value_bytes += value_bytes

    def add_wait(self, before: TimedEvent, after: TimedEvent) -> None:
        """Count the time between two points of the compute stream, once both are passed."""
        self._open_waits.append((self.phase, before, after))
        self._close_waits()

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return for each phase `h2d` and `d2h`, with the fields of `Traffic`, and `wait_ms`.

        To be called when the device is idle: waits that are not over are left out.
        """
        self._close_waits()
        return {
            phase: {direction: asdict(traffic) for direction, traffic in directions.items()}
            | {"wait_ms": self._wait_ms[phase]}
            for phase, directions in self._traffic.items()
        }

    def _close_waits(self) -> None:
        while self._open_waits and self._open_waits[0][2].is_done():
            phase, before, after = self._open_waits.popleft()
            self._wait_ms[phase] += after.ms_since(before)
