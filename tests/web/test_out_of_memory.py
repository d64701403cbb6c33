"""The page of a run after memory really ran out: what was alive, the cause, the suggestions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from sites import PATIENCE, TINY, Site

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

RECIPE = """\
model: {reference: model, weights: random}
data: {source: text, path: text.txt, tokenizer: bytes, workers: 0}
batch: {micro_batch: 32, sequence_length: 256}
steps: 5
"""
CONFIG = Path(__file__).parents[2] / "examples" / "configs" / "two_cpu_processes.yaml"


def test_a_run_out_of_memory_says_what_was_alive_and_what_to_change(site: Site, tmp_path: Path) -> None:
    (site.folder / "model").mkdir()
    model = {**TINY, "vocab_size": 262, "max_position_embeddings": 256}
    (site.folder / "model" / "config.json").write_text(json.dumps(model))
    (site.folder / "recipe.yaml").write_text(RECIPE)
    (site.folder / "text.txt").write_text(" ".join(f"The {n}th sentence." for n in range(20_000)))
    limiter = Path(__file__).with_name("play_memory_limit.py").read_text()
    (tmp_path / "sitecustomize.py").write_text(limiter)
    path = filter(None, [os.environ.get("PYTHONPATH")])
    command = [sys.executable, "-m", "fsdptool", "train", "recipe.yaml", "--config", str(CONFIG), "-o", "run"]
    ended = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *path])},
        cwd=site.folder,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert ended.returncode == 4, ended.stderr
    page = site.get("/run", run="models/run")
    assert "<h2>Cause</h2>" in page
    assert "out of memory" in page
    assert "What was allocated" in page
    assert "Change:" in page
    report = json.loads((site.folder / "run" / "summary.json").read_text())["memory_report"]
    assert report, "the ranks reported what they held"
