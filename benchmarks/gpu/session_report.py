"""Print the rows of a GPU session as tables: memory and time beside the plan, whole runs, paired programs.

``python benchmarks/gpu/session_report.py FOLDER`` reads the ``STAGE.jsonl`` files that ``session.sh`` writes.
Ratios are plan over measurement. Rows of a rehearsal (``--small``) are marked: they compare the CPU with
itself.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def read(folder: Path, stage: str) -> list[dict[str, Any]]:
    """Return the rows of a stage, the last line of each name, in order."""
    path = folder / f"{stage}.jsonl"
    rows: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        row = json.loads(line)
        rows[row["name"]] = row
    return list(rows.values())


def ratio(planned: float | None, measured: float | None) -> str:
    """Return plan over measurement with three decimals."""
    return f"{planned / measured:.3f}" if planned and measured else "–"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def steps(rows: list[dict[str, Any]]) -> str:
    """Return the table of the stages ``memory`` and ``variants``."""
    lines = []
    for row in rows:
        if "error" in row:
            lines.append([row["name"], *["–"] * 6, row["error"]])
            continue
        plan, step, memory = row["plan"], row["step_2"], row["memory"]
        classes = row["operators"]["seconds_by_class"]
        total = sum(classes.values()) or 1.0
        largest = sorted(classes.items(), key=lambda item: -item[1])[:3]
        device = memory.get("driver_used_bytes")
        kernels = row["operators"]["attention_kernels"]
        lines.append(
            [
                row["name"] + (" (rehearsal)" if row["small"] else ""),
                f"{step['allocated_peak_bytes'] / 2**30:.3f}",
                ratio(plan["allocated_peak_bytes"], step["allocated_peak_bytes"]),
                ratio(plan["reserved_peak_bytes"], step["reserved_peak_bytes"]),
                ratio(plan["device_total_bytes"], device),
                f"{row['time']['median_seconds']:.4f}",
                ratio(plan["seconds"].get("compute"), row["time"]["median_seconds"]),
                ", ".join(f"{name} {value / total:.0%}" for name, value in largest)
                + (f"; {kernels[0][:40]}" if kernels else ""),
            ]
        )
    head = (
        "setting",
        "allocated, GiB",
        "allocated",
        "reserved",
        "device",
        "step, s",
        "compute",
        "where time goes",
    )
    return table(head, lines)


def runs(rows: list[dict[str, Any]]) -> str:
    """Return the table of the stage ``train``."""
    lines = []
    for row in rows:
        plan = row.get("plan") or {}
        memory = f"{row['error_percent']:+.2f} %" if row.get("error_percent") is not None else "–"
        mfu = f"{row['mfu']:.1%}" if row.get("mfu") else "–"
        timed = ratio(plan.get("step_seconds"), row.get("median_step_seconds"))
        lines.append([row["name"], row.get("error") or row.get("summary"), memory, timed, mfu])
    return table(
        ("run", "result", "allocated, plan against measurement", "step time, plan / measured", "MFU"), lines
    )


def paired(rows: list[dict[str, Any]]) -> str:
    """Return the table of the stage ``paired``: each program against fsdptool."""
    programs: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if "median_seconds" in row:
            programs.setdefault(row["name"].rsplit(" ", 1)[0], []).append(row)
    own = [row["median_seconds"] for row in programs.get("fsdptool", ())]
    lines = []
    for name, each in programs.items():
        middle = statistics.mean(row["median_seconds"] for row in each)
        peak = max((row["allocated_peak_bytes"] or 0) for row in each)
        against = ratio(statistics.mean(own), middle) if own else "–"
        lines.append(
            [
                name,
                len(each),
                f"{middle:.4f}",
                against,
                f"{peak / 2**30:.2f}",
                all(r["sharded"] for r in each),
            ]
        )
    return table(("program", "turns", "step, s", "fsdptool / it", "allocated, GiB", "sharded"), lines)


def main(folder: Path) -> None:
    """Print all tables."""
    smoke = [[row["name"], row.get("error") or row.get("summary")] for row in read(folder, "smoke")]
    print("## Smoke\n\n" + table(("row", "result"), smoke))
    for stage in ("memory", "variants"):
        print(f"\n## {stage.capitalize()} (plan / measured)\n\n" + steps(read(folder, stage)))
    print("\n## Runs\n\n" + runs(read(folder, "train")))
    print("\n## Paired programs\n\n" + paired(read(folder, "paired")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
