"""Readers that go away, and a second writer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from attacks import PATIENCE, Cli, write_job
from filelock import FileLock


def test_a_reader_that_goes_away_is_no_failure(tmp_path: Path) -> None:
    for command in ("families", "schema plan", "--help"):
        line = f"set -o pipefail; {sys.executable} -P -m fsdptool {command} | head -1"
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE, check=False
        )
        assert done.returncode == 0, (command, done)
        assert not done.stderr


def test_a_second_writer_is_refused_before_it_prepares(cli: Cli, tmp_path: Path) -> None:
    recipe, config = write_job(tmp_path)
    # Preparation would fail on this model; the lock is looked at first.
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "run").mkdir()
    with FileLock(tmp_path / "run" / ".lock"):
        answer = cli("train", recipe, "--config", config, "-o", tmp_path / "run")
    assert answer.code == 2
    assert "another process trains" in answer.err
