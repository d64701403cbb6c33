"""Tables and lines of text, in terminals and pipes alike. NO_COLOR is honoured by rich."""

from __future__ import annotations

import csv
import shutil
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TextIO

from fsdptool.formatting import printable

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

    In a terminal the table is fitted to its width: text wraps between words, optional columns are left out,
    and where that is not enough each row becomes a list of its cells. Words are never broken. A pipe has no
    width.

    Args:
        headers: Column names.
        rows: Cells as text.
        numeric: Indices of right-aligned columns.
        optional: Indices of columns that a narrow terminal can do without, the least important first.
        stream: Where to; standard output by default.
    """
    out = stream or sys.stdout
    width = shutil.get_terminal_size().columns if out.isatty() else None
    cells = [tuple(map(printable, row)) for row in (headers, *rows)]
    lines = layout_table(cells, numeric=numeric, optional=optional, width=width)
    for number, line in enumerate(lines):
        print_line(
            line.text, style="bold" if line.header and (number == 0 or line.listed) else None, stream=out
        )


@dataclass(frozen=True, slots=True)
class TableLine:
    """One printed line: ``header`` for the column names, ``listed`` where rows are lists of their cells."""

    text: str
    header: bool = False
    listed: bool = False


_GAP = "  "


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
        numeric: Indices of right-aligned columns, which never wrap.
        optional: Indices of columns that may be left out, the least important first.
        width: Columns of the terminal; None: as many as the table needs.
    """
    columns = list(range(len(cells[0])))
    droppable = list(optional)
    while True:
        widths = _fit([[row[i] for i in columns] for row in cells], [i in numeric for i in columns], width)
        if widths is not None:
            break
        if not droppable:
            return _listed(cells, width or 0)
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
            lines.append(TableLine(_GAP.join(parts).rstrip(), header=number == 0))
    return lines


def _fit(cells: Sequence[Sequence[str]], numeric: Sequence[bool], width: int | None) -> list[int] | None:
    """Return column widths that fit, the widest text column narrowed first; None where words are too long."""
    whole = [max(map(cell_len, column)) for column in zip(*cells, strict=True)]
    if width is None:
        return whole
    least = [
        size if fixed else max(max(map(cell_len, cell.split()), default=0) for cell in column)
        for size, fixed, column in zip(whole, numeric, zip(*cells, strict=True), strict=True)
    ]
    room = width - len(_GAP) * (len(whole) - 1)
    if sum(least) > room:
        return None
    # A column of text that is narrower than this reads as a list of words.
    readable = [max(low, min(size, 16)) for low, size in zip(least, whole, strict=True)]
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
        lines += [TableLine(text, header=True, listed=True) for text in _wrap(row[0], width)]
        for name, cell in zip(names[1:], row[1:], strict=True):
            if cell:
                texts = _wrap(cell, max(width - pad - 4, 16))
                lines += [
                    TableLine(f"{_GAP}{(name if not level else '').ljust(pad)}{_GAP}{text}".rstrip())
                    for level, text in enumerate(texts)
                ]
    return lines


def _wrap(text: str, width: int) -> list[str]:
    """Return text in lines of at most ``width`` columns, broken between words only."""
    lines, line = [], ""
    for word in text.split(" "):
        longer = f"{line} {word}" if line else word
        if line and cell_len(longer) > width:
            lines.append(line)
            line = word
        else:
            line = longer
    return [*lines, line]


def cell_len(text: str) -> int:
    """Return the columns a text takes in a terminal: two for wide characters, none for combining ones."""
    return sum(
        0 if unicodedata.combining(letter) else 2 if unicodedata.east_asian_width(letter) in "WF" else 1
        for letter in text
    )


def print_line(text: str = "", *, style: str | None = None, stream: TextIO | None = None) -> None:
    """Print one line, styled in a terminal only."""
    out = stream or sys.stdout
    text = printable(text)
    if style is None or not out.isatty():
        out.write(text + "\n")
        return
    from rich.console import Console
    from rich.text import Text

    Console(file=out, soft_wrap=True).print(Text(text, style=style))


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


def print_finding(severity: str, code: str, message: str, help: str | None) -> None:
    """Print one diagnostic: severity, code, message, and what to do on the next line."""
    print_line(f"{severity}: {message} [{code}]", style=_SEVERITY_STYLE.get(severity))
    if help:
        print_line(f"    {help}", style="dim" if severity == "info" else None)


def count(value: int) -> str:
    """Return a parameter count as a person reads it, for example ``8.03 B``."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 100 * size else f"{value / size:.0f} {unit}"
    return str(value)
