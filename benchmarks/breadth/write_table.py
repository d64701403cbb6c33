"""Write the table of ``docs/explanation/breadth.md`` from ``benchmarks/results/breadth.json``.

python benchmarks/breadth/write_table.py
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parents[1] / "results" / "breadth.json"
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "breadth.md"
BEGIN, END = "<!-- breadth: begin (benchmarks/breadth/write_table.py) -->", "<!-- breadth: end -->"

Row = Mapping[str, Any]


def good(row: Row, stage: str) -> bool:
    """Say whether a class passed a stage."""
    return bool(row.get(stage, {}).get("good"))


def error(row: Row, stage: str = "step") -> float | None:
    """Return the prediction's error against rank 0's measured peak, in percent."""
    if not good(row, "plan") or not good(row, stage):
        return None
    return 100 * (float(row["plan"]["predicted_bytes"]) / float(row[stage]["measured_bytes"][0]) - 1)


def error_without_scratch(row: Row) -> float | None:
    """Return the error without oneDNN's scratch where that was measured, else :func:`error`."""
    return error(row, "scratch") if good(row, "scratch") else error(row)


def summary(rows: Mapping[str, Row]) -> list[str]:
    """Return the counts by group and the accuracy."""
    lines = [
        "| group | classes | trained by transformers alone | planned with known activations |"
        " trained on two ranks | median error | worst error | worst without oneDNN's scratch |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for group in [*dict.fromkeys(row["group"] for row in rows.values()), "all"]:
        part = [row for row in rows.values() if group in (row["group"], "all")]
        usable = [row for row in part if good(row, "plain")]
        errors = [abs(e) for row in usable if (e := error(row)) is not None]
        plain = [abs(e) for row in usable if (e := error_without_scratch(row)) is not None]
        values = (statistics.median(errors), max(errors), max(plain)) if errors else ()
        figures = [f"{value:.2f} %" for value in values] or ["", "", ""]
        planned, trained = (sum(good(row, stage) for row in usable) for stage in ("plan", "step"))
        cells = [group, str(len(part)), str(len(usable)), str(planned), str(trained), *figures]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def failures(rows: Mapping[str, Row], stage: str) -> Iterable[str]:
    """Yield a table row per class that failed a stage, with the message."""
    for name, row in rows.items():
        result = row.get(stage)
        if result is None or result["good"] or (stage != "plain" and not good(row, "plain")):
            continue
        text = result.get("error") or "; ".join(result.get("unknowns", ()))
        yield f"| {name} | {text.replace('|', '/')[-240:]} |"


def table(rows: Mapping[str, Row]) -> Iterable[str]:
    """Yield a table row per class that transformers alone trains."""
    for name, row in sorted(rows.items()):
        if not good(row, "plain"):
            continue
        plan, step = row.get("plan", {}), row.get("step", {})
        misses = (error(row), error(row, "scratch"))
        predicted = "unknown" if plan else "not run"
        if plan.get("predicted_bytes"):
            predicted = f"{plan['predicted_bytes']:,}"
        measured = f"{step['measured_bytes'][0]:,}" if good(row, "step") else "not measured"
        cells = [
            name,
            row["group"],
            plan.get("objective", ""),
            str(plan.get("units", "")),
            plan.get("precision", ""),
            predicted,
            measured,
        ]
        cells += ["" if miss is None else f"{miss:+.2f} %" for miss in misses]
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    """Write the part of the page between the marks."""
    document = json.loads(RESULT.read_text(encoding="utf-8"))
    rows = document["rows"]
    versions = ", ".join(f"{name} {version}" for name, version in document["libraries"].items())
    lines = [f"Libraries: {versions}.", "", *summary(rows)]
    for title, stage in (
        ("Planned without activations", "plan"),
        ("Not trained on two ranks", "step"),
        ("Not trained by transformers alone, and left out", "plain"),
    ):
        if found := list(failures(rows, stage)):
            lines += ["", f"### {title}", "", "| class | reason |", "|---|---|", *found]
    lines += [
        *("", "### Every class", ""),
        "| class | group | objective | FSDP units | precision | predicted bytes | measured bytes | error |"
        " without oneDNN |",
        *("|---|---|---|---|---|---|---|---|---|", *table(rows), ""),
    ]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"{END}{after}", encoding="utf-8")
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
