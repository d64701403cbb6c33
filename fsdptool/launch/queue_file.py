"""The file of the queue: an SQLite database that survives the programs that read and write it.

Rows say what was requested and which process was started. How a started run stands is not in them: the run
folder says it.
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
from fsdptool.files.text import private_folder
from fsdptool.launch.processes import ProcessIdentity

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
