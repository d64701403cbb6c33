"""The rows of a GPU session by stage, in order of value, and the process that runs some of them.

``python benchmarks/gpu/rows.py STAGE FOLDER [--small] NAME...`` writes ``FOLDER/0.json`` for the first name,
and so on, part by part; ``done`` is the last key of each.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "memory")]

STAGES = ("smoke", "memory", "train", "paired", "variants")


@dataclass(frozen=True, slots=True)
class Row:
    """One row: ``action`` runs in a process of its own, at most ``limit`` seconds.

    Attributes:
        stage, name: Its key in the results.
        limit: Seconds after which it is ended. What it has written until then is kept.
        action: Called with a function that adds keys to the result, the working folder, and whether to cut
            everything down for a CPU.
        environment: Variables of the process.
        model: Rows of one stage, model and environment share a process: imports take longer than a row.
    """

    stage: str
    name: str
    limit: float
    action: Callable[[Callable[[Mapping[str, Any]], None], Path, bool], None]
    environment: Mapping[str, str] = field(default_factory=dict)
    model: str | None = None

    def joins(self, other: Row) -> bool:
        """Say whether the row runs in the process of another one."""
        return self.model is not None and (self.stage, self.model, self.environment) == (
            other.stage,
            other.model,
            other.environment,
        )


def rows_of(stage: str) -> list[Row]:
    """Return the rows of a stage, the most valuable first."""
    if stage == "smoke":
        import probe_rows

        return [Row(stage, name, limit, action) for name, (limit, action) in probe_rows.ROWS.items()]
    if stage == "train":
        import run_rows

        return [Row(stage, name, limit, action) for name, (limit, action) in run_rows.ROWS.items()]
    if stage == "paired":
        import paired_rows

        return [Row(stage, name, 120.0, action) for name, action in paired_rows.rows().items()]
    return _step_rows(stage)


def _step_rows(stage: str) -> list[Row]:
    """Return the rows of steps over fake ranks."""
    import step_settings
    from step_rows import StepRow, run

    def action(row: StepRow) -> Any:
        return lambda write, folder, small: run(row, write, small=small)

    limit = 75.0 if stage == "memory" else 120.0
    listed = step_settings.MEMORY if stage == "memory" else step_settings.VARIANTS
    return [
        Row(stage, row.setting.name, limit, action(row), row.environment, row.setting.reference)
        for row in listed
    ]


def main() -> int:
    """Run rows, one after another; one that fails leaves its error."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("names", nargs="+")
    options = parser.parse_args()
    os.environ["FSDPTOOL_CACHE"] = os.environ.get("FSDPTOOL_CACHE", str(options.folder / "cache"))
    rows = {row.name: row for row in rows_of(options.stage)}
    for index, name in enumerate(options.names):
        _run(rows[name], options.folder, options.folder / f"{index}.json", small=options.small)
    return 0


def _run(row: Row, folder: Path, target: Path, *, small: bool) -> None:
    result: dict[str, Any] = {}

    def write(part: Mapping[str, Any]) -> None:
        result.update(part)
        temporary = target.with_suffix(".part")
        temporary.write_text(json.dumps(result), encoding="utf-8")
        temporary.replace(target)

    try:
        row.action(write, folder, small)
    except Exception as error:
        lines = traceback.format_exc().splitlines()
        write({"error": f"{type(error).__name__}: {error}"[:300], "log": lines[-25:]})
    write({"done": True})


if __name__ == "__main__":
    sys.exit(main())
