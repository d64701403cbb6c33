"""The desk of a queue, cleared when a test ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from desk import Desk

from fsdptool.launch.queue import scheduler


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setenv("FSDPTOOL_LOCKS", str(tmp_path / "locks"))
    monkeypatch.setenv("FSDPTOOL_QUEUE", str(tmp_path / "queue"))
    seated = Desk(tmp_path)
    yield seated
    for row in seated.queue.rows():
        if row.stage == "started":
            scheduler._kill_processes(row)
    for child in seated.scheduler._children:
        if child.poll() is None:
            child.kill()
        child.wait(timeout=60)
