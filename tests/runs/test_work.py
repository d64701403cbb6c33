"""Progress of long work: the estimated time left, who is told, and an end that leaves the terminal clean."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest
from real_runs import Work

from fsdptool.cli import options
from fsdptool.cli.app import run
from fsdptool.cli.options import show_progress
from fsdptool.records.recipe import Data
from fsdptool.runs import work
from fsdptool.runs.work import Countdown, LongWork, left_text, listening
from fsdptool.training.data.language import tokenised
from fsdptool.training.data.tokenizer import Encoder, byte_tokenizer


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_the_pace_is_that_of_the_latest_work() -> None:
    countdown = Countdown(100)
    assert countdown.left(1, now=0.0) is None, "one mark has no pace"
    assert countdown.left(2, now=10.0) == pytest.approx(980.0)
    for done in range(3, 60):
        left = countdown.left(done, now=10.0 + done)
    assert left == pytest.approx(41.0), "the slow start is forgotten"
    assert countdown.left(100, now=200.0) is None
    assert countdown.left(1, now=300.0) is None, "a new round begins"
    assert left_text(None) == ""
    assert left_text(75.0) == ", 1 min 15 s left"


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One second passes between two looks at the clock.

    At the clock of two modules only: event loops in other threads of the process (the tests' web server)
    would sleep for hours.
    """
    times = iter(range(1_000_000))
    clock = SimpleNamespace(monotonic=lambda: float(next(times)))
    for module in (work, options):
        monkeypatch.setattr(module, "time", clock)
    yield


@pytest.mark.usefixtures("ticking")
def test_tokenising_says_how_far_it_is(tmp_path: Path) -> None:
    rows = tmp_path / "t.jsonl"
    rows.write_text('{"text": "a b c"}\n' * 40)
    told: list[str] = []
    with listening(told.append):
        encoder = Encoder(byte_tokenizer(), name="bytes", is_bytes=True)
        tokenised("documents", Data(source="jsonl", path=str(rows)), encoder, cache=tmp_path / "c")
    assert told[0].endswith("t.jsonl: 1 of about 40 rows")
    assert told[19].endswith("20 of about 40 rows, 20 s left")
    quiet = len(told)
    LongWork("x", 3, "items").advance(1)
    assert len(told) == quiet, "without a listener nothing is said"


@pytest.mark.usefixtures("ticking")
def test_tokenising_text_counts_bytes(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("a line of text, é\n" * 400_000)
    told: list[str] = []
    with listening(told.append):
        encoder = Encoder(byte_tokenizer(), name="bytes", is_bytes=True)
        data = Data(source="text", path=str(tmp_path))
        table = tokenised("documents", data, encoder, cache=tmp_path / "c")
    assert (len(table), int(table.lengths("input_ids")[0])) == (1, 7_600_001), "one document, and its end"
    assert told[0].endswith("1.06 MiB of 7.25 MiB")
    assert told[3].endswith("4.22 MiB of 7.25 MiB, 3 s left")


def test_ctrl_c_while_tokenising_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal is a real one; the progress on the screen says when to send it."""
    place = Work(tmp_path)
    (tmp_path / "text.txt").write_text("a line of text\n" * 400_000)
    monkeypatch.setenv("FSDPTOOL_DATA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(work, "_EVERY_SECONDS", 0.0)

    class Impatient(Terminal):
        def write(self, text: str) -> int:
            written = super().write(text)
            if "tokenising" in text and "left" in text:
                signal.raise_signal(signal.SIGINT)
            return written

    monkeypatch.setattr(sys, "stderr", screen := Impatient())
    before = sorted(tmp_path.iterdir())
    assert run([*place.arguments("run"), "--no-predict"]) == 130
    assert "MiB, " in screen.getvalue()
    assert [item.name for item in tmp_path.iterdir() if item not in before] == ["cache"]
    left = [item for item in (tmp_path / "cache").rglob("*") if item.is_file()]
    assert all(item.suffix == ".lock" for item in left), "neither a table nor a part of one"


@pytest.mark.usefixtures("ticking")
def test_a_terminal_line_is_rewritten_and_removed_even_on_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", screen := Terminal())
    with pytest.raises(KeyboardInterrupt), show_progress():
        job = LongWork("writing \x1b[31mmodel", 4, "tensors")
        job.advance(1)
        job.advance(2)
        raise KeyboardInterrupt
    written = screen.getvalue()
    assert "\n" not in written
    assert "2 of 4 tensors, " in written
    assert written.endswith("\r\x1b[2K")
    assert "\x1b[31m" not in written


@pytest.mark.usefixtures("ticking")
def test_a_pipe_gets_a_line_from_time_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", log := StringIO())
    with show_progress() as show:
        for number in range(30):
            show(f"evaluated {number}")
    lines = log.getvalue().splitlines()
    assert 1 < len(lines) < 10
    assert not any("\x1b" in line for line in lines)
