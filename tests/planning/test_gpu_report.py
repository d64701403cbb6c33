"""The report of a GPU session: complete rows, rows that ended early, and a line that was cut off."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu" / "session_report.py"
GIB = 2**30
PLAN = {
    "allocated_peak_bytes": 9 * GIB,
    "reserved_peak_bytes": 12 * GIB,
    "reserved_range_bytes": [11 * GIB, 14 * GIB],
    "device_total_bytes": 13 * GIB,
    "seconds": {"compute": 0.3},
}
COMPLETE = {
    "name": "complete",
    "small": False,
    "plan": PLAN,
    "step_2": {"allocated_peak_bytes": 10 * GIB, "reserved_peak_bytes": 12 * GIB},
    "memory": {"driver_used_bytes": 13 * GIB},
    "time": {"median_seconds": 0.5},
    "operators": {"seconds_by_class": {"matmul": 0.3, "copy": 0.1}, "attention_kernels": ["flash_fwd"]},
}
EARLY = {
    "name": "early",
    "small": True,
    "plan": PLAN,
    "step_2": {"allocated_peak_bytes": 10 * GIB, "reserved_peak_bytes": 15 * GIB},
    "error": "ended after 75 s",
    "log": ["", "compiling", ""],
}
PAIRED = [
    {
        "name": "fsdptool 1",
        "median_seconds": 0.4,
        "allocated_peak_bytes": GIB,
        "sharded": True,
    },
    {"name": "bare 1", "median_seconds": 0.5, "allocated_peak_bytes": None, "sharded": True},
    {"name": "trainer 1", "error": "exit status 1", "log": ["ImportError: datasets"]},
]


@pytest.fixture
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT))


def test_rows_that_ended_early_show_what_they_measured(
    tmp_path: Path, script: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [json.dumps(COMPLETE), json.dumps(EARLY), '{"name": "cut o']
    (tmp_path / "memory.jsonl").write_text("\n".join(lines))
    (tmp_path / "paired.jsonl").write_text("\n".join(map(json.dumps, PAIRED)) + "\n")
    script["main"](tmp_path)
    text = capsys.readouterr().out
    assert "| complete | 10.000 | 0.900 | 1.000 (in range) | 1.000 | 0.5000 | 0.600 |" in text
    assert "| matmul 75%, copy 25%; flash_fwd |" in text
    assert "| early (rehearsal) | 10.000 | 0.900 | 0.800 (out of range) | – | – | – |" in text
    assert "| ended after 75 s: compiling |" in text
    assert "cut o" not in text
    assert "| fsdptool | 1 | 0.4000 | 1.000 | 1.000 | True |" in text
    assert "| bare | 1 | 0.5000 | 0.800 | – | True |" in text
    assert "| trainer 1 | 0 | – | – | – | exit status 1: ImportError: datasets |" in text
