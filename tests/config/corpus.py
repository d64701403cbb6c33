"""The corpus of real files: other people's, read from a folder that an environment variable names."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from fsdptool.config.reading import Reading

VERDICTS = Path(__file__).with_name("corpus_verdicts.jsonl")


def folder() -> Path | None:
    """Return the folder ``FSDPTOOL_CORPUS`` names, or None where there is none."""
    named = os.environ.get("FSDPTOOL_CORPUS")
    return Path(named) if named else None


def files() -> list[Path]:
    """Return every file of the corpus, sorted by name."""
    place = folder()
    return [] if place is None else sorted(path for path in place.iterdir() if path.name != "INDEX.jsonl")


def expected() -> dict[str, dict[str, Any]]:
    """Return the reviewed verdicts by file name."""
    lines = VERDICTS.read_text(encoding="utf-8").splitlines()
    return {item["file"]: item for item in map(json.loads, lines)}


def verdict(path: Path, reading: Reading) -> dict[str, Any]:
    """Return a reading in the form the verdicts are committed in: no text of the file, only ours."""
    counted = [item for item in reading.diagnostics if item.severity != "info"]
    return {
        "file": path.name,
        "sha256": reading.source.digest if reading.source else None,
        "dialect": reading.dialect,
        "status": reading.status,
        "fsdp_version": reading.version,
        "errors": [f"{item.line or 0}:{item.code}" for item in counted if item.severity == "error"],
        "warnings": [f"{item.line or 0}:{item.code}" for item in counted if item.severity == "warning"],
        "changes": sorted({item.fix.description for item in counted if item.fix is not None}),
        "why": next(
            (item.message for item in counted if item.severity == "error" and item.fix is None), None
        ),
    }
