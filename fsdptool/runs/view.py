"""A run as it stands, read from its folder alone: while it runs, after it, and after its sudden end."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fsdptool.errors import ConfigError, ExitCode
from fsdptool.files.values import check
from fsdptool.records.codec import from_json
from fsdptool.records.plan import Candidate
from fsdptool.records.run import PhaseMemory, RankProgress, RunFailure, RunPhase, RunState, RunView
from fsdptool.runs.events import event_path
from fsdptool.runs.folder import (
    CHECKPOINTS,
    LOCK,
    METRICS,
    RUN,
    SUMMARY,
    read_json,
    read_prediction,
    read_start,
)
from fsdptool.runs.manifest import lost_steps, newest_step
from fsdptool.runs.progress import is_running, read_progress

_TAIL_BYTES = 1 << 18
"""Bytes at the end of a file of lines that are read for the latest figures."""

_RECENT_STEPS = 50
"""Steps that the rates and the remaining time are estimated from."""

_SILENT_SECONDS = 60.0
"""After how long without a sign of life a run on another machine counts as dead, at least."""


def tail_records(path: Path, limit: int = _TAIL_BYTES) -> list[dict[str, Any]]:
    """Return the records in the last ``limit`` bytes of a file of JSON lines; empty without the file."""
    try:
        with path.open("rb") as stream:
            size = stream.seek(0, os.SEEK_END)
            stream.seek(max(size - limit, 0))
            lines = stream.read().splitlines()[size > limit :]
    except OSError:
        return []
    records = []
    for line in lines:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict):
                records.append(record)
    return records


class ViewReader(Protocol):
    """Reads a run as it stands, as :func:`read_view` does."""

    def __call__(self, folder: Path, *, gpus: Sequence[str] = (), now: float | None = None) -> RunView:
        """Return the run in ``folder``; arguments and errors are those of :func:`read_view`."""
        ...


def read_view(folder: Path, *, gpus: Sequence[str] = (), now: float | None = None) -> RunView:
    """Return the run in ``folder`` as it stands.

    Args:
        folder: The run folder.
        gpus: Ids of the GPUs of this machine that the run has claimed.
        now: Seconds since 1970; None is the present.

    Raises:
        ConfigError: The folder is not a run folder, or ``run.json`` is damaged.
    """
    now = time.time() if now is None else now
    start = read_start(folder)
    # A copied folder has files that are younger than what they tell of.
    written = (folder / RUN).stat().st_mtime
    started = min(written, start.started if start.started is not None else written)
    summary = _summary_of_this_start(folder, started)
    recipe = _optional_json(folder / "recipe.json")
    events = {rank: _events_of_this_start(folder, rank, started) for rank in range(start.world_size)}
    progress = {rank: read_progress(folder, rank) for rank in events}
    ranks = tuple(seen for seen in progress.values() if seen is not None and seen.alive >= started - 1.0)
    metrics = [line for line in tail_records(folder / METRICS) if is_step(line)]
    last = metrics[-1] if metrics else {}
    signs = [_number(last.get("time")), *(seen.alive for seen in ranks)]
    updated = max((sign for sign in signs if sign is not None), default=None)
    state = _state(folder, summary, [seen for seen in ranks if not _has_ended(events[seen.rank])], now)
    pace = _pace([line for line in metrics if line["time"] >= started])
    total = _total_steps(events.get(0, ()), recipe, last)
    step = last.get("step", 0)
    newest = newest_step(folder / CHECKPOINTS)
    prediction = _prediction(folder)
    memory = _memory(prediction, events.values(), summary)
    peaks = [_number(line.get("memory_allocated_peak_bytes")) for line in metrics]
    peaks += [phase.measured_bytes for phase in memory]
    peaks += [_number(value) for value in summary.get("measured_peak_bytes", ())]
    return RunView(
        folder=str(folder),
        model=(recipe.get("model") or {}).get("reference"),
        method=(recipe.get("method") or {}).get("name"),
        state=state,
        device=start.device,
        world_size=start.world_size,
        nodes=tuple(dict.fromkeys(str(e["node"]) for log in events.values() for e in log if e.get("node"))),
        gpus=tuple(gpus),
        started=started,
        updated=updated,
        step=step,
        total_steps=total,
        eta_seconds=_remaining(pace, total, step, last, now) if state == "running" else None,
        loss=_number(last.get("loss")),
        grad_norm=_number(last.get("grad_norm")),
        lr=_number(last.get("lr")),
        step_seconds=pace.step_seconds,
        tokens_per_second=pace.tokens_per_second,
        samples_per_second=pace.samples_per_second,
        memory=memory,
        predicted_peak_bytes=prediction.allocated_peak_bytes if prediction else None,
        measured_peak_bytes=max((int(peak) for peak in peaks if peak is not None), default=None),
        ranks=ranks,
        last_checkpoint=newest,
        resumable=(state != "completed" and newest is not None) or bool(summary.get("resumable")),
        exit_code=_exit_code(state, summary),
        failure=_failure(summary) or _last_failure(state, events.values()),
        lost_steps=0 if state in ("running", "completed") else lost_steps(folder),
    )


def _number(value: object) -> float | None:
    """Return a number of a file that somebody else may have written, or None."""
    return value if isinstance(value, int | float) and not isinstance(value, bool) else None


def is_step(line: Mapping[str, Any]) -> bool:
    """Say whether a line of ``metrics.jsonl`` has the figures that every step has."""
    numbers = ("step", "time", "step_seconds", "samples")
    return all(_number(line.get(name)) is not None for name in numbers) and line["step"] >= 1


@dataclass(frozen=True, slots=True)
class _Pace:
    """Rates of the latest steps; ``wall_seconds`` includes evaluations and saves between steps."""

    step_seconds: float | None = None
    wall_seconds: float | None = None
    tokens_per_second: float | None = None
    samples_per_second: float | None = None


def _pace(lines: Sequence[Mapping[str, Any]]) -> _Pace:
    # The first step of a start compiles, allocates and starts the loading processes.
    recent = [line for line in lines if line["step_seconds"]][1:][-_RECENT_STEPS:]
    if not recent:
        return _Pace()
    seconds = [float(line["step_seconds"]) for line in recent]
    total = sum(seconds)
    tokens = [count for line in recent if (count := _number(line.get("tokens"))) is not None]
    steps = recent[-1]["step"] - recent[0]["step"]
    wall = (recent[-1]["time"] - recent[0]["time"]) / steps if steps > 0 else statistics.median(seconds)
    return _Pace(
        statistics.median(seconds),
        max(wall, 0.0),
        sum(tokens) / total if tokens else None,
        sum(line["samples"] for line in recent) / total,
    )


def _remaining(
    pace: _Pace, total: int | None, step: int, last: Mapping[str, Any], now: float
) -> float | None:
    if total is None or pace.wall_seconds is None:
        return None
    since = now - float(last.get("time") or now)
    return max((total - step) * pace.wall_seconds - min(since, pace.wall_seconds), 0.0)


def _total_steps(
    events: Iterable[Mapping[str, Any]], recipe: Mapping[str, Any], last: Mapping[str, Any]
) -> int | None:
    """Return the steps of the run: as the ranks counted them, as the recipe says, or from the epochs."""
    for event in events:
        if event.get("kind") == "length" and isinstance(event.get("steps"), int):
            return int(event["steps"])
    if isinstance(recipe.get("steps"), int):
        return int(recipe["steps"])
    epochs, done = _number(recipe.get("epochs")), _number(last.get("epoch"))
    return round(last["step"] * epochs / done) if epochs and done else None


def _memory(
    plan: Candidate | None, logs: Iterable[Iterable[Mapping[str, Any]]], summary: Mapping[str, Any]
) -> tuple[PhaseMemory, ...]:
    # A phase without device memory (an export on the host) has nothing to measure.
    predicted = {str(phase.name): phase.allocated_bytes for phase in plan.phases} if plan else {}
    predicted = {name: value for name, value in predicted.items() if value != 0}
    measured: dict[str, int] = {}
    for log in logs:
        for event in log:
            for name, value in (event.get("moments") or {}).items():
                measured[name] = max(int(_number(value) or 0), measured.get(name, 0))
    for name, values in summary.get("measured_moments", {}).items():
        known = [int(number) for value in values if (number := _number(value)) is not None]
        if known:
            measured[name] = max(known)
    if plan and not predicted and plan.allocated_peak_bytes is not None:
        predicted = {"step": plan.allocated_peak_bytes}
    order = [phase.value for phase in RunPhase]
    names = sorted(
        {*predicted, *measured}, key=lambda name: order.index(name) if name in order else len(order)
    )
    return tuple(PhaseMemory(name, predicted.get(name), measured.get(name)) for name in names)


def _state(folder: Path, summary: Mapping[str, Any], ranks: Iterable[RankProgress], now: float) -> RunState:
    if summary:
        state: RunState = summary["status"]
        return state
    if is_locked(folder / LOCK):
        return "running"
    recent = any(now - seen.alive < max(_SILENT_SECONDS, 4.0 * seen.interval) for seen in ranks)
    return "running" if recent else "dead"


def _has_ended(events: Iterable[Mapping[str, Any]]) -> bool:
    """Say whether the process of a rank of this machine has gone, as far as its events name it."""
    started = [event for event in events if event.get("kind") == "started"]
    if not started or started[-1].get("node") != os.uname().nodename:
        return False
    pid = started[-1].get("pid")
    return isinstance(pid, int) and not is_running(pid)


def is_locked(path: Path) -> bool:
    """Say whether a process on this machine holds a lock on a file; nothing is locked to find out."""
    return lock_holder(path) is not None


def lock_holder(path: Path) -> int | None:
    """Return the id of the process on this machine that holds a lock on a file, or None.

    Linux lists the locks of all processes in ``/proc/locks`` (proc(5)).
    """
    try:
        wanted = path.stat()
        table = Path("/proc/locks").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    place = f"{os.major(wanted.st_dev):02x}:{os.minor(wanted.st_dev):02x}:{wanted.st_ino}"
    for line in table.splitlines():
        fields = line.split()
        # A process that waits for the lock follows an arrow.
        if place in fields and "->" not in fields:
            return int(fields[fields.index(place) - 1])
    return None


def _summary_of_this_start(folder: Path, started: float) -> dict[str, Any]:
    """Return ``summary.json``, or nothing if it is missing, damaged or that of an earlier start."""
    try:
        if (folder / SUMMARY).stat().st_mtime < started:
            return {}
    except OSError:
        return {}
    summary = _optional_json(folder / SUMMARY)
    try:
        check(summary, "summary", where=SUMMARY)
    except ConfigError:
        return {}
    return summary


def _optional_json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(ConfigError):
        document = read_json(path)
        return document if isinstance(document, dict) else {}
    return {}


def _prediction(folder: Path) -> Candidate | None:
    with contextlib.suppress(ConfigError):
        return read_prediction(folder)
    return None


def _events_of_this_start(folder: Path, rank: int, started: float) -> tuple[dict[str, Any], ...]:
    # Clocks of other machines may differ by a little.
    events = tail_records(event_path(folder, rank), limit=16 * _TAIL_BYTES)
    return tuple(event for event in events if (event.get("time") or 0.0) >= started - 5.0)


def _exit_code(state: RunState, summary: Mapping[str, Any]) -> int | None:
    if state == "running":
        return None
    return int(summary.get("exit_code", ExitCode.WORKER_FAILED))


def _failure(summary: Mapping[str, Any]) -> RunFailure | None:
    failure = summary.get("failure")
    with contextlib.suppress(ConfigError):
        return from_json(RunFailure, failure) if failure else None
    return None


def _last_failure(state: RunState, logs: Iterable[Iterable[Mapping[str, Any]]]) -> RunFailure | None:
    """Return the first failure that a rank of a dead run reported; None for other runs."""
    if state != "dead":
        return None
    failures = [event for log in logs for event in log if event.get("kind") == "failure"]
    if not failures:
        return None
    first = min(failures, key=lambda event: (bool(event.get("secondary")), event.get("time") or 0.0))
    message = f"rank {first.get('rank')}: {first.get('message')}"
    return RunFailure(first.get("rank"), message, first.get("help"), int(first.get("exit_code") or 4))


def find_run_folders(roots: Iterable[Path], *, depth: int = 3) -> Iterator[Path]:
    """Yield the run folders among ``roots`` and below them.

    Args:
        roots: Folders to look in.
        depth: Levels of folders below each root that are searched; run folders are not searched themselves.
    """
    for root in roots:
        if (root / RUN).is_file():
            yield root
        elif depth > 0:
            with contextlib.suppress(OSError):
                inner = sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
                yield from find_run_folders(
                    (path for path in inner if not path.name.startswith(".")), depth=depth - 1
                )
