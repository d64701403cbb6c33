"""The README says what the committed results say."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_measured_figures_are_the_committed_ones() -> None:
    script = runpy.run_path(str(ROOT / "benchmarks" / "readme" / "measured.py"))
    block = script["BLOCK"].search((ROOT / "README.md").read_text(encoding="utf-8"))
    assert block is not None
    body = block[0].removeprefix(block[1]).removesuffix(block[2])
    assert body == script["table"]()
