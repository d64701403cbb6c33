"""Background work: a bounded queue before one warm child process that has torch."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import IO, Any

from fsdptool.errors import ExitCode, FsdptoolError
from fsdptool.records.diagnostic import digest
from fsdptool.web.roots import Roots

CHILD = (sys.executable, "-P", "-m", "fsdptool.web.worker")
"""The command of the child process."""
_LOADING = "loading PyTorch"


class JobState(StrEnum):
    """Where a job stands."""

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        """Whether nothing more will happen."""
        return self not in (JobState.WAITING, JobState.RUNNING)


class BusyError(FsdptoolError):
    """The queue is full."""


@dataclass(eq=False, slots=True)
class WebJob:
    """One piece of work. Its fields are changed by :class:`Jobs` only.

    Attributes:
        id: Digest of the task and its arguments: the same question is the same job.
        task: Name of a function in ``fsdptool.web.tasks``.
        arguments: Plain JSON data.
        lasting: Whether it goes on when nobody listens.
        state: Where it stands.
        progress: What it does, for people.
        result: What the task returned, once ``done``.
        error: Why it failed, once ``failed``.
    """

    id: str
    task: str
    arguments: Mapping[str, Any]
    lasting: bool = False
    state: JobState = JobState.WAITING
    progress: str = "waiting"
    result: Any = None
    error: FsdptoolError | None = None
    _groups: set[str] = field(default_factory=set, repr=False)
    _asked: int = 0
    _cancelling: bool = False
    _ended: threading.Event = field(default_factory=threading.Event, repr=False)

    def wait(self, seconds: float) -> bool:
        """Wait for the end, and return whether it came; not for the event loop."""
        return self._ended.wait(seconds)

    _listeners: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(
        default_factory=list, repr=False
    )

    async def changes(self) -> AsyncGenerator[tuple[JobState, str], None]:
        """Yield state and progress now and after every change, until the job has ended."""
        event = asyncio.Event()
        listener = (asyncio.get_running_loop(), event)
        self._listeners.append(listener)
        try:
            while True:
                event.clear()
                state = self.state
                yield state, self.progress
                if state.ended:
                    return
                await event.wait()
        finally:
            self._listeners.remove(listener)

    def _changed(self) -> None:
        for loop, event in list(self._listeners):
            if not loop.is_closed():
                loop.call_soon_threadsafe(event.set)


class Jobs:
    """Runs tasks one after another in a child process, which is started with the first task.

    Jobs wait until the child has loaded its libraries. One that is cancelled meanwhile costs nothing: the
    child goes on loading for the next one.

    Args:
        waiting: The most jobs that wait; more are refused.
        kept: The most ended jobs whose results are kept, the last used longest.
        grace_seconds: Time in which a cancelled task must end before its process is killed.
        unheard_seconds: How long a job goes on that nobody listens to or asks for again, such as that of a
            page that was left before its stream opened; None for as long as it takes. A page without
            JavaScript asks again every two seconds.
        child: The command of the child process.
    """

    def __init__(
        self,
        *,
        waiting: int = 8,
        kept: int = 48,
        grace_seconds: float = 30.0,
        unheard_seconds: float | None = None,
        child: Sequence[str] = CHILD,
    ) -> None:
        self._command = tuple(child)
        self._limit, self._kept, self._grace = waiting, kept, grace_seconds
        self._unheard = unheard_seconds
        self._jobs: OrderedDict[str, WebJob] = OrderedDict()
        self._queue: list[WebJob] = []
        self._running: WebJob | None = None
        self._child: subprocess.Popen[str] | None = None
        self._ready = False
        self._folders: tuple[str, ...] | None = None
        self._lock = threading.RLock()
        self._closed = False

    def confine(self, roots: Roots) -> None:
        """Let tasks that answer questions open files below these folders only."""
        self._folders = tuple(map(str, roots.folders.values()))

    def warm(self) -> None:
        """Start the child process, so that it is ready when the first question comes."""
        with self._lock:
            if self._child is None and not self._closed:
                self._start_child()

    def submit(
        self, task: str, arguments: Mapping[str, Any], *, group: str | None = None, lasting: bool = False
    ) -> WebJob:
        """Return the job for a question, new or known.

        Args:
            task: Name of a function in ``fsdptool.web.tasks``.
            arguments: Plain JSON data. What the answer depends on besides (the state of a file) belongs
                in them too.
            group: Whose question it is. A new question of a group overtakes the earlier one, which is
                cancelled unless another group waits for it.
            lasting: Whether the job goes on when its page is left, as one that writes files does.

        Raises:
            BusyError: Too many jobs wait.
        """
        name = digest({"task": task, "arguments": dict(arguments)}).removeprefix("sha256:")[:32]
        with self._lock:
            job = self._jobs.get(name)
            if group is not None:
                self._overtake(group, job)
            if job is None or job.state is JobState.CANCELLED:
                if self._closed or len(self._queue) >= self._limit:
                    raise BusyError("too many questions are waiting", help="try again in a moment")
                job = self._jobs[name] = WebJob(name, task, dict(arguments), lasting)
                self._queue.append(job)
            self._jobs.move_to_end(name)
            if group is not None:
                job._groups.add(group)
            job._asked += 1
            self._expect_listeners(job)
            self._trim()
            self._start_next()
        return job

    def get(self, job_id: str) -> WebJob | None:
        """Return a job by its id, or None."""
        with self._lock:
            return self._jobs.get(job_id)

    def cancel(self, job: WebJob) -> None:
        """Cancel a job that has not ended."""
        with self._lock:
            job._cancelling = True
            if job.state is JobState.WAITING:
                self._queue.remove(job)
                self._end(job, JobState.CANCELLED)
            elif job.state is JobState.RUNNING:
                self._tell({"cancel": job.id})
                child = self._child
                _later(self._grace, self._kill_if_running, job, child)

    def abandon(self, job: WebJob) -> None:
        """Cancel a job that nobody listens to any longer; that of a group may be asked for again first."""
        with self._lock:
            if job._groups:
                self._expect_listeners(job)
            else:
                self._cancel_unheard(job, job._asked)

    def forget(self, job: WebJob) -> None:
        """Forget the result of an ended job, so that the same question is worked out again."""
        with self._lock:
            if job.state.ended:
                self._jobs.pop(job.id, None)

    def close(self) -> None:
        """Cancel everything and end the child process."""
        with self._lock:
            self._closed = True
            for job in list(self._queue):
                self.cancel(job)
            child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for stream in (child.stdin, child.stdout):
                if stream is not None:
                    stream.close()

    def _expect_listeners(self, job: WebJob) -> None:
        if self._unheard is not None and not job.state.ended:
            _later(self._unheard, self._cancel_unheard, job, job._asked)

    def _cancel_unheard(self, job: WebJob, asked: int) -> None:
        with self._lock:
            if job._asked == asked and not (job.lasting or job._listeners or job.state.ended):
                self.cancel(job)

    def _overtake(self, group: str, keep: WebJob | None) -> None:
        for other in [job for job in self._jobs.values() if group in job._groups and job is not keep]:
            other._groups.discard(group)
            if not other._groups:
                self.cancel(other)

    def _trim(self) -> None:
        ended = [name for name, job in self._jobs.items() if job.state.ended]
        for name in ended[: max(len(ended) - self._kept, 0)]:
            del self._jobs[name]

    def _start_next(self) -> None:
        if self._running is not None or not self._queue or self._closed:
            return
        if self._child is None or self._child.poll() is not None:
            self._start_child()
        if not self._ready:
            for job in self._queue:
                job.progress = _LOADING
                job._changed()
            return
        job = self._running = self._queue.pop(0)
        job.state, job.progress = JobState.RUNNING, "starting"
        job._changed()
        order = {"job": job.id, "task": job.task, "arguments": job.arguments}
        self._tell({**order, "folders": self._folders})

    def _start_child(self) -> None:
        self._child, self._ready = _start(self._command), False
        threading.Thread(target=self._listen, args=(self._child,), daemon=True).start()

    def _tell(self, order: Mapping[str, Any]) -> None:
        assert self._child is not None
        stream: IO[str] | None = self._child.stdin
        assert stream is not None
        try:
            stream.write(json.dumps(order) + "\n")
            stream.flush()
        except OSError:
            pass  # The process has died; the thread that listens to it notices.

    def _listen(self, child: subprocess.Popen[str]) -> None:
        """Take the messages of a child until it ends; runs in a thread."""
        assert child.stdout is not None
        try:
            for line in child.stdout:
                self._take(json.loads(line))
        except ValueError:
            child.kill()  # The stream was closed, or what came was not a message.
        status = child.wait()
        with self._lock:
            if self._child is not child:
                return
            # One that cannot even load must not be started again and again.
            job = self._running if self._ready or not self._queue else self._queue.pop(0)
            self._running = self._child = None
            if job is None:
                pass
            elif self._closed or job._cancelling:
                self._end(job, JobState.CANCELLED)
            else:
                job.error = FsdptoolError(
                    f"the process that computes the answer ended with status {status}",
                    help="try again; if it is killed for memory, close other programs first",
                )
                job.error.exit_code = ExitCode.INTERNAL
                self._end(job, JobState.FAILED)
            self._start_next()

    def _take(self, message: Mapping[str, Any]) -> None:
        with self._lock:
            if "ready" in message:
                self._ready = True
                self._start_next()
                return
            job = self._running
            if job is None or message["job"] != job.id:
                return
            if "progress" in message:
                job.progress = message["progress"]
                job._changed()
                return
            self._running = None
            if message["state"] == JobState.FAILED:
                error = message["error"]
                job.error = FsdptoolError(error["message"], help=error["help"])
                job.error.exit_code = ExitCode(error["exit_code"])
            job.result = message.get("result")
            self._end(job, JobState(message["state"]))
            self._start_next()

    def _end(self, job: WebJob, state: JobState) -> None:
        job.state, job.progress = state, state.value
        job._ended.set()
        if state is JobState.CANCELLED and self._jobs.get(job.id) is job:
            del self._jobs[job.id]
        job._changed()

    def _kill_if_running(self, job: WebJob, child: subprocess.Popen[str] | None) -> None:
        with self._lock:
            if self._running is job and self._child is child and child is not None:
                child.kill()


def _later(seconds: float, act: Callable[..., None], *arguments: Any) -> None:
    timer = threading.Timer(seconds, act, arguments)
    timer.daemon = True
    timer.start()


def _start(command: Sequence[str]) -> subprocess.Popen[str]:
    quiet = None if os.environ.get("FSDPTOOL_TRACEBACK") else subprocess.DEVNULL
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=quiet,
        text=True,
        encoding="utf-8",
        # Ctrl-C in the terminal is for the server, which then ends this process.
        start_new_session=True,
    )
