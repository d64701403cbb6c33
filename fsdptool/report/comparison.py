"""Comparisons of plans and runs on the console. Reads the documents, decides nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fsdptool.formatting import amount
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


def headline(document: Mapping[str, Any]) -> str:
    """Return what is compared and, for a run, how far the prediction is off, in one line."""
    sides = f"{document['left']} and {document['right']}"
    error = document["error_percent"]
    if error is None:
        return sides
    if round(error, 2) == 0:
        return f"{sides}: the predicted peak equals the measured one to 0.01 %"
    where = "above" if error >= 0 else "below"
    return f"{sides}: the predicted peak is {abs(error):.2f} % {where} the measured one"


def print_comparison(document: Mapping[str, Any], *, explain: bool = False) -> None:
    """Print a comparison document: figures, then phases; ``explain`` adds every moment of a step."""
    run = document["kind"] == "run"
    heads = ("predicted", "measured", "measured over predicted") if run else ("left", "right", "difference")
    print_line(headline(document), style="bold")
    print_line()
    print_table(("", *heads), [figure_cells(row) for row in document["rows"]], numeric=(1, 2, 3))
    every = document["moments"]
    moments = every if run or explain else [row for row in every if row["what"].startswith("phase ")]
    if moments:
        print_line()
        title = "measured" if run else "moment"
        print_table((title, *heads), [figure_cells(row) for row in moments], numeric=(1, 2, 3))
    if len(every) > len(moments):
        print_line(f"--explain shows {len(every) - len(moments)} moments of a step", style="dim")
    for note in document["notes"]:
        print_line(f"note: {note}")


def figure_cells(row: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Return a figure's name, both sides and their difference as text."""
    percent = f"{row['percent']:+.1f} %" if row["percent"] is not None else ""
    return row["what"], _cell(row["left"], row["unit"]), _cell(row["right"], row["unit"]), percent


def _cell(value: Any, unit: str) -> str:
    if value is None:
        return "unknown" if unit != "text" else "none"
    forms = {"bytes": amount, "seconds": duration, "rate": rate}
    return forms[unit](value) if unit in forms else str(value)
