"""Processes that outlive the one that started them: which is which, and how they are signalled.

A process id alone names nobody for long: the kernel gives it to another process. Together with the start
time and the boot it names one process for ever (Linux: field 22 of ``/proc/PID/stat``, proc(5)).
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdptool.errors import StorageError
from fsdptool.runs.folder import LOCK
from fsdptool.runs.view import lock_holder

_GATE = 'read -r go || exit 0; echo "started"; exec "$@" </dev/null'
"""Runs its arguments once a line arrives on standard input; without one (the parent has died) it ends."""

_CLOCK_SECONDS = 30.0
"""How far the clock may have been set since an event was written."""

_START_FIELD = 22 - 3
"""Index of the start time among the fields that follow the name of the program."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """One process of this machine.

    Attributes:
        pid: Its process id.
        start: Clock ticks from the boot to its start.
        boot: Id of the boot.
    """

    pid: int
    start: int
    boot: str


def boot_id() -> str:
    """Return the id of this boot of the machine; empty where the system does not tell it."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return ""


def _stat(pid: int) -> list[str]:
    """Return the fields of ``/proc/PID/stat`` from the state on; empty without such a process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def identify(pid: int) -> ProcessIdentity | None:
    """Return the identity of a process that runs now; None if there is none."""
    fields = _stat(pid)
    if len(fields) <= _START_FIELD:
        return None
    return ProcessIdentity(pid, int(fields[_START_FIELD]), boot_id())


def is_alive(process: ProcessIdentity) -> bool:
    """Say whether a process still runs: this one, not another with its id, and not a zombie."""
    fields = _stat(process.pid)
    if len(fields) <= _START_FIELD or fields[0] in ("Z", "X"):
        return False
    return int(fields[_START_FIELD]) == process.start and boot_id() == process.boot


def started_before(pid: int, moment: float) -> bool:
    """Say whether the process with this id runs and was started before ``moment``.

    Args:
        pid: A process id that a file names.
        moment: Seconds since 1970 at which the file was written; a later process only has the id.
    """
    fields = _stat(pid)
    if len(fields) <= _START_FIELD or fields[0] in ("Z", "X"):
        return False
    begun = _boot_time() + int(fields[_START_FIELD]) / os.sysconf("SC_CLK_TCK")
    # The boot time is told in whole seconds and follows steps of the clock.
    return begun <= moment + _CLOCK_SECONDS


def _boot_time() -> float:
    with contextlib.suppress(OSError):
        for line in Path("/proc/stat").read_text(encoding="ascii").splitlines():
            if line.startswith("btime "):
                return float(line.split()[1])
    return 0.0


def send_signals(process: ProcessIdentity, *numbers: int) -> bool:
    """Send signals to one process; return False if it has ended.

    The process is opened before it is compared, so that no other one can receive them.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except OSError:
        return False
    try:
        if not is_alive(process):
            return False
        for number in numbers:
            signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(descriptor)
    return True


@dataclass(slots=True)
class GatedProcess:
    """A process that waits for permission to begin.

    Attributes:
        identity: Which one it is. It stays the same when the command begins.
        process: The handle of its parent.
    """

    identity: ProcessIdentity
    process: subprocess.Popen[bytes]

    def release(self) -> None:
        """Let the command begin."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError), self.process.stdin as gate:
            gate.write(b"go\n")

    def abandon(self) -> None:
        """End the process without the command having begun."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def start_gated(
    argv: Sequence[str], *, log: Path, environment: Mapping[str, str], folder: Path
) -> GatedProcess:
    """Start a process of its own session that begins ``argv`` only when it is released.

    The caller can record the identity first. If it dies before the release, the command never begins.

    Args:
        argv: The command.
        log: File that receives what it prints; its first line is ``started``.
        environment: Its environment.
        folder: Its working directory.

    Raises:
        StorageError: The log cannot be written, or the process cannot be started.
    """
    try:
        with log.open("wb") as stream:
            process = subprocess.Popen(
                ["/bin/sh", "-c", _GATE, "fsdptool", *argv],
                stdin=subprocess.PIPE,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env=dict(environment),
                cwd=folder,
                start_new_session=True,
            )
    except OSError as error:
        raise StorageError(
            f"the run cannot be started: {error.strerror or error} ({error.filename or log})",
            help="free disk space, and check that the folder exists",
        ) from error
    identity = identify(process.pid)
    assert identity is not None, "a child that was not waited for has an entry in /proc"
    return GatedProcess(identity, process)


def stop_run(folder: Path, *, kill: bool = False) -> bool:
    """Ask the run in a folder to save and stop, whoever started it; return False if none is live here.

    Args:
        folder: The run folder.
        kill: End it at once instead, without a checkpoint.
    """
    pid = lock_holder(folder / LOCK)
    process = identify(pid) if pid is not None and pid != os.getpid() else None
    # Once more: the process that held the lock may have ended before it was identified.
    if process is None or lock_holder(folder / LOCK) != pid:
        return False
    return send_signals(process, signal.SIGTERM, *((signal.SIGINT,) if kill else ()))
