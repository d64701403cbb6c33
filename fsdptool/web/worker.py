"""The child process that does what needs torch: one task at a time, cancelled without losing what is loaded.

Lines of JSON come in on standard input and go out on the original standard output. A thread reads, so that
a task can be cancelled while it runs; when the server is gone, the input ends and so does this process.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from importlib import import_module
from typing import Any, TextIO

from fsdptool.errors import ExitCode, FsdptoolError
from fsdptool.formatting import printable


class _Worker:
    def __init__(self, output: TextIO) -> None:
        self._output = output
        self._write_lock = threading.Lock()
        self._lock = threading.Lock()
        self._waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._active: str | None = None
        self._cancelled: set[str] = set()

    def read(self, stream: TextIO) -> None:
        """Read orders until the server is gone; runs in a thread."""
        for line in stream:
            order = json.loads(line)
            if "cancel" in order:
                self._cancel(order["cancel"])
            else:
                self._waiting.put(order)
        # Nothing here is worth finishing: results have nowhere to go.
        os._exit(0)

    def _cancel(self, job: str) -> None:
        with self._lock:
            self._cancelled.add(job)
            if self._active == job:
                # To the main thread, so that blocking calls return, too.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def interrupt(self, *_: object) -> None:
        """Handle SIGINT: end the active task if it was cancelled, and nothing else."""
        if self._active is not None and self._active in self._cancelled:
            raise KeyboardInterrupt

    def say(self, **message: Any) -> None:
        """Write one message to the server."""
        with self._write_lock:
            self._output.write(json.dumps(message) + "\n")
            self._output.flush()

    def serve(self) -> None:
        """Run tasks until the process ends."""
        while True:
            order = self._waiting.get()
            job = order["job"]
            try:
                with self._lock:
                    self._active = job
                    if job in self._cancelled:
                        raise KeyboardInterrupt
                try:
                    answer = self._run(job, order["task"], order["arguments"])
                finally:
                    self._active = None
            except KeyboardInterrupt:
                answer = {"job": job, "state": "cancelled"}
            with self._lock:
                self._active = None
                self._cancelled.discard(job)
            self.say(**answer)

    def _run(self, job: str, task: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
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


def load_task(name: str) -> Any:
    """Return the function ``module:function`` of ``fsdptool.web.tasks``.

    It is called with a function that takes texts of progress, and with keyword arguments; it returns plain
    JSON data.
    """
    module, _, function = name.partition(":")
    return getattr(import_module(f"fsdptool.web.tasks.{module}"), function)


def main() -> None:
    """Serve the process that started this one."""
    # What libraries print must not mix with the messages.
    output = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    worker = _Worker(output)
    signal.signal(signal.SIGINT, worker.interrupt)
    threading.Thread(target=worker.read, args=(sys.stdin,), daemon=True).start()
    worker.serve()


if __name__ == "__main__":
    main()
