"""Comparisons of plans and runs on the console. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsdptool.formatting import amount
from fsdptool.records.command_documents import ComparedFigure, Comparison, Figure, FigureUnit
from fsdptool.report.plan_words import duration, rate
from fsdptool.report.tables import print_line, print_table


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


def headline(comparison: Comparison) -> str:
    """Return what is compared and, for a run, how far the prediction is off, in one line."""
    sides = f"{comparison.left} and {comparison.right}"
    error = comparison.error_percent
    if error is None:
        return sides
    if round(error, 2) == 0:
        return f"{sides}: the predicted peak equals the measured one to 0.01 %"
    where = "above" if error >= 0 else "below"
    return f"{sides}: the predicted peak is {abs(error):.2f} % {where} the measured one"


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


def figure_cells(row: ComparedFigure) -> tuple[str, str, str, str]:
    """Return a figure's name, both sides and their difference as text."""
    percent = f"{row.percent:+.1f} %" if row.percent is not None else ""
    return row.what, _cell(row.left, row.unit), _cell(row.right, row.unit), percent


_FORMS: Mapping[FigureUnit, Callable[[Any], str]] = {"bytes": amount, "seconds": duration, "rate": rate}


def _cell(value: Figure, unit: FigureUnit) -> str:
    if value is None:
        return "unknown" if unit != "text" else "none"
    return _FORMS[unit](value) if unit in _FORMS else str(value)
