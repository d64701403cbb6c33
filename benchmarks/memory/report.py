"""Compare predictions with the measured figures and write the accuracy tables.

``python benchmarks/memory/report.py [--only TEXT]`` predicts every measured setting again and writes
``benchmarks/results/memory_accuracy.json`` and the tables between the marks in
``docs/explanation/memory-accuracy.md``.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from matrix import FAMILIES
from settings import Setting, inputs_of, read_setting

from fsdptool.memory import footprint, trace
from fsdptool.modeling.resolve import resolve_run
from fsdptool.records.diagnostic import library_versions
from fsdptool.records.plan import Footprint

HERE = Path(__file__).parent
MEASURED = HERE.parent / "results" / "memory_measured.json"
ACCURACY = HERE.parent / "results" / "memory_accuracy.json"
PAGE = HERE.parent.parent / "docs" / "explanation" / "memory-accuracy.md"
BEGIN, END = "<!-- accuracy: begin (benchmarks/memory/report.py) -->", "<!-- accuracy: end -->"


def predict(setting: Setting) -> Footprint:
    """Return the prediction for a row."""
    inputs = inputs_of(setting)
    traced = trace(inputs.spec, resolve_run(inputs.recipe, inputs.settings))
    return footprint(
        traced,
        inputs.units,
        inputs.settings.mesh.resolve(setting.ranks),
        inputs.recipe,
        profile="cpu-gloo" if setting.backend == "gloo" else "cpu-fake",
        teacher=inputs.teacher_units,
    )


def main() -> None:
    """Predict, compare and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help="text the setting's name must contain (without writing files)"
    )
    options = parser.parse_args()
    kept = json.loads(MEASURED.read_text(encoding="utf-8"))
    rows: list[dict[str, Any]] = []
    for name, result in kept["measured"].items():
        if options.only not in name:
            continue
        row: dict[str, Any] = {"name": name, "kept_aside": result["setting"]["kept_aside"]}
        row |= {"backend": result["setting"]["backend"], "family": result["setting"]["family"]}
        if "error" in result:
            rows.append(row | {"error": result["error"]})
            continue
        predicted = predict(read_setting(result["setting"]))
        row["measured_bytes"] = result["peak_bytes"]
        row["predicted_bytes"] = predicted.allocated_peak_bytes
        if predicted.allocated_peak_bytes is not None:
            row["error_percent"] = round(100 * (predicted.allocated_peak_bytes / result["peak_bytes"] - 1), 3)
            row["moment"] = predicted.peak.moment if predicted.peak else ""
        else:
            row["error"] = "; ".join(predicted.unknowns)
        rows.append(row)
        if options.only:
            resting = [m.allocated_bytes for m in predicted.timeline if m.name == "between steps"]
            print(row, "resting", result["resting_bytes"], resting[-1:], "at", round(result["peak_at"], 2))
    if options.only:
        return
    summary = {
        backend: _summary([r for r in rows if r["backend"] == backend]) for backend in ("fake", "gloo")
    }
    document = {
        "instrument": kept["instrument"],
        "hardware": kept["hardware"],
        "measured_with": kept["libraries"],
        "predicted_with": library_versions(),
        "summary": summary,
        "rows": rows,
    }
    ACCURACY.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if PAGE.exists():
        text = PAGE.read_text(encoding="utf-8")
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(before + BEGIN + "\n\n" + _tables(rows, summary) + END + after, encoding="utf-8")
    print(json.dumps(summary, indent=1))
    for row in sorted(rows, key=lambda r: -abs(r.get("error_percent", 1e9)))[:25]:
        print(row)


def _summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for label, part in (
        ("all", rows),
        ("used for tuning", [r for r in rows if not r["kept_aside"]]),
        ("held out", [r for r in rows if r["kept_aside"]]),
    ):
        errors = [abs(r["error_percent"]) for r in part if "error_percent" in r]
        if errors:
            results[label] = {
                "settings": len(errors),
                "median_percent": round(statistics.median(errors), 3),
                "worst_percent": round(max(errors), 3),
                "failed": len(part) - len(errors),
            }
    return results


def _tables(rows: list[dict[str, Any]], summary: dict[str, Any]) -> str:
    lines = []
    for backend in ("fake", "gloo"):
        part = [row for row in rows if row["backend"] == backend]
        if not part:
            continue
        lines += [
            f"## CPU over `{backend}`",
            "",
            "| settings | median | worst | rows |",
            "|---|---|---|---|",
        ]
        for label, figures in summary[backend].items():
            lines.append(
                f"| {label} | {figures['median_percent']:.2f} % | {figures['worst_percent']:.2f} % |"
                f" {figures['settings']} |"
            )
        lines += ["", "| family | rows | median | worst | signed worst |", "|---|---|---|---|---|"]
        for family in FAMILIES:
            errors = [r["error_percent"] for r in part if r["family"] == family and "error_percent" in r]
            if errors:
                size = [abs(error) for error in errors]
                lines.append(
                    f"| {family} ({FAMILIES[family][0]}) | {len(errors)} | {statistics.median(size):.2f} % |"
                    f" {max(size):.2f} % | {max(errors, key=abs):+.2f} % |"
                )
        misses = sorted(part, key=lambda row: -abs(row.get("error_percent", 0.0)))[:8]
        lines += [
            "",
            "The largest misses:",
            "",
            "| setting | measured | predicted | error |",
            "|---|---|---|---|",
        ]
        for row in misses:
            if "error_percent" in row:
                aside = " (held out)" if row["kept_aside"] else ""
                lines.append(
                    f"| {row['name']}{aside} | {row['measured_bytes']:,} | {row['predicted_bytes']:,} |"
                    f" {row['error_percent']:+.2f} % |"
                )
        failed = [row for row in part if "error" in row]
        for row in failed:
            lines.append(f"\nNot measured or not predicted: `{row['name']}`: {row['error'][:160]}")
        lines.append("")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
