"""Background work: one child process, a bounded queue, cancelled where it is overtaken."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from sites import PATIENCE, await_in_thread

from fsdptool.errors import ExitCode
from fsdptool.web.jobs import BusyError, Jobs, JobState, WebJob

CHILD = (sys.executable, str(Path(__file__).with_name("play_tasks.py")))


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    """A queue of two whose child process plays the tasks of ``play_tasks``."""
    jobs = Jobs(waiting=2, kept=3, grace_seconds=120, child=CHILD)
    yield jobs
    jobs.close()


def ended(job: WebJob) -> list[tuple[JobState, str]]:
    """Return every change of a job until its end."""

    async def collect() -> list[tuple[JobState, str]]:
        async with asyncio.timeout(120):
            return [change async for change in job.changes()]

    return await_in_thread(collect())


def running(job: WebJob) -> None:
    """Wait until the task of a job has begun."""

    async def wait() -> None:
        async with asyncio.timeout(120):
            async for _, progress in job.changes():
                if progress.endswith("begins"):
                    return
        raise AssertionError(job.state)

    await_in_thread(wait())


async def exists(path: Path) -> None:
    """Wait until a file exists."""
    while not path.exists():
        await asyncio.sleep(0.02)


def play(jobs: Jobs, act: str, group: str | None = None, **arguments: Any) -> WebJob:
    """Submit one of the played tasks."""
    return jobs.submit("play:play", {"act": act, **arguments}, group=group)


def test_one_child_answers_and_answers_are_kept(jobs: Jobs) -> None:
    first = play(jobs, "add", number=1)
    assert ended(first)[-1][0] is JobState.DONE
    assert first.result["number"] == 1
    second = play(jobs, "add", number=2)
    ended(second)
    assert second.result["pid"] == first.result["pid"]
    assert play(jobs, "add", number=1) is first
    jobs.forget(first)
    assert play(jobs, "add", number=1) is not first


def test_a_new_question_overtakes_the_earlier_one_of_its_group(jobs: Jobs) -> None:
    slow = play(jobs, "wait", group="a")
    running(slow)
    other = play(jobs, "add", group="b")
    waiting = play(jobs, "wait", group="a", number=1)
    last = play(jobs, "add", group="a", number=2)
    for job in (slow, waiting):
        assert ended(job)[-1][0] is JobState.CANCELLED
    for job in (other, last):
        assert ended(job)[-1][0] is JobState.DONE
    assert other.result["pid"] == last.result["pid"]


@pytest.mark.slow
def test_an_interruption_that_is_lost_is_repeated(jobs: Jobs) -> None:
    slow = play(jobs, "lose", group="a")
    running(slow)
    pid = jobs._child.pid if jobs._child is not None else 0
    last = play(jobs, "add", group="a")
    assert ended(slow)[-1][0] is JobState.CANCELLED
    assert ended(last)[-1][0] is JobState.DONE
    assert last.result["pid"] == pid


def test_an_import_is_not_interrupted(jobs: Jobs, tmp_path: Path) -> None:
    """A library that registers what it has is not imported twice."""
    started = tmp_path / "started"
    (tmp_path / "imported_once.py").write_text(
        "import sys, time\nfrom pathlib import Path\n"
        "assert not hasattr(sys, 'registered')\nsys.registered = True\n"
        f"Path({str(started)!r}).touch()\n"
        "for _ in range(50):\n    time.sleep(0.02)\nVALUE = 7\n"
    )
    slow = play(jobs, "import", group="a", folder=str(tmp_path))
    await_in_thread(exists(started))
    last = play(jobs, "import", group="a", folder=str(tmp_path), number=2)
    assert ended(slow)[-1][0] in (JobState.CANCELLED, JobState.DONE)
    assert ended(last)[-1][0] is JobState.DONE
    assert last.result["value"] == 7


def test_loading_goes_on_when_a_question_is_overtaken(tmp_path: Path) -> None:
    loaded = tmp_path / "loaded"
    jobs = Jobs(grace_seconds=0.0, child=(*CHILD, str(loaded)))
    try:
        jobs.warm()
        pid = jobs._child.pid if jobs._child is not None else 0
        first = play(jobs, "add", group="a", number=1)
        assert (first.state, first.progress) == (JobState.WAITING, "loading PyTorch")
        last = play(jobs, "add", group="a", number=2)
        assert first.state is JobState.CANCELLED
        loaded.touch()
        assert ended(last)[-1][0] is JobState.DONE
        assert last.result["pid"] == pid
    finally:
        jobs.close()


def test_a_child_that_cannot_load_fails_the_question() -> None:
    jobs = Jobs(child=(sys.executable, "-c", "raise SystemExit(3)"))
    try:
        job = play(jobs, "add")
        assert ended(job)[-1][0] is JobState.FAILED
        assert job.error is not None
        assert "status 3" in job.error.message
    finally:
        jobs.close()


def test_work_that_another_group_waits_for_goes_on(jobs: Jobs) -> None:
    slow = play(jobs, "wait", group="a")
    assert play(jobs, "wait", group="b") is slow
    running(slow)
    play(jobs, "add", group="a")
    assert slow.state is JobState.RUNNING
    play(jobs, "add", group="b")
    assert ended(slow)[-1][0] is JobState.CANCELLED


def test_work_that_nobody_listens_to_is_cancelled(jobs: Jobs) -> None:
    watched, grouped = play(jobs, "wait", number=1), play(jobs, "wait", group="a")

    async def listen() -> None:
        async with asyncio.timeout(120):
            changes = watched.changes()
            await anext(changes)
            jobs.abandon(watched)
            assert not watched._cancelling
            await changes.aclose()
            jobs.abandon(watched)

    await_in_thread(listen())
    assert ended(watched)[-1][0] is JobState.CANCELLED
    running(grouped)
    jobs.abandon(grouped)
    assert grouped.state is JobState.RUNNING


def test_a_page_that_is_left_before_it_listens_cancels_its_job() -> None:
    jobs = Jobs(unheard_seconds=0.05, child=CHILD)
    try:
        for group in (None, "a"):
            unheard = play(jobs, "wait", group=group)
            assert unheard.wait(PATIENCE)
            assert unheard.state is JobState.CANCELLED
        jobs._unheard = None
        heard = play(jobs, "wait", group="a", number=1)

        async def listen_and_leave() -> None:
            changes = heard.changes()
            await anext(changes)
            jobs._cancel_unheard(heard, heard._asked)
            assert not heard._cancelling
            await changes.aclose()

        await_in_thread(listen_and_leave())
        jobs._unheard = 0.05
        jobs.abandon(heard)
        assert heard.wait(PATIENCE)
        assert heard.state is JobState.CANCELLED
        # An export goes on when its page is loaded again, or left.
        export = jobs.submit("play:play", {"act": "wait", "number": 2}, lasting=True)
        jobs.abandon(export)
        assert not export.wait(0.2)
        assert not export._cancelling
    finally:
        jobs.close()


def test_a_full_queue_refuses(jobs: Jobs) -> None:
    running(play(jobs, "wait"))
    play(jobs, "add", number=1)
    play(jobs, "add", number=2)
    with pytest.raises(BusyError):
        play(jobs, "add", number=3)


def test_failures_are_one_line_and_the_child_goes_on(jobs: Jobs) -> None:
    failed, crashed = play(jobs, "fail"), play(jobs, "crash")
    assert ended(failed)[-1][0] is JobState.FAILED
    assert failed.error is not None
    assert (failed.error.message, failed.error.help) == ("no such GPU", "choose another")
    assert ended(crashed)[-1][0] is JobState.FAILED
    assert crashed.error is not None
    assert crashed.error.exit_code is ExitCode.INTERNAL
    assert "\n" not in crashed.error.message


@pytest.mark.slow
def test_a_child_that_dies_or_does_not_listen_is_replaced(jobs: Jobs) -> None:
    jobs._grace = 0.2
    died = play(jobs, "die")
    assert ended(died)[-1][0] is JobState.FAILED
    assert died.error is not None
    assert "status 9" in died.error.message
    deaf = play(jobs, "deaf", group="a")
    running(deaf)
    last = play(jobs, "add", group="a")
    assert ended(deaf)[-1][0] is JobState.CANCELLED
    assert ended(last)[-1][0] is JobState.DONE


def test_the_child_ends_with_its_server(jobs: Jobs) -> None:
    job = play(jobs, "add")
    ended(job)
    child = psutil.Process(job.result["pid"])
    jobs.close()
    assert not child.is_running()
