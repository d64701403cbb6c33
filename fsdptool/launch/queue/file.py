"""The file of the queue: an SQLite database that survives the programs that read and write it.

Rows say what was requested and which process was started. The state of a started run is not in them:
:func:`read_standing` reads it from the run folder and the processes.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from fsdptool.errors import ConfigError, StorageError
from fsdptool.files.text import UnreadableError, private_folder, read_ends
from fsdptool.files.values import count, moment
from fsdptool.launch.processes import ProcessIdentity, identify, is_alive, started_before
from fsdptool.records.queue import EntryState
from fsdptool.records.run import Start
from fsdptool.runs.events import ranks_in, tail_events
from fsdptool.runs.folder import RUN, read_start
from fsdptool.runs.view import read_view

VERSION = 1
"""Version of the tables, in the file's ``user_version``."""

_BUSY_SECONDS = 5.0
"""How long a program waits while another one writes."""

_TABLES = """
CREATE TABLE entries (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    place INTEGER NOT NULL,
    stage TEXT NOT NULL CHECK (stage IN ('waiting', 'held', 'started', 'ended', 'cancelled')),
    launch_id TEXT NOT NULL UNIQUE,
    recipe TEXT NOT NULL,
    config TEXT NOT NULL,
    folder TEXT NOT NULL,
    directory TEXT NOT NULL,
    options TEXT NOT NULL,
    visible TEXT,
    gpus TEXT NOT NULL,
    slots INTEGER NOT NULL,
    added REAL NOT NULL,
    started REAL,
    pid INTEGER,
    pid_start INTEGER,
    boot TEXT,
    stop_requested REAL,
    kill_requested REAL,
    ended REAL,
    end_state TEXT,
    message TEXT
);
CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""

Stage = Literal["waiting", "held", "started", "ended", "cancelled"]


@dataclass(frozen=True, slots=True)
class Row:
    """One entry as the file holds it.

    Attributes:
        id, recipe, config, folder, gpus, slots, added, started, ended, message: As in
            :class:`~fsdptool.records.queue.QueueEntry`.
        place: Entries start in ascending order of place.
        stage: What was done with the entry.
        launch_id: Launch id of the start, which ``run.json`` repeats.
        directory: Working directory of the command.
        options: Options of ``fsdptool train``.
        visible: ``CUDA_VISIBLE_DEVICES`` of the command, or None to leave it.
        process: The command, once it was started.
        stop_requested, kill_requested: When that was requested, or None.
        end_state: State of an entry that has ended.
    """

    id: int
    place: int
    stage: Stage
    launch_id: str
    recipe: str
    config: str
    folder: str
    directory: str
    options: tuple[str, ...]
    visible: str | None
    gpus: tuple[str, ...]
    slots: int
    added: float
    started: float | None
    process: ProcessIdentity | None
    stop_requested: float | None
    kill_requested: float | None
    ended: float | None
    end_state: str | None
    message: str | None


def queue_folder() -> Path:
    """Return the folder of this machine's queue.

    ``FSDPTOOL_QUEUE`` wins, then ``XDG_STATE_HOME/fsdptool``, then ``~/.local/state/fsdptool``. The host's
    name is part of it: home folders are shared between machines, GPUs and SQLite's locks are not.
    """
    if named := os.environ.get("FSDPTOOL_QUEUE"):
        return Path(named).expanduser().absolute()
    base = os.environ.get("XDG_STATE_HOME")
    state = Path(base) if base else Path("~/.local/state").expanduser()
    return state / "fsdptool" / f"queue-{os.uname().nodename}"


class QueueFile:
    """The database in a folder of the queue.

    Args:
        folder: The folder; it is made by the first write.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "queue.sqlite"

    @contextmanager
    def read(self) -> Iterator[sqlite3.Connection]:
        """Open the file for reading; all reads in the block see one state.

        Raises:
            StorageError: It cannot be read.
            ConfigError: It was written by a newer version, or is not a queue.
        """
        with self._open("BEGIN") as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """Open the file for writing; the changes of the block are made together or not at all.

        Raises:
            StorageError: It cannot be written: the disk is full, or another program keeps it locked.
            ConfigError: It was written by a newer version, or is not a queue.
        """
        with self._open("BEGIN IMMEDIATE") as connection:
            yield connection

    @contextmanager
    def _open(self, begin: str) -> Iterator[sqlite3.Connection]:
        connection: sqlite3.Connection | None = None
        try:
            private_folder(self.path.parent)
            connection = sqlite3.connect(self.path, timeout=_BUSY_SECONDS, isolation_level=None)
            connection.row_factory = sqlite3.Row
            self._prepare(connection)
            connection.execute(begin)
            try:
                yield connection
            except BaseException:
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise StorageError(f"the queue {self.path}: {error}", help=_advice(error)) from error
        except sqlite3.DatabaseError as error:
            raise ConfigError(
                f"{self.path} is not a queue of fsdptool: {error}",
                help="move the file away; runs and their folders do not depend on it",
            ) from error
        except OSError as error:
            raise StorageError(
                f"the queue {self.path.parent} cannot be opened: {error.strerror or error}",
                help="set FSDPTOOL_QUEUE to a folder that you can write",
            ) from error
        finally:
            if connection is not None:
                connection.close()

    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Make the tables of a new file, and refuse a file of a newer version."""
        version = connection.execute("PRAGMA user_version").fetchone()[0]
        if version == VERSION:
            return
        if version > VERSION:
            raise ConfigError(
                f"{self.path} was written by a newer version of fsdptool",
                help="use that version, or set FSDPTOOL_QUEUE to another folder",
            )
        # The journal stays the one that is undone: unlike a write-ahead log it can be read on a full disk.
        connection.execute("BEGIN IMMEDIATE")
        # Another program may have made them meanwhile.
        if connection.execute("PRAGMA user_version").fetchone()[0] == 0:
            for statement in _TABLES.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {VERSION}")
        connection.execute("COMMIT")


def _advice(error: sqlite3.OperationalError) -> str:
    name = str(getattr(error, "sqlite_errorname", ""))
    if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
        return "another program writes to it; try again"
    if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
        return "free disk space; runs that were started continue"
    return "check that the folder exists and that you can write it; runs that were started continue"


def read_row(row: sqlite3.Row) -> Row:
    """Return a row of ``entries`` as a record."""
    fields: dict[str, Any] = dict(row)
    pid, start, boot = fields.pop("pid"), fields.pop("pid_start"), fields.pop("boot")
    fields["options"] = tuple(json.loads(fields["options"]))
    fields["gpus"] = tuple(json.loads(fields["gpus"]))
    return Row(**fields, process=ProcessIdentity(pid, start, boot) if pid is not None else None)


def update(connection: sqlite3.Connection, entry: int, changes: Mapping[str, Any]) -> None:
    """Change columns of an entry; the names are those of the table, never a user's."""
    columns = ", ".join(f"{name} = ?" for name in changes)
    connection.execute(f"UPDATE entries SET {columns} WHERE id = ?", (*changes.values(), entry))


