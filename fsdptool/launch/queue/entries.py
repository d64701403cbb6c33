"""The entries of the queue: they join, move, are held and cancelled; their runs are stopped.

Programs that show the queue and programs that start its entries (``launch/queue/scheduler.py``) share one
file. A run is a process of its own that outlives all of them.
"""

from __future__ import annotations

import json
import secrets
import signal
import sqlite3
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fsdptool.errors import ConfigError
from fsdptool.launch.command import available_cores
from fsdptool.launch.machine import live_claims
from fsdptool.launch.processes import is_alive, send_signals
from fsdptool.launch.queue.file import (
    QueueFile,
    Row,
    Standing,
    live_workers,
    queue_folder,
    read_row,
    read_standing,
    update,
)
from fsdptool.launch.queue.needs import check_run_folder, find_needs, find_waits, options_of_another_start
from fsdptool.records.queue import EntryState, Needs, QueueEntry, QueueReport, RunRequest
from fsdptool.runs.folder import LOCK, RUN, default_folder
from fsdptool.runs.view import is_locked, lock_holder

Direction = Literal["up", "down", "first", "last"]

SCHEDULER_LOCK = "scheduler.lock"


class Queue:
    """The queue in a folder.

    Args:
        folder: The folder; :func:`~fsdptool.launch.queue.file.queue_folder` by default.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else queue_folder()
        self.file = QueueFile(self.folder)

    def log_path(self, entry: int) -> Path:
        """Return the file with what the command of an entry printed."""
        return self.folder / "logs" / f"{entry}.log"

    def add(
        self,
        recipe: Path,
        config: Path,
        *,
        output: Path | None = None,
        options: Sequence[str] = (),
        needs: Needs | None = None,
        visible: str | None = None,
        held: bool = False,
        first: bool = False,
    ) -> int:
        """Append a run to the queue; return the number of its entry.

        Args:
            recipe: The recipe.
            config: The accelerate YAML, or another dialect.
            output: The run folder; None is ``runs/RECIPE``, or what ``runs.folder.default_folder`` returns.
            options: Further options of ``fsdptool train``, as they are typed.
            needs: What the run needs, as ``needs.find_needs`` returns it; None finds it now.
            visible: GPUs of the run as ``CUDA_VISIBLE_DEVICES`` names them, if the configuration does not.
            held: Whether it waits until it is released.
            first: Whether it starts before those that wait already.

        Raises:
            ConfigError: A file is missing or invalid, the folder already contains a run that the options do
                not continue or replace, or an entry of the queue uses the folder.
            StorageError: The queue cannot be written.
        """
        folder = default_folder(recipe, Path("runs")) if output is None else output.absolute()
        if not recipe.is_file():
            raise ConfigError(f"{recipe} is not a file", help="check the path of the recipe")
        if needs is None:
            needs = find_needs(config, folder, cpu="--cpu" in options, visible=visible)
        check_run_folder(folder, options)
        values = {
            "stage": "held" if held else "waiting",
            "launch_id": f"queue-{secrets.token_hex(8)}",
            "recipe": str(recipe.absolute()),
            "config": str(config.absolute()),
            "folder": str(folder),
            "directory": str(Path.cwd()),
            "options": json.dumps(list(options)),
            "visible": visible,
            "gpus": json.dumps(sorted(needs.gpus)),
            "slots": needs.slots,
            "added": time.time(),
        }
        with self.file.write() as connection:
            pending = "FROM entries WHERE stage IN ('waiting', 'held')"
            taken = connection.execute(f"SELECT id {pending} AND folder = ?", (str(folder),)).fetchone()
            if taken is not None:
                raise ConfigError(
                    f"entry {taken['id']} of the queue waits for {folder}",
                    help="choose another folder with --output, or cancel that entry",
                )
            edge = "SELECT MIN(place) - 1" if first else "SELECT MAX(place) + 1"
            place = connection.execute(f"{edge} FROM entries").fetchone()[0] or 0
            names = ", ".join(("place", *values))
            marks = ", ".join("?" * (len(values) + 1))
            cursor = connection.execute(
                f"INSERT INTO entries ({names}) VALUES ({marks})",
                (place, *values.values()),
            )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def submit(self, request: RunRequest) -> int:
        """Append the run that a request describes; return the number of its entry. Errors as :meth:`add`."""
        if request.resume and request.force:
            raise ConfigError("--resume and --force cannot be combined", help="use only one of them")
        if request.start_over and not request.resume:
            raise ConfigError("--start-over says what --resume may do", help="add --resume")
        return self.add(
            Path(request.recipe),
            Path(request.config),
            output=Path(request.output) if request.output is not None else None,
            options=request.train_options(),
            visible=",".join(request.gpus) or None,
            held=request.hold,
            first=request.first,
        )

    def rows(self) -> tuple[Row, ...]:
        """Return the entries as the file holds them, in their order.

        Raises:
            StorageError: The queue cannot be read.
        """
        if not self.file.path.exists():
            return ()
        with self.file.read() as connection:
            return tuple(
                read_row(row) for row in connection.execute("SELECT * FROM entries ORDER BY place, id")
            )

    def latest(self, folder: Path) -> Row | None:
        """Return the entry that last started, or will start, a run in a folder; None if none does.

        Raises:
            StorageError: The queue cannot be read.
        """
        wanted = str(folder.resolve())
        rows = [row for row in self.rows() if str(Path(row.folder).resolve()) == wanted]
        rows.sort(key=lambda row: (row.stage == "started", row.started is not None, row.id))
        return rows[-1] if rows else None

    def slots(self) -> int:
        """Return the process slots of runs on the CPU: what was set, or the cores of this machine."""
        if self.file.path.exists():
            with self.file.read() as connection:
                row = connection.execute("SELECT value FROM settings WHERE name = 'slots'").fetchone()
            if row is not None:
                return int(row["value"])
        return available_cores()

    def set_slots(self, count: int) -> None:
        """Set the process slots that runs on the CPU share.

        Raises:
            ConfigError: There would be none.
        """
        if count < 1:
            raise ConfigError(f"{count} process slots are too few", help="set 1 or more")
        with self.file.write() as connection:
            connection.execute("INSERT OR REPLACE INTO settings VALUES ('slots', ?)", (str(count),))

    def hold(self, entry: int) -> None:
        """Keep a waiting entry from being started until it is released; errors as :meth:`cancel`."""
        self._change(entry, ("waiting", "held"), {"stage": "held"})

    def release(self, entry: int) -> None:
        """Let a held entry be started; errors as :meth:`cancel`."""
        self._change(entry, ("waiting", "held"), {"stage": "waiting"})

    def cancel(self, entry: int) -> None:
        """Take an entry that was not started out of the order.

        Raises:
            ConfigError: The queue has no such entry, or it was started.
            StorageError: The queue cannot be written.
        """
        self._change(entry, ("waiting", "held"), {"stage": "cancelled", "ended": time.time()})

    def remove(self, entry: int) -> None:
        """Drop an entry that has ended or was cancelled; its run folder stays.

        Raises:
            ConfigError: The queue has no such entry, or it has not ended.
            StorageError: The queue cannot be written.
        """
        with self.file.write() as connection:
            row = _find(connection, entry)
            if row.stage not in ("ended", "cancelled"):
                raise ConfigError(f"entry {entry} has not ended", help="stop or cancel it first")
            connection.execute("DELETE FROM entries WHERE id = ?", (entry,))
        self.log_path(entry).unlink(missing_ok=True)

    def move(self, entry: int, direction: Direction) -> None:
        """Change the place of an entry among those that wait; errors as :meth:`cancel`.

        Args:
            entry: Its number.
            direction: One place ``up`` or ``down``, or to be ``first`` or ``last``.
        """
        with self.file.write() as connection:
            _require(_find(connection, entry), ("waiting", "held"))
            pending = connection.execute(
                "SELECT id FROM entries WHERE stage IN ('waiting', 'held') ORDER BY place, id"
            )
            order = [row["id"] for row in pending]
            places = sorted(
                row["place"]
                for row in connection.execute("SELECT place FROM entries WHERE stage IN ('waiting', 'held')")
            )
            at = order.index(entry)
            order.remove(entry)
            goal = {"up": at - 1, "down": at + 1, "first": 0, "last": len(order)}[direction]
            order.insert(min(max(goal, 0), len(order)), entry)
            for place, number in zip(places, order, strict=True):
                update(connection, number, {"place": place})

    def stop(self, entry: int) -> bool:
        """Ask a started run to save a checkpoint and to stop; return False if it has ended.

        Raises:
            ConfigError: The queue has no such entry, or it was not started.
            StorageError: The queue cannot be written.
        """
        row = self._change(entry, ("started",), {"stop_requested": time.time()})
        return row.process is not None and send_signals(row.process, signal.SIGTERM)

    def kill(self, entry: int) -> bool:
        """End a started run at once, without a checkpoint; return False if it has ended.

        The command ends its workers. The scheduler kills what is left some seconds later; errors as
        :meth:`stop`.
        """
        row = self._change(entry, ("started",), {"kill_requested": time.time()})
        return row.process is not None and send_signals(row.process, signal.SIGTERM, signal.SIGINT)

    def resume(self, entry: int, *, first: bool = False, start_over: bool = False) -> int:
        """Queue another start of a run that has ended, from its newest checkpoint; return the new entry.

        Args:
            entry: The entry of the run.
            first: Whether it starts before those that wait already.
            start_over: Whether it starts over if it has made steps and has no checkpoint.

        Raises:
            ConfigError: The queue has no such entry, it was not started, or it would start over.
            StorageError: The queue cannot be written.
        """
        with self.file.read() as connection:
            row = _find(connection, entry)
        _require(row, ("started", "ended"))
        options = options_of_another_start(row.options)
        if (Path(row.folder) / RUN).exists():
            options = (*options, "--resume", "auto", *(("--start-over",) if start_over else ()))
        return self.add(
            Path(row.recipe),
            Path(row.config),
            output=Path(row.folder),
            options=options,
            needs=Needs(row.folder, frozenset(row.gpus), row.slots),
            visible=row.visible,
            first=first,
        )

    def report(self) -> QueueReport:
        """Return the queue as it stands.

        Raises:
            StorageError: The queue cannot be read.
        """
        rows = self.rows()
        standings = {
            row.id: read_standing(row, self.log_path(row.id)) for row in rows if row.stage == "started"
        }
        entries = [self._entry(row, standings.get(row.id)) for row in rows]
        waiting = [entry for entry in entries if entry.state is EntryState.WAITING]
        slots = self.slots()
        waits = find_waits([entry.needs for entry in waiting], self.occupied(rows, standings), slots)
        reasons = {entry.id: wait for entry, wait in zip(waiting, waits, strict=True)}
        shown = [replace(entry, wait=reasons.get(entry.id)) for entry in entries]
        ended = [entry for entry in shown if not entry.state.active and not entry.state.pending]
        ended.sort(key=lambda entry: -(entry.ended or entry.added))
        ordered = (
            *(entry for entry in shown if entry.state.active),
            *(entry for entry in shown if entry.state.pending),
            *ended,
        )
        return QueueReport(str(self.file.path), slots, lock_holder(self.folder / SCHEDULER_LOCK), ordered)

    def occupied(self, rows: Sequence[Row], standings: Mapping[int, Standing]) -> tuple[Needs, ...]:
        """Return what live runs of this machine occupy, those that others started included.

        Args:
            rows: The entries.
            standings: How those that were started stand.
        """
        own = [row for row in rows if row.id in standings and standings[row.id].occupied]
        needs = [Needs(row.folder, frozenset(row.gpus), row.slots) for row in own]
        folders = {row.folder for row in own}
        needs += [Needs(folder, gpus) for gpus, folder in live_claims() if folder not in folders]
        folders |= {need.folder for need in needs}
        # A start without a claim: the workers of one that was killed, or on another machine.
        needs += [
            Needs(row.folder)
            for row in rows
            if row.stage == "waiting"
            and row.folder not in folders
            and (is_locked(Path(row.folder) / LOCK) or any(live_workers(Path(row.folder))))
        ]
        return tuple(needs)

    def _entry(self, row: Row, standing: Standing | None) -> QueueEntry:
        if standing is not None:
            state = standing.state
        else:
            state = EntryState(row.end_state if row.end_state is not None else row.stage)
        alive = row.stage == "started" and row.process is not None and is_alive(row.process)
        return QueueEntry(
            id=row.id,
            state=state,
            recipe=row.recipe,
            config=row.config,
            folder=row.folder,
            options=row.options,
            gpus=row.gpus,
            slots=row.slots,
            added=row.added,
            started=row.started,
            ended=row.ended,
            pid=row.process.pid if row.process is not None and alive else None,
            message=standing.message if standing is not None else row.message,
            log=str(self.log_path(row.id)) if row.started is not None else None,
        )

    def _change(self, entry: int, stages: tuple[str, ...], changes: Mapping[str, Any]) -> Row:
        """Change an entry in one of ``stages``; return it as it was."""
        with self.file.write() as connection:
            row = _find(connection, entry)
            _require(row, stages)
            update(connection, entry, changes)
        return row


def _find(connection: sqlite3.Connection, entry: int) -> Row:
    row = connection.execute("SELECT * FROM entries WHERE id = ?", (entry,)).fetchone()
    if row is None:
        raise ConfigError(f"the queue has no entry {entry}", help="`fsdptool queue list` lists the entries")
    return read_row(row)


def _require(row: Row, stages: tuple[str, ...]) -> None:
    if row.stage in stages:
        return
    said = {"started": "was started", "ended": "has ended", "cancelled": "was cancelled"}
    raise ConfigError(
        f"entry {row.id} {said.get(row.stage, 'was not started')}",
        help="`fsdptool queue list` shows the state of every entry",
    )
