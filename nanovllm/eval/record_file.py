"""A file of records, one a line, that an interrupted run can go on with."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from nanovllm.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


class RecordFile(Generic[T]):
    """Records as JSON lines, under a first line with the settings that they were made with.

    Args:
        path: the file; made, with its folder, if it is missing. A last line that was cut off is
            dropped.
        settings: what all records of the file have in common, as JSON would give it back.
        record: the records' dataclass; its fields are what JSON can hold.
        noun: what messages call a record; with an `s`, several.

    Raises:
        ConfigError: the file holds something else, was made with other settings, or cannot be read
            or written.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any], record: type[T], noun: str) -> None:
        self._path = path
        self._record = record
        self._noun = noun
        self.records: list[T] = []
        """Those of the file, in its order."""
        try:
            self._load(settings)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read and written: {error.strerror}") from error

    def add(self, records: Iterable[T]) -> None:
        """Append records, at once on disk."""
        records = list(records)
        self.records += records
        self._append(map(asdict, records))

    def _load(self, settings: Mapping[str, Any]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("a+b") as file:
            file.seek(0)
            content = file.read()
            if not content:
                self._append([{"settings": dict(settings)}])
                return
            # Split as bytes: text may hold line separators that JSON does not escape.
            *lines, rest = content.split(b"\n")
            self._check_settings(lines[0] if lines else b"", settings)
            self.records = [self._parse(number, line) for number, line in enumerate(lines[1:], 2)]
            if rest:
                file.truncate(len(content) - len(rest))

    def _append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        with self._path.open("ab") as file:
            file.write(lines.encode())

    def _check_settings(self, line: bytes, settings: Mapping[str, Any]) -> None:
        try:
            old = dict(json.loads(line)["settings"])
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"{self._path} is no file of {self._noun}s: name another one"
            ) from error
        differing = [
            f"{name}: {old.get(name)!r} there, {settings.get(name)!r} now"
            for name in dict.fromkeys([*old, *settings])
            if old.get(name) != settings.get(name)
        ]
        if differing:
            raise ConfigError(
                f"{self._path} holds {self._noun}s of other settings ({'; '.join(differing)}): "
                "name another file, or run with those settings"
            )

    def _parse(self, number: int, line: bytes) -> T:
        try:
            row = json.loads(line)
            return self._record(**{field.name: row[field.name] for field in fields(self._record)})
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{self._path}:{number} is no {self._noun}: {error!r}") from error
