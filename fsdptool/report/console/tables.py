"""Tables, diffs and lines of text, in terminals and pipes alike. NO_COLOR is honoured by rich."""

from __future__ import annotations

import contextlib
import csv
import difflib
import re
import shlex
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, TextIO

from fsdptool.formatting import printable, printable_lines
from fsdptool.records.annotations import key_of
from fsdptool.records.diagnostic import Diagnostic

if TYPE_CHECKING:
    from fsdptool.files.text import SourceText


_SEVERITY_STYLE = {"error": "bold red", "warning": "yellow", "info": "dim"}


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numeric: Sequence[int] = (),
    optional: Sequence[int] = (),
    stream: TextIO | None = None,
) -> None:
    """Print a table of aligned columns, in a terminal and in a pipe alike.

    In a terminal the table is fitted to its width: text wraps between words, optional columns are left out
    and named below the table, and where that is not enough each row becomes a list of its cells. Words are
    never broken. A pipe has no width.

    Args:
        headers: Column names.
        rows: Cells as text.
        numeric: Indices of right-aligned columns.
        optional: Indices of columns that a narrow terminal can do without, the least important first.
        stream: Where to; standard output by default.
    """
    out = stream or sys.stdout
    cells = [tuple(map(printable, row)) for row in (headers, *rows)]
    for line in layout_table(cells, numeric=numeric, optional=optional, width=terminal_width(out)):
        print_line(line.text, style={"header": "bold", "note": "dim"}.get(line.kind), stream=out)


def terminal_width(stream: TextIO) -> int | None:
    """Return the columns of the terminal that a stream writes to; None where it is not a terminal."""
    return shutil.get_terminal_size().columns if stream.isatty() else None


@dataclass(frozen=True, slots=True)
class TableLine:
    """One printed line: column names or a listed row's title, cells, or a note below the table."""

    text: str
    kind: Literal["header", "cells", "note"] = "cells"


_GAP = "  "
_READABLE = 16
"""A column of text that is narrower than this reads as a list of words."""


def layout_table(
    cells: Sequence[Sequence[str]],
    *,
    numeric: Sequence[int] = (),
    optional: Sequence[int] = (),
    width: int | None = None,
) -> list[TableLine]:
    """Return the lines of a table.

    Args:
        cells: The column names, then the rows.
        numeric: Indices of right-aligned columns, whose cells never wrap.
        optional: Indices of columns that may be left out, the least important first.
        width: Columns of the terminal; None: as many as the table needs.
    """
    columns = list(range(len(cells[0])))
    droppable, dropped = list(optional), []
    while True:
        widths = _fit([[row[i] for i in columns] for row in cells], [i in numeric for i in columns], width)
        if widths is not None:
            break
        if not droppable:
            return _listed(cells, width or 0)
        dropped.append(cells[0][droppable[0]])
        columns.remove(droppable.pop(0))
    lines = []
    for number, row in enumerate(cells):
        wrapped = [_wrap(row[i], size) for i, size in zip(columns, widths, strict=True)]
        for level in range(max(map(len, wrapped))):
            parts = [
                text.rjust(size) if i in numeric else text.ljust(size)
                for i, size, part in zip(columns, widths, wrapped, strict=True)
                for text in (part[level] if level < len(part) else "",)
            ]
            lines.append(TableLine(_GAP.join(parts).rstrip(), "cells" if number else "header"))
    if dropped:
        lines.append(TableLine(f"not shown at this width: {', '.join(dropped)}", "note"))
    return lines


def _fit(cells: Sequence[Sequence[str]], numeric: Sequence[bool], width: int | None) -> list[int] | None:
    """Return column widths that fit, the widest column narrowed first; None where words are too long.

    Figures never wrap; the name of their column does.
    """
    whole = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    if width is None:
        return whole
    least = [
        max(
            cell_len(cell) if fixed and number else max(map(cell_len, _BREAK.split(cell)), default=0)
            for number, cell in enumerate(column)
        )
        for fixed, column in zip(numeric, zip(*cells, strict=True), strict=True)
    ]
    room = width - len(_GAP) * (len(whole) - 1)
    if sum(least) > room:
        return None
    readable = [
        low if fixed else max(low, min(size, _READABLE))
        for low, size, fixed in zip(least, whole, numeric, strict=True)
    ]
    if sum(readable) > room:
        return None
    while sum(whole) > room:
        spare = [size - low for size, low in zip(whole, readable, strict=True)]
        widest = max((i for i, left in enumerate(spare) if left), key=lambda i: whole[i])
        whole[widest] -= 1
    return whole


def _listed(cells: Sequence[Sequence[str]], width: int) -> list[TableLine]:
    """Return every row as a list of its cells: the first one as a title, then one line for each other."""
    names = cells[0]
    pad = max(map(cell_len, names[1:]), default=0) + 1
    lines = []
    for row in cells[1:]:
        lines += [TableLine(text, "header") for text in _wrap(row[0], width)]
        for name, cell in zip(names[1:], row[1:], strict=True):
            if cell:
                room = max(width - pad - 2 * len(_GAP), _READABLE)
                texts = _wrap(cell, room)
                if max(map(cell_len, texts)) > room:
                    # A path has a line of its own, from further left.
                    lines += [TableLine(f"{_GAP}{name}"), *(TableLine(f"{_GAP * 2}{text}") for text in texts)]
                    continue
                lines += [
                    TableLine(f"{_GAP}{(name if not level else '').ljust(pad)}{_GAP}{text}".rstrip())
                    for level, text in enumerate(texts)
                ]
    return lines


