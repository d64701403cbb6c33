"""The README says what the committed results say."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_measured_figures_are_the_committed_ones() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "readme" / "measured.py"))
    found = script["BLOCK"].search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert found is not None
    body = found[0].removeprefix(found[1]).removesuffix(found[2])
    assert body == script["table"]()
