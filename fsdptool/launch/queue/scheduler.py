"""Starts the entries of the queue when what they need is free. One program at a time does it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from fsdptool.errors import FsdptoolError, StorageError
from fsdptool.files.text import private_folder
from fsdptool.launch.processes import is_alive, send_signals, start_gated
from fsdptool.launch.queue.entries import SCHEDULER_LOCK, Queue
from fsdptool.launch.queue.file import (
    NO_MESSAGE,
    Row,
    Standing,
    live_workers,
    read_row,
    read_standing,
    update,
)
from fsdptool.launch.queue.needs import find_waits
from fsdptool.records.queue import EntryState, Needs

POLL_SECONDS = 1.0
_KILL_SECONDS = 15.0
"""How long a run may take to end after it was told to end at once; then its processes are killed."""

COMMAND = (sys.executable, "-P", "-m", "fsdptool")


class Scheduler:
    """Starts entries, and records how they ended.

    Everything that it knows is in the file of the queue and in the run folders, so another one continues
    where a killed one left off.

    Args:
        queue: The queue.
        command: What runs ``train``, followed by the arguments of ``fsdptool``.
    """

    def __init__(self, queue: Queue, *, command: Sequence[str] = COMMAND) -> None:
        self.queue = queue
        self._command = tuple(command)
        self._children: list[subprocess.Popen[bytes]] = []
        self._released: set[str] = set()
        self._lock_file: object | None = None
        self.problem: FsdptoolError | None = None
        """Why the last look at the queue failed, or None."""

    def acquire(self) -> bool:
        """Become the program that starts the entries; return False if another one is.

        Raises:
            StorageError: The folder of the queue cannot be written.
        """
        from filelock import FileLock, Timeout

        if self._lock_file is not None:
            return True
        try:
            private_folder(self.queue.folder)
            lock = FileLock(self.queue.folder / SCHEDULER_LOCK)
            lock.acquire(timeout=0)
        except Timeout:
            return False
        except OSError as error:
            raise StorageError(
                f"the queue {self.queue.folder} cannot be written: {error.strerror or error}",
                help="set FSDPTOOL_QUEUE to a folder that you can write",
            ) from error
        self._lock_file = lock
        return True

    def close(self) -> None:
        """Let another program start the entries. Runs continue."""
        lock, self._lock_file = self._lock_file, None
        if lock is not None:
            lock.release()  # type: ignore[attr-defined]  # a FileLock

    def run(self, ended: threading.Event, *, until_idle: bool = False) -> None:
        """Look at the queue every second until ``ended`` is set.

        While another program starts the entries, this one waits to take its place. A queue that cannot be
        read or written is tried again; :attr:`problem` says why.

        Args:
            ended: Set by another thread.
            until_idle: Return once no entry waits or runs.
        """
        try:
            while not ended.is_set():
                busy = True
                try:
                    if self.acquire():
                        busy = self.tick()
                    self.problem = None
                except FsdptoolError as error:
                    self.problem = error
                if until_idle and not busy:
                    return
                ended.wait(POLL_SECONDS)
        finally:
            self.close()

    def tick(self) -> bool:
        """Look once: record what has ended, start what can start. Return whether anything runs or waits.

        Raises:
            FsdptoolError: The queue cannot be read or written.
        """
        # Children that have ended stay zombies until their parent asks.
        self._children = [child for child in self._children if child.poll() is None]
        rows = self.queue.rows()
        standings: dict[int, Standing] = {}
        for row in rows:
            if row.stage == "started":
                standings[row.id] = self._settle(row)
        rows = self.queue.rows()
        waiting = [row for row in rows if row.stage == "waiting"]
        occupied = self.queue.occupied(rows, standings)
        needs = [Needs(row.folder, frozenset(row.gpus), row.slots) for row in waiting]
        waits = find_waits(needs, occupied, self.queue.slots())
        for row, wait in zip(waiting, waits, strict=True):
            if wait is None:
                self._start(row)
        return bool(waiting) or any(standing.occupied for standing in standings.values())

    def _settle(self, row: Row) -> Standing:
        """Record how an entry ended, if it has; kill processes that survived a request to end at once."""
        standing = read_standing(row, self.queue.log_path(row.id))
        if standing.occupied:
            if row.kill_requested is not None and time.time() - row.kill_requested > _KILL_SECONDS:
                _kill_processes(row)
            return standing
        changes: dict[str, object]
        if not standing.began and row.launch_id in self._released:
            # It did begin, but the log could not be written: starting it again and again would not help.
            standing = Standing(EntryState.DEAD, message=NO_MESSAGE)
        if not standing.began:
            changes = {"stage": "waiting", "started": None, "pid": None, "pid_start": None, "boot": None}
        else:
            changes = {
                "stage": "ended",
                "ended": time.time(),
                "end_state": str(standing.state),
                "message": standing.message,
            }
        with self.queue.file.write() as connection:
            update(connection, row.id, changes)
        return standing

    def _start(self, row: Row) -> None:
        """Start an entry. The start is recorded before the command begins, so that no entry starts twice."""
        log = self.queue.log_path(row.id)
        gate = None
        try:
            with self.queue.file.write() as connection:
                current = read_row(
                    connection.execute("SELECT * FROM entries WHERE id = ?", (row.id,)).fetchone()
                )
                if current.stage != "waiting":
                    return
                private_folder(log.parent)
                gate = start_gated(
                    self._argv(row), log=log, environment=_environment(row), folder=_directory(row)
                )
                changes = {
                    "stage": "started",
                    "started": time.time(),
                    "pid": gate.identity.pid,
                    "pid_start": gate.identity.start,
                    "boot": gate.identity.boot,
                    "stop_requested": None,
                    "kill_requested": None,
                }
                update(connection, row.id, changes)
        except BaseException:
            if gate is not None:
                gate.abandon()
            raise
        self._children.append(gate.process)
        self._released.add(row.launch_id)
        gate.release()

    def _argv(self, row: Row) -> tuple[str, ...]:
        places = ("train", row.recipe, "--config", row.config, "--output", row.folder)
        return (*self._command, *places, "--launch-id", row.launch_id, *row.options)


def _directory(row: Row) -> Path:
    folder = Path(row.directory)
    return folder if folder.is_dir() else Path("/")


def _environment(row: Row) -> dict[str, str]:
    visible = {} if row.visible is None else {"CUDA_VISIBLE_DEVICES": row.visible}
    return {**os.environ, **visible}


def _kill_processes(row: Row) -> None:
    if row.process is not None and is_alive(row.process):
        send_signals(row.process, signal.SIGKILL)
    for worker in live_workers(Path(row.folder)):
        send_signals(worker, signal.SIGKILL)
