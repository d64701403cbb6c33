"""Says what went wrong in a run folder of ``fsdptool train``, or in the logs of any run. Torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdptool.errors import ConfigError, StorageError
from fsdptool.files.text import is_file, is_folder
from fsdptool.files.values import moment, read_own_json
from fsdptool.records.diagnosis import FailureDiagnosis, FailurePhase, RecognisedFailure
from fsdptool.records.run import RunView
from fsdptool.rules import signatures
from fsdptool.runs.events import STARTUP, WorkerPhase, ranks_in, tail_events
from fsdptool.runs.folder import FLIGHT_RECORD, LOGS, RUN
from fsdptool.runs.logs import LogText, read_log
from fsdptool.runs.recognition import diagnose_logs, in_phase
from fsdptool.runs.recordings.flight_records import (
    FlightRecord,
    absent_ranks,
    is_flight_record,
    read_flight_record,
)
from fsdptool.runs.view import read_view
from fsdptool.runs.watchdog import phase_text

_SILENT_SECONDS = 60.0


def diagnose(target: Path | Sequence[Path]) -> FailureDiagnosis:
    """Recognise what went wrong in a run folder of ``fsdptool train``, or in the logs of one run.

    Args:
        target: A run folder, a log, or several logs, such as one of each rank.

    Raises:
        ConfigError: A folder is not a run folder, or is one of several targets.
        StorageError: A log cannot be read.
    """
    targets = [target] if isinstance(target, Path) else list(target)
    if len(targets) == 1 and is_folder(targets[0]):
        return _diagnose_run(targets[0])
    if folder := next((path for path in targets if is_folder(path)), None):
        raise ConfigError(f"{folder} is a folder", help="give one run folder, or logs of one run")
    records = {path: read_flight_record(path) for path in targets if is_flight_record(path)}
    logs = tuple(records[path].log if path in records else read_log(path) for path in targets)
    answer = diagnose_logs(" ".join(map(str, targets)), logs)
    return replace(answer, notes=(*answer.notes, *_without_record(records.values())))


def _without_record(records: Collection[FlightRecord]) -> Iterator[str]:
    """Name the ranks of a run whose flight record is not given, where others are."""
    if absent := absent_ranks(records):
        shown = ", ".join(map(str, absent[:8])) + (", ..." if len(absent) > 8 else "")
        some = "ranks" if len(absent) > 1 else "rank"
        yield f"the flight record of {some} {shown} is missing: look there first"


def _diagnose_run(folder: Path) -> FailureDiagnosis:
    if not is_file(folder / RUN):
        raise ConfigError(
            f"{folder} is not a run folder: {RUN} is missing",
            help="give a log file, or a folder that `fsdptool train` wrote",
        )
    view = read_view(folder)
    logs = tuple(_run_logs(folder, view))
    answer = diagnose_logs(str(folder), logs, _run_versions(folder))
    failed = view.state in ("failed", "dead")
    if not failed:
        # A run that goes on or ended well logs warnings that look like failures.
        answer = replace(answer, failures=(), exception=None, ended_well=False)
    notes = _notes(view, disk_full=any(item.code == _DISK_FULL for item in answer.failures))
    return replace(
        answer,
        failures=tuple(in_phase(item, item.phase or _phase_of_run(view, item)) for item in answer.failures),
        failed=failed,
        run=view,
        notes=(*answer.notes, *notes) if failed else tuple(notes),
        memory=_memory_account(folder) if failed else None,
        facts=None,
    )


def _run_versions(folder: Path) -> Mapping[str, str]:
    """Return the versions of libraries that a run was started with."""
    run = read_own_json(folder / RUN)
    libraries = run.get("libraries") if isinstance(run, dict) else None
    return libraries if isinstance(libraries, dict) else {}


_DISK_FULL = "RUN052"

_RUN_PHASES: Mapping[str, FailurePhase] = {
    **dict.fromkeys((*STARTUP, WorkerPhase.RESTORING), FailurePhase.LOAD),
    WorkerPhase.LOADING_DATA: FailurePhase.DATA,
    WorkerPhase.TRAINING: FailurePhase.TRAINING,
    WorkerPhase.SAVING: FailurePhase.SAVE,
    **dict.fromkeys((WorkerPhase.EVALUATING, WorkerPhase.SAMPLING), FailurePhase.EVALUATION),
}


def _phase_of_run(view: RunView, failure: RecognisedFailure) -> FailurePhase | None:
    """Return what the rank that failed was doing, if the advice depends on it and the ranks agree."""
    if not next(item for item in signatures() if item.code == failure.code).by_phase:
        return None
    first = view.failure.rank if view.failure is not None else None
    ranks = (first,) if first is not None else failure.ranks
    phases = {_RUN_PHASES.get(seen.phase) for seen in view.ranks if seen.rank in ranks or not ranks}
    return phases.pop() if len(phases) == 1 else None


def _run_logs(folder: Path, view: RunView) -> Iterator[LogText]:
    """Yield what the ranks and the launcher of the last start said, the rank that failed first in front."""
    ranks = ranks_in(folder, view.world_size)
    for rank, events in tail_events(folder, ranks).items():
        for event in events:
            recent = (moment(event.get("time")) or 0.0) >= view.started - 5.0
            if event.get("kind") == "failure" and recent:
                yield _failure_text(rank, event)
    if view.failure is not None:
        message = view.failure.message
        yield LogText("summary.json", message, len(message), len(message))
    for rank in ranks:
        path = folder / LOGS / f"rank-{rank:05d}.log"
        with contextlib.suppress(StorageError):
            yield read_log(path, name=f"{LOGS}/{path.name}", rank=rank)
        path = folder / LOGS / f"{FLIGHT_RECORD}{rank}"
        with contextlib.suppress(StorageError, ConfigError):
            if is_flight_record(path):
                yield read_flight_record(path, name=f"{LOGS}/{path.name}").log
    with contextlib.suppress(StorageError):
        yield read_log(folder / LOGS / "launcher.log", name=f"{LOGS}/launcher.log")


def _failure_text(rank: int, event: Mapping[str, Any]) -> LogText:
    lines = event.get("traceback")
    frames = "".join(map(str, lines)) if isinstance(lines, list) else ""
    text = f"{frames}\n{event.get('message', '')}\n"
    return LogText(f"events/rank-{rank:05d}.jsonl", text, len(text), len(text), rank)


def _memory_account(folder: Path) -> Mapping[str, Any] | None:
    with contextlib.suppress(ConfigError):
        account = read_own_json(folder / LOGS / "out-of-memory.json")
        return account if _is_account(account) else None
    return None


def _is_account(account: Any) -> bool:
    """Say whether an account of a lack of memory has what its text shows, in the right types."""
    sizes = dict.fromkeys(("planned_bytes", "peak_bytes"), int | None)
    named = dict.fromkeys(("planned_moment", "peak_moment"), str | None)
    if not _has(account, {"rank": int | None, "seen": dict, "next_steps": list, **sizes, **named}):
        return False
    seen = {"requested_bytes": None, "allocated_bytes": None, "live": [], **account["seen"]}
    asked = {"moment": str, "requested_bytes": int | None, "allocated_bytes": int | None, "live": list}
    step = {"change": str, "cost": str, "device_total_bytes": int | None}
    return (
        _has(seen, asked)
        and all(_has(item, {"name": str, "bytes": int}) for item in seen["live"])
        and all(_has(item, step) for item in account["next_steps"])
    )


def _has(value: Any, kinds: Mapping[str, Any]) -> bool:
    """Say whether a value is an object with these keys and types."""
    return isinstance(value, dict) and all(
        key in value and isinstance(value[key], kinds[key]) for key in kinds
    )


def _notes(view: RunView, *, disk_full: bool) -> Iterator[str]:
    """Yield facts of the run that bear on its end."""
    if view.state == "dead" and disk_full:
        yield "the processes are gone without a summary: it could not be written either"
    elif view.state == "dead":
        yield (
            "the processes are gone without a summary: the machine went down, or the kernel or the job system"
            " ended all of them at once"
        )
    for phase in view.memory:
        planned, seen = phase.predicted_bytes, phase.measured_bytes
        if planned and seen and seen > 1.03 * planned:
            over = 100.0 * (seen - planned) / planned
            yield f"{phase.name} needed {over:.0f} % more memory than planned"
    latest = max((rank.progressed for rank in view.ranks), default=0.0)
    for rank in view.ranks:
        silent = rank.alive - rank.progressed
        if view.state == "running" and silent > _SILENT_SECONDS:
            yield f"rank {rank.rank} has made no progress for {silent:.0f} s ({phase_text(rank)})"
        elif view.state == "dead" and latest - rank.progressed > _SILENT_SECONDS:
            yield f"rank {rank.rank} was last seen {latest - rank.progressed:.0f} s before the others"
    if (note := checkpoint_note(view)) is not None:
        yield note


def checkpoint_note(view: RunView) -> str | None:
    """Return from where a run that has ended goes on; None while it runs, and where nothing is lost."""
    step = view.last_checkpoint
    if step is not None and view.state != "running":
        return f"the newest checkpoint is that of step {step}: --resume auto continues there"
    if view.lost_steps:
        steps = "step" if view.lost_steps == 1 else f"{view.lost_steps} steps"
        return f"no checkpoint exists: starting again loses the {steps} of the run"
    return None
