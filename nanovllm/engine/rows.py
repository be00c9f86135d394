"""Which rows of the device's buffers belong to whom."""

from nanovllm.engine.sequence import Sequence, Status


class Rows:
    """Gives each running sequence a row; a row is free when its sequence runs no more.

    Args:
        num_rows: at least as many as sequences that run at once.
    """

    def __init__(self, num_rows: int) -> None:
        self._holders: list[Sequence | None] = [None] * num_rows

    def row_of(self, seq: Sequence) -> int:
        """Return the sequence's row: the one that it has, or else the lowest that is free."""
        if seq in self._holders:
            return self._holders.index(seq)
        row = next(row for row, holder in enumerate(self._holders) if not _is_running(holder))
        self._holders[row] = seq
        return row


def _is_running(seq: Sequence | None) -> bool:
    return seq is not None and seq.status is Status.RUNNING
