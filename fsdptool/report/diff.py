"""Changes to a file as a diff that ``patch`` and ``git apply`` take."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from fsdptool.formatting import printable, printable_lines

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
    name = printable(name or before.path or "stdin")
    mark = "\ufeff" if before.bom else ""
    lines = difflib.unified_diff(_lines(mark + before.text), _lines(mark + after), f"a/{name}", f"b/{name}")
    return "".join(
        _patch_line(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n", mark)
        for line in lines
    )


def _patch_line(line: str, mark: str) -> str:
    """Return a line that a terminal may show and ``git apply`` still matches: mark and tabs stay."""
    kept = 2 if mark and line[1:2] == mark else 0
    return line[:kept] + "\t".join(printable_lines(part) for part in line[kept:].split("\t"))


def _lines(text: str) -> list[str]:
    """Split at newlines only: ``str.splitlines`` also splits at form feeds and Unicode's separators."""
    pieces = text.split("\n")
    lines = [piece + "\n" for piece in pieces[:-1]]
    return [*lines, pieces[-1]] if pieces[-1] else lines
