"""Unified diffs."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fsdptool.files.text import SourceText


def unified(before: SourceText, after: str, name: str | None = None) -> str:
    """Return what ``patch`` would do to a file, empty when nothing changes.

    Args:
        before: The file as it was read; its byte-order mark is part of the first line.
        after: Its new text, without the mark.
        name: What to call it; by default its path, or ``stdin``.
    """
    if before.text == after:
        return ""
    name = name or before.path or "stdin"
    mark = "\ufeff" if before.bom else ""
    lines = difflib.unified_diff(_lines(mark + before.text), _lines(mark + after), f"a/{name}", f"b/{name}")
    return "".join(
        line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines
    )


def _lines(text: str) -> list[str]:
    """Split at newlines only: ``str.splitlines`` also splits at form feeds and Unicode's separators."""
    pieces = text.split("\n")
    lines = [piece + "\n" for piece in pieces[:-1]]
    return [*lines, pieces[-1]] if pieces[-1] else lines