_LOG_BYTES = 1 << 16
"""Bytes at the end of a log that are searched for the last error."""


NO_MESSAGE = "the command ended before the run began, without a message"


@dataclass(frozen=True, slots=True)
class Standing:
    """How a started entry stands.

    Attributes:
        state: Its state.
        began: Whether the command ever began; if not, the entry can be started again.
        occupied: Whether processes of it still run, so that its GPUs are not free.
        message: What went wrong, or None.
    """

    state: EntryState
    began: bool = True
    occupied: bool = False
    message: str | None = None


def read_standing(row: Row, log: Path) -> Standing:
    """Return how a started entry stands.

    Args:
        row: The entry; it has been started.
        log: The file with what its command printed.
    """
    folder = Path(row.folder)
    alive = row.process is not None and is_alive(row.process)
    start = _own_start(folder, row.launch_id)
    if start is None:
        if alive:
            return Standing(EntryState.STARTING, occupied=True)
        return _ended_early(row, folder, log)
    if alive or any(live_workers(folder)):
        return Standing(EntryState.RUNNING, occupied=True)
    try:
        view = read_view(folder)
    except Exception as error:
        # Whatever one folder holds, the other entries are listed.
        return Standing(EntryState.DEAD, message=str(error))
    # Ranks seem to run for a while after their last sign of life, but their processes have gone.
    state = EntryState.DEAD if view.state == "running" else EntryState(view.state)
    message = view.failure.message if view.failure is not None else None
    return Standing(state, message=message)


def _own_start(folder: Path, launch_id: str) -> Start | None:
    """Return the start in ``run.json`` if it is that of the entry, not an earlier or a later one."""
    try:
        start = read_start(folder)
    except (ConfigError, OSError):
        return None
    return start if start.launch_id == launch_id else None


def _ended_early(row: Row, folder: Path, log: Path) -> Standing:
    """Return how an entry stands whose command has ended and whose start the run folder does not tell."""
    if row.stop_requested is not None or row.kill_requested is not None:
        return Standing(EntryState.STOPPED)
    lines = read_log_lines(log)
    if not lines:
        return Standing(EntryState.WAITING, began=False)
    error = next((line for line in reversed(lines) if line.startswith("error: ")), None)
    if error is not None:
        return Standing(EntryState.FAILED, message=error.removeprefix("error: "))
    if row.started is not None and _written_after(folder / RUN, row.started):
        return Standing(EntryState.UNKNOWN, message="a run was started in the folder outside the queue")
    return Standing(EntryState.DEAD, message=NO_MESSAGE)


def _written_after(path: Path, moment: float) -> bool:
    try:
        return path.stat().st_mtime > moment
    except OSError:
        return False


def read_log_lines(log: Path) -> list[str]:
    """Return the last lines of a log; empty if it is missing or empty."""
    try:
        return read_ends(log, tail=_LOG_BYTES)[1].decode("utf-8", errors="replace").splitlines()
    except UnreadableError:
        return []


def live_workers(folder: Path) -> Iterator[ProcessIdentity]:
    """Yield the workers of a run that run on this machine, also when their parent has died."""
    try:
        start = read_start(folder)
        started = (folder / RUN).stat().st_mtime
    except (ConfigError, OSError):
        return
    node = os.uname().nodename
    for events in tail_events(folder, ranks_in(folder, start.world_size)).values():
        for event in events:
            if event.get("kind") == "started" and event.get("node") == node and _is_live(event, started):
                process = identify(event["pid"])
                if process is not None:
                    yield process


def _is_live(event: dict[str, Any], started: float) -> bool:
    pid, written = count(event.get("pid")), moment(event.get("time"))
    if pid is None or written is None or written < started - 1.0:
        return False
    return started_before(pid, written)
