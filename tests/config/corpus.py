"""The corpus of real files: other people's, read from a folder that an environment variable names."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

from fsdptool.config import read_settings
from fsdptool.config.migrate import migrate_file, repair
from fsdptool.config.result import Reading

VERDICTS = Path(__file__).with_name("corpus_verdicts.jsonl")


def folder() -> Path | None:
    """Return the folder ``FSDPTOOL_CORPUS`` names, or None where there is none."""
    named = os.environ.get("FSDPTOOL_CORPUS")
    return Path(named) if named else None


def files() -> list[Path]:
    """Return every file of the corpus, sorted by name."""
    place = folder()
    return [] if place is None else sorted(path for path in place.iterdir() if path.name != "INDEX.jsonl")


@cache
def reading(path: Path) -> Reading:
    """Return a file as it is read; once for all tests."""
    return read_settings(path)


@cache
def changed(path: Path, mode: str) -> str | None:
    """Return the text ``as-is``, after a ``fix``, all fixes (``unsafe``) or ``migrate``; None: refused."""
    found = reading(path)
    if found.dialect is None or found.source is None:
        return None
    if mode == "migrate":
        return migrate_file(path).after
    return found.source.text if mode == "as-is" else repair(found, unsafe=mode == "unsafe").after.text


@cache
def expected() -> dict[str, dict[str, Any]]:
    """Return the reviewed verdicts by file name."""
    lines = VERDICTS.read_text(encoding="utf-8").splitlines()
    return {item["file"]: item for item in map(json.loads, lines)}


def verdict(path: Path) -> dict[str, Any]:
    """Return a file's reading in the form the verdicts are committed in: no text of the file, only ours."""
    found = reading(path)
    counted = [item for item in found.diagnostics if item.severity != "info"]
    return {
        "file": path.name,
        "sha256": found.source.digest if found.source else None,
        "dialect": found.dialect,
        "status": found.status,
        "fsdp_version": found.version,
        "errors": [f"{item.line or 0}:{item.code}" for item in counted if item.severity == "error"],
        "warnings": [f"{item.line or 0}:{item.code}" for item in counted if item.severity == "warning"],
        "notes": [f"{item.line or 0}:{item.code}" for item in found.diagnostics if item.severity == "info"],
        "changes": sorted({item.fix.description for item in counted if item.fix is not None}),
        "why": next(
            (item.message for item in counted if item.severity == "error" and item.fix is None), None
        ),
    }
