"""Figures by length and task, and over all: the rows of a table, whatever its figures are."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

FiguresT = TypeVar("FiguresT")
"""Figures of a group of items."""


class Item(Protocol):
    """What has a task and a length, such as an answer."""

    @property
    def task(self) -> str:
        """Name of the task."""

    @property
    def length(self) -> int:
        """In tokens."""


ItemT = TypeVar("ItemT", bound=Item)
_K = TypeVar("_K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Section(Generic[FiguresT]):
    """Figures of one length."""

    length: int | None
    """In tokens. None: of all lengths, where each task has one of its own, as in files."""
    groups: tuple[FiguresT, ...]
    """One for each task."""
    total: FiguresT
    """Over all tasks."""


@dataclass(frozen=True, slots=True)
class Breakdown(Generic[FiguresT]):
    """Figures by length and task, and over all."""

    sections: tuple[Section[FiguresT], ...]
    """By length, the shortest first."""
    total: FiguresT | None
    """Over everything; None: there is nothing."""

    @property
    def rows(self) -> list[FiguresT]:
        """The rows of a table: the tasks of each length, and totals where they are of several."""
        found: list[FiguresT] = []
        for section in self.sections:
            found += section.groups
            if len(section.groups) > 1:
                found.append(section.total)
        if self.total is not None and len(self.sections) > 1:
            found.append(self.total)
        return found

    def total_at(self, length: int | None) -> FiguresT | None:
        """Return the figures over all tasks of a section, or None if there is no such section."""
        return next((part.total for part in self.sections if part.length == length), None)


def break_down(
    items: Sequence[ItemT],
    summarise: Callable[[Sequence[ItemT]], FiguresT],
    *,
    merge_lengths: bool = False,
) -> Breakdown[FiguresT]:
    """Return the figures of items by length and task.

    Args:
        items: any number. Tasks keep the order in which they come first.
        summarise: makes the figures of one item or more.
        merge_lengths: make one section of all lengths.
    """
    by_length = _split(items, lambda item: None if merge_lengths else item.length)
    sections = [
        Section(
            length,
            tuple(summarise(group) for group in _split(part, lambda item: item.task).values()),
            summarise(part),
        )
        for length, part in sorted(by_length.items(), key=lambda entry: entry[0] or 0)
    ]
    return Breakdown(tuple(sections), summarise(items) if items else None)


def has_own_lengths(items: Iterable[Item]) -> bool:
    """Return whether lengths differ, but no task has more than one."""
    by_task = _split(items, lambda item: item.task)
    lengths = [{item.length for item in group} for group in by_task.values()]
    return all(len(of_task) == 1 for of_task in lengths) and len(set().union(*lengths)) > 1


def common_task(items: Iterable[Item]) -> str | None:
    """Return the task of the items, or None if they are of several."""
    first, *others = dict.fromkeys(item.task for item in items)
    return None if others else first


def span(items: Iterable[Item]) -> tuple[int, int]:
    """Return the shortest and the longest length of the items, in tokens."""
    lengths = [item.length for item in items]
    return min(lengths), max(lengths)


def _split(items: Iterable[ItemT], key: Callable[[ItemT], _K]) -> dict[_K, list[ItemT]]:
    parts: dict[_K, list[ItemT]] = {}
    for item in items:
        parts.setdefault(key(item), []).append(item)
    return parts
