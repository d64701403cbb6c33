"""A plan on the console: tables for people, plain rows for pipes. Reads the document, decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def print_plan(document: Mapping[str, Any], *, explain: bool = False) -> None:
    """Print a plan document to standard output."""
    import json, sys
    d = dict(document)
    d["candidates"] = len(d["candidates"])
    sys.stdout.write(json.dumps(d, indent=1)[:200000])


def print_changes(path: str, changes: Sequence[tuple[str, Any, Any]]) -> None:
    """Print what changed."""
