"""The child process that does what needs torch: one task at a time, cancelled without losing what is loaded.

Lines of JSON come in on standard input and go out on the original standard output. A thread reads, so that
a task can be cancelled while it runs; when the server is gone, the input ends and so does this process.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from fsdptool.config.command_lines import ALLOWED
from fsdptool.errors import ExitCode, FsdptoolError
from fsdptool.formatting import printable
from fsdptool.web.roots import Roots

REPEAT_SECONDS = 0.1
"""A task that is cancelled is interrupted again after this time."""
UNWINDING_SECONDS = 2.0
"""Time in which an interrupted task cleans up. One that runs on has lost its interruption: Python only
reports an exception in a finalizer."""


class _Worker:
    """Takes orders in one thread and runs them in the main thread.

    The server sends an order when it has the answer to the one before, so there is one job at most.
    """

    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._write_lock = threading.Lock()
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._job: str | None = None
        self._running = self._cancelled = False
        self._interrupted = -math.inf

    def read(self, stream: TextIO) -> None:
        """Read orders until the server is gone; runs in a thread."""
        for line in stream:
            order = json.loads(line)
            if "cancel" in order:
                self._cancel(order["cancel"])
            else:
                with self._lock:
                    self._job, self._cancelled = order["job"], False
                self._orders.put(order)
        # Nothing here is worth finishing: results have nowhere to go.
        os._exit(0)

    def _cancel(self, job: str) -> None:
        with self._lock:
            if self._job != job or self._cancelled:
                return
            self._cancelled = True
        threading.Thread(target=self._insist, args=(job,), daemon=True).start()

    def _insist(self, job: str) -> None:
        """Send SIGINT to the main thread until a job has ended; runs in a thread."""
        while True:
            with self._lock:
                if self._job != job:
                    return
                # To that thread, so that blocking calls return, too.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            time.sleep(REPEAT_SECONDS)

    def interrupt(self, _: int, frame: FrameType | None) -> None:
        """Handle SIGINT: end the task if it was cancelled, but not within an import or its own cleaning up.

        A library that is half imported cannot be imported again.
        """
        unwinding = time.monotonic() - self._interrupted < UNWINDING_SECONDS
        if self._running and self._cancelled and not unwinding and not _is_importing(frame):
            self._interrupted = time.monotonic()
            raise KeyboardInterrupt

    def say(self, **message: Any) -> None:
        """Write one message to the server."""
        with self._write_lock:
            self._output.write(json.dumps(message) + "\n")
            self._output.flush()

    def serve(self) -> None:
        """Run tasks until the process ends."""
        self.say(ready=True)
        while True:
            order = self._orders.get()
            job = order["job"]
            self._interrupted = -math.inf
            try:
                self._running = True
                answer = self._run(job, order["task"], order["arguments"], order.get("folders"))
            except KeyboardInterrupt:
                answer = {"job": job, "state": "cancelled"}
            self._running = False
            with self._lock:
                self._job = None
            self.say(**answer)

    def _run(
        self, job: str, task: str, arguments: Mapping[str, Any], folders: Sequence[str] | None
    ) -> dict[str, Any]:
        if self._cancelled:
            raise KeyboardInterrupt
        try:
            with _reading(task, folders):
                result = load_task(task)(lambda text: self.say(job=job, progress=text), **arguments)
        except FsdptoolError as error:
            failure = {"message": error.message, "help": error.help, "exit_code": int(error.exit_code)}
            return {"job": job, "state": "failed", "error": failure}
        except Exception as error:
            if os.environ.get("FSDPTOOL_TRACEBACK"):
                traceback.print_exc()
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = printable(
                f"internal error: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
            )
            failure = {"message": text, "help": None, "exit_code": int(ExitCode.INTERNAL)}
            return {"job": job, "state": "failed", "error": failure}
        return {"job": job, "state": "done", "result": result}


def _reading(task: str, folders: Sequence[str] | None) -> AbstractContextManager[None]:
    """Return a block in which a task opens only what it may open.

    A dry run and an export read what the recipe of a run names, as the run itself does; the others read
    below the folders of the pages, and what the Hub's cache and dropped files hold.
    """
    if folders is None or task.partition(":")[0] in ("runs", "machine"):
        return nullcontext()
    from huggingface_hub import constants

    from fsdptool.web.references import uploads_folder
    from fsdptool.web.roots import Roots

    return Roots([Path(folder) for folder in folders]).confine(uploads_folder(), Path(constants.HF_HUB_CACHE))


def load_libraries() -> None:
    """Import what most tasks need: torch, and what traces a model with it."""
    for name in ("torch", "fsdptool.inspection", "fsdptool.planning.plan"):
        import_module(name)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a frame belongs to the import of a module."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def load_task(name: str) -> Any:
    """Return the function of this name in ``fsdptool.web.tasks``.

    It is called with a function that takes texts of progress, and with keyword arguments; it returns plain
    JSON data.
    """
    from fsdptool.web import tasks

    return getattr(tasks, name)


def main(load: Callable[[], None] = load_libraries, roots: Sequence[str] = ()) -> None:
    """Serve the process that started this one.

    Args:
        roots: The folders below which files may be read that a text names; empty: all.
        load: Loads what most tasks need; nothing cancels it.
    """
    # What libraries print must not mix with the messages.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    if roots:
        ALLOWED.set(Roots([Path(folder) for folder in roots]).contains)
    worker = _Worker(output)
    signal.signal(signal.SIGINT, worker.interrupt)
    threading.Thread(target=worker.read, args=(sys.stdin,), daemon=True).start()
    # Each task says itself what it lacks.
    with contextlib.suppress(ImportError, OSError):
        load()
    worker.serve()


if __name__ == "__main__":
    main(roots=sys.argv[1:])
