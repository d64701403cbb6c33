"""What a rank writes survives a disk that fills up and a tracker that fails."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fsdptool.records.run import Metrics
from fsdptool.runs.events import EventLog, Follower, LineFile, event_path, read_lines
from fsdptool.runs.folder import METRICS
from fsdptool.runs.manifest import sync_folder


@contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """Let files grow to ``size`` bytes: a write across that border is cut short, as on a disk that fills."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_half_a_line_does_not_swallow_the_next(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "lines")
    file.append({"number": 1})
    with files_up_to(20), pytest.raises(OSError, match="No space"):
        file.append({"number": 2, "text": "too long for the disk"})
    file.append({"number": 3})
    file.close()
    assert [record["number"] for record in read_lines(tmp_path / "lines")] == [1, 3]


class Failing:
    """A tracker whose server has gone."""

    name = "wandb"

    def __init__(self) -> None:
        self.asked = 0

    def log(self, values: dict[str, float], step: int) -> None:
        self.asked += 1
        raise BrokenPipeError("the service has ended\nlong story")

    def finish(self) -> None:
        raise AssertionError("left out before")


def test_a_tracker_that_fails_is_left_out(tmp_path: Path) -> None:
    log, tracker = EventLog(tmp_path, 0, 0), Failing()
    follower = Follower(tmp_path)
    log.add_trackers([tracker])
    for step in (1, 2):
        log.step(Metrics(step, 0.0, 0.0, 1.0, 1.0, 1e-3, 8, 2, 0.1, 0.0, None, None, None, {}))
    log.close()
    assert tracker.asked == 1
    assert [record["step"] for record in read_lines(tmp_path / METRICS)] == [1, 2]
    (warning,) = read_lines(event_path(tmp_path, 0))
    assert warning["message"] == "wandb: tracking is disabled for the rest of the run: the service has ended"
    assert {event["kind"] for event in follower.news()} == {"warning", "step"}


def test_a_file_that_cannot_be_read_now_is_read_later(tmp_path: Path) -> None:
    log = EventLog(tmp_path, 0, 0)
    follower = Follower(tmp_path)
    log.emit("phase", name="training")
    path = event_path(tmp_path, 0)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(path)
    assert list(follower.news()) == []
    path.unlink()
    (tmp_path / "elsewhere").rename(path)
    assert [event["name"] for event in follower.news()] == ["training"]
    log.close()


def test_a_folder_that_cannot_be_flushed_is_no_failure() -> None:
    """As on file systems in user space: the kernel's own process table answers ``EINVAL``, too."""
    folder = Path("/proc/self")
    descriptor = os.open(folder, os.O_RDONLY)
    with pytest.raises(OSError, match="Invalid argument"):
        os.fsync(descriptor)
    os.close(descriptor)
    sync_folder(folder)