def _wrap(text: str, width: int, indent: int = 0) -> list[str]:
    """Return text in lines of at most ``width`` columns, broken between words only.

    A figure stays with its unit. Lines after the first are indented.
    """
    lead = len(text) - len(text.lstrip(" "))
    lines, line = [], " " * lead
    for word in _BREAK.split(text[lead:]):
        longer = f"{line} {word}" if line.strip() else line + word
        if line.strip() and cell_len(longer) > width:
            lines.append(line.rstrip())
            line = " " * indent + word
        else:
            line = longer
    return [*lines, line.rstrip()]


_BREAK = re.compile(r" (?!(?:[KMGT]?i?B|s|ms|min|h|%)(?![\w]))")
"""Where a line may end: at a space that does not precede a unit."""


def cell_len(text: str) -> int:
    """Return the columns a text takes in a terminal: two for wide characters, none for colours and marks."""
    if text.isascii() and "\x1b" not in text:
        return len(text)
    text = _COLOUR.sub("", text)
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


_COLOUR = re.compile("\x1b\\[[0-9;]*m")


def print_line(text: str = "", *, style: str | None = None, stream: TextIO | None = None) -> None:
    """Print one line. In a terminal it may be styled, and what is too long continues on further lines.

    A line of standard error comes after what was printed before it, in one log of both streams, too.
    """
    out = stream or sys.stdout
    if out is sys.stderr:
        # The status of a reader that went away is decided where the answer itself is written.
        with contextlib.suppress(OSError):
            sys.stdout.flush()
    text, width = printable(text), terminal_width(out)
    if width is not None:
        text = "\n".join(wrap_line(text, width))
    if style is None or width is None:
        out.write(text + "\n")
        return
    from rich.console import Console
    from rich.text import Text

    Console(file=out, soft_wrap=True).print(Text(text, style=style))


_LABEL = re.compile(r" *(?:\S+(?: \S+)* {2,})?")
"""The indentation of a line, with the label that two or more spaces separate from the rest."""


def wrap_line(text: str, width: int) -> list[str]:
    """Return a line as lines of at most ``width`` columns, broken between words only.

    Further lines begin below the text that follows a label, or are indented by two spaces more than the
    first. A word that is longer than the width keeps a line of its own.
    """
    if cell_len(text) <= width:
        return [text]
    lead = len(text) - len(text.lstrip(" "))
    label = _LABEL.match(text)
    labelled = label is not None and lead < len(label[0]) <= width // 2
    indent = len(label[0]) if label is not None and labelled else lead + 2
    return _wrap(text, width, indent)


def print_lines(text: str, *, stream: TextIO | None = None) -> None:
    """Print a text of several lines, each as :func:`print_line` does."""
    for line in text.removesuffix("\n").split("\n"):
        print_line(line, stream=stream)


def print_command(label: str, command: Sequence[str]) -> None:
    """Print a command to copy. In a terminal that is too narrow for it, it continues after a backslash."""
    width = terminal_width(sys.stdout)
    if width is None:
        print_line(f"{label}: {shlex.join(command)}")
        return
    # An option stays with its value.
    groups: list[str] = []
    for part in command:
        follows = groups and not part.startswith("-") and groups[-1].startswith("-") and " " not in groups[-1]
        if follows:
            groups[-1] += f" {shlex.quote(part)}"
        else:
            groups.append(shlex.quote(part))
    line = f"{label}:"
    for group in groups:
        if cell_len(f"{line} {group} \\") > width:
            sys.stdout.write(f"{printable(line)} \\\n")
            line = "   "
        line = f"{line} {group}"
    sys.stdout.write(f"{printable(line)}\n")


def print_rows(
    headers: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    separator: Literal["tsv", "csv"],
    stream: TextIO | None = None,
) -> None:
    """Print rows for programs: figures in bytes and seconds, an empty cell for what is unknown.

    Args:
        headers: Column names.
        rows: Values; None is an empty cell.
        separator: ``csv`` quotes as RFC 4180 says; ``tsv`` separates by tabs.
        stream: Where to; standard output by default.
    """
    delimiter = "\t" if separator == "tsv" else ","
    writer = csv.writer(stream or sys.stdout, delimiter=delimiter, lineterminator="\n")
    writer.writerow(headers)
    for row in rows:
        writer.writerow(["" if value is None else printable(str(value)) for value in row])


def print_findings(diagnostics: Iterable[Diagnostic]) -> None:
    """Print diagnostics: severity, message, code, and what to do on the next line."""
    for item in diagnostics:
        print_line(f"{item.severity}: {item.message} [{item.code}]", style=_SEVERITY_STYLE[item.severity])
        if item.help:
            print_line(f"    {item.help}", style="dim" if item.severity == "info" else None)


def print_records(records: Sequence[Any], separator: Literal["tsv", "csv"]) -> None:
    """Print records of one class as rows, with their JSON keys as column names."""
    shown = fields(records[0]) if records else ()
    rows = [[_joined(getattr(item, field.name)) for field in shown] for item in records]
    print_rows([key_of(field) for field in shown], rows, separator=separator)


def _joined(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value


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
