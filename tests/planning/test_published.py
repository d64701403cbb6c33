"""Published measurements: the page and the shipped ranges say what the committed results say."""

from __future__ import annotations

import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdptool.planning.candidate.memory_range import PublishedPeak, published_peaks, reserved_spread
from fsdptool.planning.candidate.throughput_range import PublishedError, published_errors, throughput_range

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "benchmarks" / "planning" / "published.py"))


@pytest.mark.slow
def test_the_page_shows_every_row_of_the_results(script: dict[str, Any]) -> None:
    block = script["BLOCK"].search(script["DOCS"].read_text(encoding="utf-8"))
    assert block is not None
    assert block[0].removeprefix(block[1]).removesuffix(block[2]) == script["table"]()
    results = json.loads(script["RESULTS"].read_text(encoding="utf-8"))["rows"]
    assert list(results) == [row["id"] for row in script["read_rows"]()]


@pytest.mark.slow
def test_the_shipped_errors_are_those_of_the_results(script: dict[str, Any]) -> None:
    results = json.loads(script["RESULTS"].read_text(encoding="utf-8"))
    assert list(published_errors()) == script["errors"](results["rows"])
    assert results["leave_one_source_out"] == script["coverage"](published_errors())
    assert list(published_peaks()) == script["peaks"](results["rows"])
    assert results["reserved_leave_one_source_out"] == script["reserved_coverage"](published_peaks())


def test_ranges_contain_four_of_five_runs_of_other_sources(script: dict[str, Any]) -> None:
    for judged in (
        script["coverage"](published_errors()),
        script["reserved_coverage"](published_peaks()),
    ):
        assert 0.75 <= judged["share"] <= 0.9
        assert judged["median_error"] <= 0.12


def test_a_range_is_wider_where_less_is_known() -> None:
    known = throughput_range("A100-80GB-SXM", "ampere", "dense", published_errors())
    unknown = throughput_range("RTX-5090-32GB", "blackwell", "dense", published_errors())
    mixture = throughput_range("H100-80GB-SXM", "hopper", "mixture", published_errors())
    assert unknown.fast / unknown.slow > known.fast / known.slow
    assert mixture.fast / mixture.slow > known.fast / known.slow
    assert known.basis.alike > 0
    assert known.basis.nearest[0].endswith("of the plan")


def test_one_source_of_many_runs_counts_for_less_than_many_sources() -> None:
    run = PublishedError("a", "one", "model, 8 x GPU", "GPU", "new", "dense", 1.0)
    others = [replace(run, id=f"a{number}", source=f"a{number}") for number in range(20)]
    slow = [replace(run, id=f"b{number}", source="b", ratio=0.5) for number in range(3)]
    assert throughput_range("GPU", "new", "dense", [*others, *slow]).slow == 1.0
    spread = [replace(item, source=item.id) for item in slow]
    assert throughput_range("GPU", "new", "dense", [*others, *spread]).slow < 0.5


def test_reserved_memory_is_known_less_on_segments_that_do_not_grow() -> None:
    growing = reserved_spread(True, True, "dense", published_peaks())
    fixed = reserved_spread(False, True, "dense", published_peaks())
    assert fixed.high / fixed.low > growing.high / growing.low
    assert growing.high > 1 > growing.low
    assert growing.basis.alike > fixed.basis.alike > 0
    run = PublishedPeak("a", "a", "model, 8 x GPU", True, True, "dense", 1.0)
    runs = [replace(run, id=f"{number}", source=f"{number}", ratio=1 + number / 100) for number in range(11)]
    # All count alike: the share of the runs is the share of their number.
    spread = reserved_spread(True, True, "dense", runs)
    assert spread.share(lambda factor: factor <= 1.05) == pytest.approx(6 / 11)
    assert spread.share(lambda factor: factor <= 0.9) == 0


def test_every_row_that_misses_says_why(script: dict[str, Any]) -> None:
    results = json.loads(script["RESULTS"].read_text(encoding="utf-8"))["rows"]
    for row in script["read_rows"]():
        for what, pair in results[row["id"]].items():
            if isinstance(pair, dict) and "ratio" in pair:
                bound = 0.2 if what in script["SPEEDS"] else 0.05
                assert abs(pair["ratio"] - 1) <= bound or row.get("miss"), (row["id"], what)
