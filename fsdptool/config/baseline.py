"""Findings that a project has accepted for now: new ones count, old ones do not, wherever lines move."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdptool.config.lint_settings import keep
from fsdptool.config.result import Reading
from fsdptool.errors import ConfigError
from fsdptool.files.text import UnreadableError, replace_file
from fsdptool.files.values import read_json
from fsdptool.records.diagnostic import Diagnostic

NAME = "fsdptool-baseline.json"
"""The file that ``--write-baseline`` writes unless another is named."""

_VERSION = 1
_LINE = re.compile(r"\bline \d+")


@dataclass(slots=True)
class Baseline:
    """Accepted findings by file.

    A finding is known by its file, code and message, with line numbers taken out of the message: edits
    above it do not make it new, and a second one of the same kind is new.

    Attributes:
        file: Where it is stored; paths are relative to its folder.
        known: File to how often each finding was accepted, by code and message.
    """

    file: Path
    known: dict[str, Counter[tuple[str, str]]] = field(default_factory=dict)

    def without(self, reading: Reading) -> Reading:
        """Return a reading whose accepted findings are suppressed."""
        left = Counter(self.known.get(self._name(reading), {}))

        def new(item: Diagnostic) -> bool:
            if left[_mark(item)] <= 0:
                return True
            left[_mark(item)] -= 1
            return False

        return keep(reading, new) if left else reading

    def take(self, readings: Iterable[Reading]) -> int:
        """Accept what was found in files, in place of what was accepted in them; return its number."""
        count = 0
        for reading in readings:
            # A path that cannot be read is a mistake of the command line, not an old finding.
            marks = Counter(
                _mark(item)
                for item in reading.diagnostics
                if item.severity != "info" and item.code != "FSD101"
            )
            self.known.pop(self._name(reading), None)
            if marks:
                self.known[self._name(reading)] = marks
            count += marks.total()
        return count

    def save(self) -> None:
        """Write the file.

        Raises:
            StorageError: It cannot be written.
        """
        files = {
            name: [
                {"code": code, "message": message, "count": count}
                for (code, message), count in sorted(marks.items())
            ]
            for name, marks in sorted(self.known.items())
        }
        text = json.dumps({"version": _VERSION, "files": files}, indent=1, ensure_ascii=False) + "\n"
        replace_file(self.file, text.encode())

    def _name(self, reading: Reading) -> str:
        path = Path(reading.path or "-").absolute()
        try:
            return path.relative_to(self.file.parent.absolute()).as_posix()
        except ValueError:
            return path.as_posix()


def _mark(item: Diagnostic) -> tuple[str, str]:
    return item.code, _LINE.sub("line", item.message)


def read_baseline(file: Path) -> Baseline:
    """Read a baseline.

    Raises:
        ConfigError: The file does not exist, or ``--write-baseline`` did not write it.
    """
    if not file.exists():
        raise ConfigError(f"the baseline {file} does not exist", help="--write-baseline writes one")
    try:
        known = _known(read_json(file))
    except UnreadableError as error:
        raise ConfigError(f"{file}: {error.message}") from error
    if known is None:
        raise ConfigError(f"{file} is not a baseline of fsdptool", help="--write-baseline writes one")
    return Baseline(file, known)


def _known(data: Any) -> dict[str, Counter[tuple[str, str]]] | None:
    files = data.get("files") if isinstance(data, dict) and data.get("version") == _VERSION else None
    if not isinstance(files, dict):
        return None
    known: dict[str, Counter[tuple[str, str]]] = {}
    for name, items in files.items():
        marks: Counter[tuple[str, str]] = Counter()
        for item in items if isinstance(items, list) else [None]:
            if not isinstance(item, dict) or not isinstance(item.get("count"), int):
                return None
            marks[str(item.get("code")), str(item.get("message"))] += item["count"]
        known[name] = marks
    return known
