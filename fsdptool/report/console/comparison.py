"""Comparisons of plans and runs on the console. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdptool.records.command_documents import Comparison
from fsdptool.report.console.tables import print_line, print_table
from fsdptool.report.summaries import figure_cells, headline


def print_changes(path: str, changes: Sequence[tuple[str, Any, Any]]) -> None:
    """Print what changed since a plan was saved, one row each."""
    if not changes:
        print_line(f"{path}: no changes", style="bold green")
        return
    count = f"{len(changes)} value{'s' if len(changes) != 1 else ''} changed"
    print_line(f"{path}: {count}", style="bold red")
    print_table(("value", "saved", "now"), [(what, _value(a), _value(b)) for what, a, b in changes])


def _value(value: Any) -> str:
    return "none" if value is None else str(value)


def print_comparison(comparison: Comparison, *, explain: bool = False) -> None:
    """Print a comparison comparison: figures, then phases; ``explain`` adds every moment of a step."""
    run = comparison.kind == "run"
    heads = ("predicted", "measured", "measured over predicted") if run else ("left", "right", "difference")
    print_line(headline(comparison), style="bold")
    print_line()
    print_table(("", *heads), [figure_cells(row) for row in comparison.rows], numeric=(1, 2, 3))
    every = comparison.moments
    moments = every if run or explain else [row for row in every if row.what.startswith("phase ")]
    if moments:
        print_line()
        title = "measured" if run else "moment"
        print_table((title, *heads), [figure_cells(row) for row in moments], numeric=(1, 2, 3))
    if len(every) > len(moments):
        print_line(f"--explain shows {len(every) - len(moments)} moments of a step", style="dim")
    for note in comparison.notes:
        print_line(f"note: {note}")
