"""Run the rows of a GPU session, one process for each model, and keep what each of them says.

``session.sh`` prepares the environment; its comment lists the options. A row's line is a JSON object in
``STAGE.jsonl``: ``name``, ``seconds``, and either the row's own keys or ``error``. Half an hour with a GPU is
short, so nothing that was measured may be lost: lines are synced as they are written, a row that hangs is
ended, and a later call continues where the earlier one stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rows import STAGES, Row, rows_of

HERE = Path(__file__).resolve().parent

_MARGIN = 8.0
"""Seconds kept at the end for a row that has to be ended and for the last line."""


_PATIENCE = 6
"""How much longer a row may take in a rehearsal, on a machine that may be busy with other things."""


def main() -> int:
    """Run the rows that were selected and are missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stages", nargs="+", choices=STAGES, metavar="STAGE")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--seconds", type=float, default=570.0)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--retry", action="store_true")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    out = options.out or Path(os.environ.get("OUT") or HERE.parent / "results" / "gpu")
    deadline = time.monotonic() + options.seconds
    selected = [row for stage in options.stages for row in rows_of(stage) if options.only in row.name]
    if options.list:
        print("\n".join(f"{row.stage:9} {row.limit:4.0f} s  {row.name}" for row in selected))
        return 0
    out.mkdir(parents=True, exist_ok=True)
    failed = 0
    wanted = [
        row for row in selected if row.name not in _present(out / f"{row.stage}.jsonl", retry=options.retry)
    ]
    while wanted:
        group = [row for row in wanted if row is wanted[0] or row.joins(wanted[0])]
        left = deadline - time.monotonic() - _MARGIN
        if left < min(_limit(group[0], options.small), 20.0):
            print(f"time is up before {group[0].name}", flush=True)
            return 3
        for row, result in _run(group, deadline - _MARGIN, small=options.small):
            wanted.remove(row)
            _append(out / f"{row.stage}.jsonl", result)
            failed += "error" in result
            print(f"{result['seconds']:6.1f} s  {row.stage} {row.name}: {_short(result)}", flush=True)
    return 1 if failed else 0


def _limit(row: Row, small: bool) -> float:
    return row.limit * (_PATIENCE if small else 1)


def _present(path: Path, *, retry: bool) -> set[str]:
    """Return the names of the rows that a file holds; the last line of a row counts."""
    if not path.exists():
        return set()
    rows = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue  # a line that was cut off when time ended
        rows[row["name"]] = row
    return {name for name, row in rows.items() if not (retry and "error" in row)}


def _run(rows: list[Row], deadline: float, *, small: bool) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Run rows in one process group of their own; yield the line of each that has ended.

    Rows after one that takes too long, or that ends the process, are left to the caller.
    """
    environment = {**os.environ, **rows[0].environment}
    if small:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(prefix="fsdptool-row-") as name:
        folder = Path(name)
        environment |= {"FSDPTOOL_LOCKS": str(folder / "locks")}
        command = [sys.executable, str(HERE / "rows.py"), rows[0].stage, str(folder)]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, *(["--small"] if small else []), *(row.name for row in rows)],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            for index, row in enumerate(rows):
                began = time.monotonic()
                limit = min(_limit(row, small), deadline - began)
                result = _wait(process, folder / f"{index}.json", began + limit)
                head = {"name": row.name, "seconds": round(time.monotonic() - began, 1), "small": small}
                if row.environment:
                    head["environment"] = dict(row.environment)
                done = result.pop("done", False)
                if not done:
                    status = process.poll()
                    why = f"ended after {limit:.0f} s" if status is None else f"exit status {status}"
                    tail = (folder / "log").read_text(encoding="utf-8", errors="replace")[-3000:]
                    result |= {"error": why, "log": tail.splitlines()[-25:]}
                yield row, {**head, **result}
                if not done:
                    return
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(process: subprocess.Popen[bytes], path: Path, until: float) -> dict[str, Any]:
    """Return what a row has written once it is done, its process has ended, or its time is up."""
    while True:
        ended = process.poll() is not None or time.monotonic() > until
        result = _read(path)
        if ended or "done" in result:
            return result
        time.sleep(0.1)


def _read(path: Path) -> dict[str, Any]:
    """Return what a row has written so far; a row that is ended keeps its finished parts."""
    if not path.exists():
        return {}
    result: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return result


def _append(path: Path, result: dict[str, Any]) -> None:
    # No paths or names of this machine: the file is published.
    text = json.dumps({**result, "python": platform.python_version()})
    for private in (str(HERE.parents[1]), str(Path.home()), tempfile.gettempdir(), platform.node()):
        if len(private) > 3:
            text = text.replace(private, "…")
    with path.open("a", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _short(result: dict[str, Any]) -> str:
    if "error" in result:
        return f"ERROR {result['error']} {' | '.join(result.get('log', [])[-2:])}"[:300]
    return str(result.get("summary", "done"))[:300]


if __name__ == "__main__":
    sys.exit(main())
