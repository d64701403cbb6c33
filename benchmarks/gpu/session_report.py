"""Print the rows of a GPU session as tables: memory and time beside the plan, whole runs, paired programs.

``python benchmarks/gpu/session_report.py FOLDER`` reads the ``STAGE.jsonl`` files that ``session.sh`` writes.
Ratios are plan over measurement. Rows of a rehearsal (``--small``) are marked: they compare the CPU with
itself.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any


def read(folder: Path, stage: str) -> list[dict[str, Any]]:
    """Return the rows of a stage, the last line of each name, in order; cut-off lines are left out."""
    path = folder / f"{stage}.jsonl"
    rows: dict[str, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # time ended while it was written
        rows[row["name"]] = row
    return list(rows.values())


def failure(row: Mapping[str, Any]) -> str:
    """Return why a row ended early, with the last line that it printed; empty where it did not."""
    if "error" not in row:
        return ""
    last = next((line.strip() for line in reversed(row.get("log", ())) if line.strip()), "")
    return f"{row['error']}: {last[:100]}" if last else str(row["error"])


def gib(size: float | None) -> str:
    """Return bytes in GiB; what was not measured is a dash."""
    return f"{size / 2**30:.3f}" if size else "–"


def ratio(planned: float | None, measured: float | None) -> str:
    """Return plan over measurement with three decimals."""
    return f"{planned / measured:.3f}" if planned and measured else "–"


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(map(str, row)) + " |" for row in rows])


def steps(rows: list[dict[str, Any]]) -> str:
    """Return the table of the stages ``memory`` and ``variants``; what ended early shows what it has."""
    lines = []
    for row in rows:
        plan, step = row.get("plan", {}), row.get("step_2", {})
        seconds = row.get("time", {}).get("median_seconds")
        allocated, reserved = step.get("allocated_peak_bytes"), step.get("reserved_peak_bytes")
        lines.append(
            [
                row["name"] + (" (rehearsal)" if row["small"] else ""),
                gib(allocated),
                ratio(plan.get("allocated_peak_bytes"), allocated),
                ratio(plan.get("reserved_peak_bytes"), reserved) + _inside(plan, reserved),
                ratio(plan.get("device_total_bytes"), row.get("memory", {}).get("driver_used_bytes")),
                f"{seconds:.4f}" if seconds else "–",
                ratio(plan.get("seconds", {}).get("compute"), seconds),
                "; ".join(part for part in (*_where(row.get("operators")), failure(row)) if part),
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


def _inside(plan: Mapping[str, Any], reserved: float | None) -> str:
    """Say whether the measured reserved peak lies in the range that was planned, if there is one."""
    ends = plan.get("reserved_range_bytes")
    if not ends or not reserved:
        return ""
    return " (in range)" if ends[0] <= reserved <= ends[1] else " (out of range)"


def _where(operators: Mapping[str, Any] | None) -> Iterator[str]:
    """Yield the three costliest classes of operators, and the attention kernel."""
    if operators is None:
        return
    classes = operators["seconds_by_class"]
    total = sum(classes.values()) or 1.0
    largest = sorted(classes.items(), key=lambda item: -item[1])[:3]
    yield ", ".join(f"{name} {value / total:.0%}" for name, value in largest)
    yield from (kernel[:40] for kernel in operators["attention_kernels"][:1])


def runs(rows: list[dict[str, Any]]) -> str:
    """Return the table of the stage ``train``."""
    lines = []
    for row in rows:
        plan = row.get("plan") or {}
        memory = f"{row['error_percent']:+.2f} %" if row.get("error_percent") is not None else "–"
        mfu = f"{row['mfu']:.1%}" if row.get("mfu") else "–"
        timed = ratio(plan.get("step_seconds"), row.get("median_step_seconds"))
        lines.append([row["name"], failure(row) or row.get("summary", "–"), memory, timed, mfu])
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
                gib(peak),
                all(r["sharded"] for r in each),
            ]
        )
    lines += [[row["name"], 0, "–", "–", "–", failure(row)] for row in rows if "error" in row]
    return table(("program", "turns", "step, s", "fsdptool / it", "allocated, GiB", "sharded"), lines)


def main(folder: Path) -> None:
    """Print all tables."""
    smoke = [
        [row["name"], "; ".join(filter(None, (row.get("summary"), failure(row))))]
        for row in read(folder, "smoke")
    ]
    print("## Smoke\n\n" + table(("row", "result"), smoke))
    for stage in ("memory", "variants"):
        print(f"\n## {stage.capitalize()} (plan / measured)\n\n" + steps(read(folder, stage)))
    print("\n## Runs\n\n" + runs(read(folder, "train")))
    print("\n## Paired programs\n\n" + paired(read(folder, "paired")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
