"""Published measurements: the page and the shipped ranges say what the committed results say."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from fsdptool.planning.hardware import find_gpu, machine_for

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "planning" / "published.py"))


def test_the_page_shows_every_row_of_the_results(script: dict[str, Any]) -> None:
    block = script["BLOCK"].search(script["DOCS"].read_text(encoding="utf-8"))
    assert block is not None
    assert block[0].removeprefix(block[1]).removesuffix(block[2]) == script["table"]()
    results = json.loads(script["RESULTS"].read_text(encoding="utf-8"))["rows"]
    assert list(results) == [row["id"] for row in script["read_rows"]()]


def test_shipped_ranges_are_those_of_the_results(script: dict[str, Any]) -> None:
    results = json.loads(script["RESULTS"].read_text(encoding="utf-8"))
    found = script["ranges"](results["rows"])
    assert found == {name: tuple(ends) for name, ends in results["throughput_range"].items()}
    shipped = {
        machine_for(find_gpu(name).gpu).architecture: machine_for(find_gpu(name).gpu).throughput_range
        for name in ("H100-80GB-SXM", "A100-80GB-SXM")
    }
    assert shipped == found


def test_the_shipped_range_of_slack_is_that_of_the_results(script: dict[str, Any]) -> None:
    results = json.loads(script["RESULTS"].read_text(encoding="utf-8"))
    found = script["slack"](results["rows"])
    assert found == results["slack"]
    shipped = machine_for(find_gpu("H100-80GB-SXM").gpu)
    assert shipped.slack_range == (found["least"], found["most"])
    assert shipped.slack_rows == len(found["rows"])


def test_every_row_that_misses_says_why(script: dict[str, Any]) -> None:
    results = json.loads(script["RESULTS"].read_text(encoding="utf-8"))["rows"]
    for row in script["read_rows"]():
        for what, pair in results[row["id"]].items():
            if isinstance(pair, dict) and "ratio" in pair:
                bound = 0.2 if what == "tokens_per_second_and_gpu" else 0.05
                assert abs(pair["ratio"] - 1) <= bound or row.get("miss"), (row["id"], what)
