"""Judging files for ``validate``: the document of the contract, and the verdict's numbers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdptool.config.reading import Reading
from fsdptool.errors import ConfigError, ExitCode
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.document import envelope


@dataclass(frozen=True, slots=True)
class Verdict:
    """All files of one call."""

    readings: tuple[Reading, ...]

    @property
    def errors(self) -> int:
        """Number of error findings."""
        return sum(len(reading.errors) for reading in self.readings)

    @property
    def warnings(self) -> int:
        """Number of warning findings."""
        return sum(item.severity == "warning" for reading in self.readings for item in reading.diagnostics)

    @property
    def fixable(self) -> int:
        """Number of errors and warnings that a fix removes."""
        return sum(
            item.fix is not None and item.severity != "info"
            for reading in self.readings
            for item in reading.diagnostics
        )

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 1 for an error (or a warning under ``strict``), else 0."""
        return int(ExitCode.FINDINGS if self.errors or (strict and self.warnings) else ExitCode.CLEAN)

    def document(self) -> dict[str, Any]:
        """Return the document of schema ``validate``."""
        first = self.readings[0].consumer if self.readings else None
        digests = [reading.source.digest if reading.source else None for reading in self.readings]
        body = {
            "consumer": {"name": first.name, "version": first.version} if first else None,
            "files": [file_document(reading) for reading in self.readings],
            "summary": {"errors": self.errors, "warnings": self.warnings, "fixable": self.fixable},
        }
        return envelope("validate", digests, body)


def file_document(reading: Reading) -> dict[str, Any]:
    """Return one file's part of the document."""
    return {
        "path": reading.path,
        "digest": f"sha256:{reading.source.digest}" if reading.source else None,
        "dialect": reading.dialect,
        "consumer": {"name": reading.consumer.name, "version": reading.consumer.version},
        "fsdp_version": reading.version,
        "status": reading.status,
        "effective": [
            {"key": item.key, "value": item.value, "origin": item.origin, "line": item.line}
            for item in reading.effective
        ],
        "ignored": [
            {"key": item.key, "value": _json(item.value), "line": item.line, "reason": item.reason}
            for item in reading.ignored
        ],
        "findings": [finding(item) for item in reading.diagnostics],
        "suppressed": [finding(item) for item in reading.suppressed],
    }


def finding(item: Diagnostic) -> dict[str, Any]:
    """Return a finding as plain data."""
    fix = None
    if item.fix is not None:
        fix = {
            "safe": item.fix.safe,
            "description": item.fix.description,
            "edits": [{"start": edit.start, "end": edit.end, "text": edit.text} for edit in item.fix.edits],
        }
    return {
        "code": item.code,
        "severity": item.severity,
        "line": item.line,
        "column": item.column,
        "end_line": item.end_line,
        "end_column": item.end_column,
        "message": item.message,
        "help": item.help,
        "fix": fix,
    }


def _json(value: Any) -> Any:
    if (isinstance(value, float) and value != value) or value in (float("inf"), float("-inf")):
        return str(value)
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value)


def expand(paths: Iterable[Path]) -> dict[Path, bool]:
    """Return the files to read, each once, and whether it was named itself (not found in a folder).

    A folder stands for its YAML and JSON files; names that begin with a dot are passed over, as are
    the folders of installed packages.

    Raises:
        ConfigError: A folder holds no such file.
    """
    files: dict[Path, bool] = {}
    for path in paths:
        if not path.is_dir():
            files[path] = True
            continue
        found = sorted(_configurations(path))
        if not found:
            raise ConfigError(f"there is no YAML or JSON file in {path}", help="name the files")
        for item in found:
            files.setdefault(item, False)
    return files


def _configurations(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        # Not entered at all: a repository's .git holds many times more files than the project.
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _INSTALLED]
        for name in names:
            item = Path(place, name)
            known = not name.startswith(".") and item.suffix.lower() in (".yaml", ".yml", ".json")
            if known and item.is_file():
                yield item


_INSTALLED = ("node_modules", "site-packages")


def found_by_chance(reading: Reading) -> Reading:
    """Return the reading of a file that nobody named: what is no configuration of ours is a warning."""
    if not any(item.code in _NOT_OURS for item in reading.diagnostics):
        return reading
    diagnostics = tuple(
        replace(item, severity="warning") if item.code in _NOT_OURS else item for item in reading.diagnostics
    )
    return replace(reading, diagnostics=diagnostics)


_NOT_OURS = ("FSD107", "FSD109", "FSD110")


def explain_document(reading: Reading) -> Mapping[str, Any]:
    """Return the document of schema ``explain``: one file's effective settings with their origins."""
    digest = reading.source.digest if reading.source else None
    return envelope("explain", digest, file_document(reading), diagnostics=reading.diagnostics)
