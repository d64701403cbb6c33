"""Unified diffs of text files."""

from __future__ import annotations

import difflib


def unified(before: str, after: str, name: str) -> str:
    """Return the difference of two texts as a unified diff, empty when they are equal."""
    if before == after:
        return ""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines
    )
