"""Tables: drawn in a terminal, tab-separated rows in a pipe. NO_COLOR is honoured by rich."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TextIO

from fsdptool.formatting import printable

_SEVERITY_STYLE = {"error": "bold red", "warning": "yellow", "info": "dim"}


def print_table(
    headers: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    numeric: Sequence[int] = (),
    stream: TextIO | None = None,
) -> None:
    """Print a table: columns drawn for a terminal, one tab-separated row per line otherwise.

    Args:
        headers: Column names.
        rows: Cells as text.
        numeric: Indices of right-aligned columns.
        stream: Where to; standard output by default.
    """
    out = stream or sys.stdout
    rows = [tuple(map(printable, row)) for row in rows]
    if not out.isatty():
        for row in (headers, *rows):
            out.write("\t".join(row) + "\n")
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, header in enumerate(headers):
        table.add_column(header, justify="right" if index in numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(file=out).print(table)


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
