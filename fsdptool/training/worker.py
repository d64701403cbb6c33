"""What every rank runs: ``python -m fsdptool.training.worker RUN_FOLDER`` under torchrun.

Here is what surrounds the training: stop signals, logs, the parent's death, and a last word whatever
happens. The training itself is ``training/trainer.py``, imported after the first event is written.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from fsdptool.errors import ExitCode, FsdptoolError, StorageError
from fsdptool.files.text import open_for_writing
from fsdptool.garbage import skip_last_collection, without_gc
from fsdptool.runs import events as event_module
from fsdptool.runs.events import SUPERVISOR, EventLog, WorkerPhase, open_events, rank_and_attempt
from fsdptool.runs.folder import LOGS
from fsdptool.runs.signals import SignalFlag
from fsdptool.runs.watchdog import report_phase, watched
from fsdptool.training.memory_snapshot import describe_out_of_memory, is_out_of_memory

_PEER_SYMPTOMS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "remote process exited",
    "NCCL communicator was aborted",
    "Socket closed",
    "Failed to recv",
    "connectFullMesh failed",
    "Connection was likely closed",
)
"""What gloo, the TCP store and NCCL say when another rank has gone (torch 2.13)."""

_PLACE = re.compile(r"^\[[^\]]*\.\w+:\d+\]\s*")
"""Where in its own sources gloo raised, which it puts first."""

_NO_ANSWER = "another rank or the network did not answer: read the stacks in logs/"

_LINGER_SECONDS = 10.0
"""How long a rank that no other start could help waits to be ended."""

Body = Callable[[EventLog, SignalFlag], Mapping[str, Any]]


def main(arguments: list[str]) -> int:
    """Run one worker and return its exit status."""
    trusted = arguments[1:] == ["--trust-remote-code"]
    if len(arguments) != 1 + trusted:
        sys.stderr.write("usage: python -m fsdptool.training.worker RUN_FOLDER [--trust-remote-code]\n")
        return 2
    folder = Path(arguments[0])
    skip_last_collection()
    return run_guarded(folder, lambda events, flag: work(folder, events, flag, trust_remote_code=trusted))


def work(
    folder: Path, events: EventLog, flag: SignalFlag, *, trust_remote_code: bool = False
) -> Mapping[str, Any]:
    """Train what ``folder`` describes; returns the fields of the closing ``finished`` event."""
    with watched(events):
        # Before torch, whose import takes seconds.
        report_phase(events, WorkerPhase.IMPORTING)
        with without_gc():
            from fsdptool.training.trainer import train

            # Collections during the training do not walk torch's own objects.
            gc.freeze()
        return train(folder, events, flag, trust_remote_code=trust_remote_code)


def run_guarded(folder: Path, body: Body) -> int:
    """Run one worker and return its exit status.

    ``body`` gets the event log and the stop flag and returns the fields of the closing ``finished``
    event: at least ``status`` (``completed`` or ``stopped``) and ``step``. A stop is a success for
    torchrun, which would restart any other status; the parent turns it into exit status 75.
    """
    flag = SignalFlag()
    flag.install()
    try:
        events = open_events(folder)
        _redirect(folder, events.rank)
    except OSError as error:
        _refuse(StorageError(f"{folder} cannot be written: {error.strerror or error}"))
    _watch_parents(flag)
    try:
        fields = body(events, flag)
    except BaseException as error:
        fields = describe(error)
        if is_out_of_memory(error):
            memory = _last_memory(error)
            fields |= {"memory": memory, "message": f"out of memory in {memory['moment']}"}
        events.emit("failure", **fields)
        traceback.print_exc()
        sys.stderr.flush()
        _leave(fields)
    events.emit("finished", **fields)
    events.close()
    return int(ExitCode.CLEAN)


def _refuse(error: FsdptoolError) -> NoReturn:
    """End without an event file."""
    fields = describe(error)
    event_module.write_to_stderr(event_module.make_record("failure", *rank_and_attempt(), fields))
    _leave(fields)


def _leave(fields: Mapping[str, Any]) -> NoReturn:
    """End after a last word."""
    if SUPERVISOR in os.environ and not fields["retryable"]:
        # torchrun would start every rank again at once: the parent, which knows better, ends it first.
        time.sleep(_LINGER_SECONDS)
    # Not sys.exit: destructors of half-dead process groups can hang (gloo waits for its peers).
    os._exit(int(fields["exit_code"]))


def describe(error: BaseException) -> dict[str, Any]:
    """Return the fields of a ``failure`` event.

    ``retryable`` says whether starting again could help; ``secondary`` marks what is only the
    consequence of another rank's death.
    """
    text = _PLACE.sub("", str(error).strip()) or type(error).__name__
    known = isinstance(error, FsdptoolError)
    out_of_memory = is_out_of_memory(error)
    timeout = not known and ("timed out" in text.lower() or "timeout" in text.lower())
    return {
        "error": type(error).__name__,
        "message": text.splitlines()[0][:500],
        "help": getattr(error, "help", None) if known else _NO_ANSWER if timeout else None,
        "exit_code": int(exit_code(error)),
        "retryable": (not known or exit_code(error) is ExitCode.WORKER_FAILED)
        and not is_out_of_memory(error),
        "secondary": not known and any(symptom in text for symptom in _PEER_SYMPTOMS),
        "timeout": timeout,
        "out_of_memory": out_of_memory,
        "traceback": _shortened(traceback.format_exception(error)),
    }


def _last_memory(error: BaseException) -> dict[str, Any]:
    """Describe the memory; with little of it left even that may fail."""
    try:
        return describe_out_of_memory(error)
    except Exception as second:
        return {"moment": f"unknown ({type(second).__name__} while looking)", "live": [], "largest": []}


def exit_code(error: BaseException) -> ExitCode:
    """Return the exit status of a worker that ends with ``error``."""
    if isinstance(error, FsdptoolError):
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    return ExitCode.WORKER_FAILED


def _redirect(folder: Path, rank: int) -> None:
    """Under the parent, send what libraries print to a log of this rank; keep the way to the parent."""
    if SUPERVISOR not in os.environ:
        return
    sys.stdout.flush()
    sys.stderr.flush()
    event_module.fallback_stream = os.fdopen(os.dup(2), "w")
    log = open_for_writing(folder / LOGS / f"rank-{rank:05d}.log", append=True)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


def _watch_parents(flag: SignalFlag) -> None:
    """Ask for a stop when torchrun or the fsdptool parent dies: orphans save and leave."""
    parent = os.getppid()
    supervisor = int(os.environ.get(SUPERVISOR, "0"))

    def watch() -> None:
        while not flag.requested:
            if os.getppid() != parent or (supervisor and not _alive(supervisor)):
                flag.request(signal.SIGTERM)
                return
            time.sleep(1.0)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _shortened(lines: list[str], *, ends: int = 12) -> list[str]:
    """Keep where the worker was and what failed; the library frames between tell least."""
    return lines if len(lines) <= 2 * ends else [*lines[:ends], "  ...\n", *lines[-ends:]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
