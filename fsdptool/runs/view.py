"""A run as it is, read from its folder alone: while it runs, after it, and after its sudden end; and its
course over all its starts: steps, evaluations and events, as many as a page can show.
"""

from __future__ import annotations

import contextlib
import math
import os
import statistics
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from fsdptool.errors import ConfigError, ExitCode
from fsdptool.files.text import UnreadableError, open_regular
from fsdptool.files.values import check, count, moment, number, read_own_json
from fsdptool.records.codec import from_json
from fsdptool.records.plan import Candidate
from fsdptool.records.run import (
    STEP_PHASES,
    PhaseMemory,
    RankProgress,
    RunFailure,
    RunPhase,
    RunState,
    RunView,
)
from fsdptool.records.trace import Component
from fsdptool.runs.events import copies_saves, event_path, ranks_in, read_lines, records_after, tail_events
from fsdptool.runs.folder import (
    CHECKPOINTS,
    LOCK,
    MAX_WORLD,
    METRICS,
    RUN,
    SUMMARY,
    read_prediction,
    read_start,
)
from fsdptool.runs.manifest import lost_steps, newest_step
from fsdptool.runs.watchdog import is_running, progress_of

_TAIL_BYTES = 1 << 18
"""Bytes at the end of a file of lines that are read for the latest figures."""

_RECENT_STEPS = 50
"""Steps that the rates and the remaining time are estimated from."""

_SILENT_SECONDS = 60.0
"""After how long without a sign of life a run on another machine counts as dead, at least."""


def latest_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the latest steps in ``metrics.jsonl``; empty without the file."""
    return [line for line in read_lines(folder / METRICS, limit=_TAIL_BYTES) if is_step(line)]


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
    written = _written(folder / RUN)
    started = min(written, start.started if start.started is not None else written)
    summary = _summary_of_this_start(folder, started)
    recipe = _optional_json(folder / "recipe.json")
    logs = tail_events(folder, ranks_in(folder, start.world_size))
    progress = [progress_of(folder, rank, log) for rank, log in logs.items()]
    ranks = tuple(seen for seen in progress if seen is not None and seen.alive >= started - 1.0)
    # Clocks of other machines may differ by a little.
    events = {
        rank: [event for event in log if (moment(event.get("time")) or 0.0) >= started - 5.0]
        for rank, log in logs.items()
    }
    metrics = latest_steps(folder)
    last = metrics[-1] if metrics else {}
    signs = [moment(last.get("time")), *(seen.alive for seen in ranks)]
    updated = max((sign for sign in signs if sign is not None), default=None)
    live = [seen for seen in ranks if not _has_ended(events[seen.rank])]
    state = _state(folder, summary, live, now)
    pace = _pace([line for line in metrics if line["time"] >= started])
    total = _total_steps(events.get(0, ()), recipe, last)
    step = last.get("step", 0)
    newest = newest_step(folder / CHECKPOINTS)
    prediction = _prediction(folder)
    ran = as_it_ran(prediction, folder) if prediction is not None else None
    memory = _memory(ran, events.values(), summary)
    peaks = [count(line.get("memory_allocated_peak_bytes")) for line in metrics]
    peaks += [phase.measured_bytes for phase in memory]
    peaks += [count(value) for value in summary.get("measured_peak_bytes", ())]
    return RunView(
        folder=str(folder),
        model=_text(recipe.get("model"), "reference"),
        method=_text(recipe.get("method"), "name"),
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
        loss=number(last.get("loss")),
        grad_norm=number(last.get("grad_norm")),
        lr=number(last.get("lr")),
        step_seconds=pace.step_seconds,
        tokens_per_second=pace.tokens_per_second,
        samples_per_second=pace.samples_per_second,
        memory=memory,
        predicted_peak_bytes=count(prediction.allocated_peak_bytes) if prediction else None,
        measured_peak_bytes=max((peak for peak in peaks if peak is not None), default=None),
        ranks=ranks,
        last_checkpoint=newest,
        resumable=(state != "completed" and newest is not None) or bool(summary.get("resumable")),
        exit_code=_exit_code(state, summary),
        failure=_failure(summary) or _last_failure(state, events),
        lost_steps=0 if state in ("running", "completed") else lost_steps(folder),
    )


def _written(path: Path) -> float:
    """Return when a file was written, in seconds since 1970."""
    try:
        return moment(path.stat().st_mtime) or 0.0
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}") from error


def _text(section: object, key: str) -> str | None:
    """Return a text in a section of a recipe that somebody else may have written, or None."""
    value = section.get(key) if isinstance(section, Mapping) else None
    return value if isinstance(value, str) else None


def is_step(line: Mapping[str, Any]) -> bool:
    """Say whether a line of ``metrics.jsonl`` has the figures that every step has."""
    seconds = moment(line.get("step_seconds"))
    return (
        bool(count(line.get("step")))
        and count(line.get("samples")) is not None
        and moment(line.get("time")) is not None
        and seconds is not None
        and (seconds == 0.0 or seconds > _SHORTEST)
    )


_SHORTEST = 1e-9
"""Seconds: a step takes longer, and rates of shorter ones overflow."""


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
    tokens = [found for line in recent if (found := count(line.get("tokens"))) is not None]
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
        if event.get("kind") == "length" and (steps := count(event.get("steps"))) is not None:
            return steps
    if (steps := count(recipe.get("steps"))) is not None:
        return steps
    epochs, done = number(recipe.get("epochs")), number(last.get("epoch"))
    # Both are plausible: a fraction of an epoch is more than a billionth.
    whole = last["step"] * epochs / done if epochs and done and done > _SHORTEST else None
    return count(round(whole)) if whole is not None else None


def _memory(
    plan: Candidate | None, logs: Iterable[Iterable[Mapping[str, Any]]], summary: Mapping[str, Any]
) -> tuple[PhaseMemory, ...]:
    # A phase without device memory (an export on the host) has nothing to measure.
    predicted = {str(phase.name): phase.allocated_bytes for phase in plan.phases} if plan else {}
    predicted = {name: value for name, value in predicted.items() if value is None or count(value)}
    measured: dict[str, int] = {}
    events = [event for log in logs for event in log]
    for event in events:
        moments = event.get("moments")
        for name, value in moments.items() if isinstance(moments, dict) else ():
            measured[name] = max(count(value) or 0, measured.get(name, 0))
    for name, values in summary.get("measured_moments", {}).items():
        known = [found for value in values if (found := count(value)) is not None]
        if known:
            measured[name] = max(known)
    if plan and not predicted and count(plan.allocated_peak_bytes):
        predicted = {"step": plan.allocated_peak_bytes}
    order = [phase.value for phase in RunPhase]
    names = sorted(
        {*predicted, *measured}, key=lambda name: order.index(name) if name in order else len(order)
    )
    return tuple(PhaseMemory(name, predicted.get(name), measured.get(name)) for name in names)


def as_it_ran(plan: Candidate, folder: Path) -> Candidate:
    """Return what was planned of the steps and saves that a run has made, and not of later ones.

    A plan of epochs does not know their steps: it counts the copies of asynchronous saves, which a run makes
    only before its end, and steps after the first, which find the optimizer's states.
    """
    whole = plan.allocated_peak_bytes
    copies = copies_saves(read_lines(event_path(folder, 0)))
    staged = sum(item.bytes or 0 for item in plan.components if item.name == Component.STAGED)
    before = (RunPhase.LOAD, RunPhase.FIRST_STEP)
    phases = tuple(
        phase
        if copies or phase.name in before or not (held := count(phase.allocated_bytes))
        else replace(phase, allocated_bytes=max(held - staged, 0))
        for phase in plan.phases
    )
    taken = {count(line.get("step")) for line in read_lines(folder / METRICS)} - {None}
    if taken == {1} and any(phase.name == RunPhase.FIRST_STEP and phase.allocated_bytes for phase in phases):
        reached = [phase.allocated_bytes or 0 for phase in phases if phase.name not in STEP_PHASES]
        return replace(plan, phases=phases, allocated_peak_bytes=max(reached), reserved_peak_bytes=None)
    if copies:
        return plan
    if whole is None:
        return replace(plan, phases=phases)
    early = [phase.allocated_bytes or 0 for phase in phases if phase.name in before]
    return replace(plan, phases=phases, allocated_peak_bytes=max(whole - staged, *early, 0))


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
    pid = count(started[-1].get("pid"))
    return pid is not None and not is_running(pid)


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
        if _written(folder / SUMMARY) < started:
            return {}
        summary = _optional_json(folder / SUMMARY)
        check(summary, "summary", where=SUMMARY)
    except ConfigError:
        return {}
    return summary


def _optional_json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(ConfigError):
        document = read_own_json(path)
        return document if isinstance(document, dict) else {}
    return {}


def _prediction(folder: Path) -> Candidate | None:
    with contextlib.suppress(ConfigError):
        return read_prediction(folder)
    return None


def _exit_code(state: RunState, summary: Mapping[str, Any]) -> int | None:
    if state == "running":
        return None
    code = count(summary.get("exit_code"))
    # A summary of somebody else names any number, and `watch` ends with this one.
    return code if code in _EXIT_CODES else _STATUS.get(state, ExitCode.WORKER_FAILED)


_EXIT_CODES = frozenset(map(int, ExitCode)) - {ExitCode.INTERNAL}
_STATUS = {
    "completed": ExitCode.CLEAN,
    "stopped": ExitCode.RESUMABLE,
    "interrupted": ExitCode.INTERRUPTED,
}
"""The status of a run whose summary does not tell it, by state."""


def _failure(summary: Mapping[str, Any]) -> RunFailure | None:
    failure = summary.get("failure")
    with contextlib.suppress(ConfigError):
        return from_json(RunFailure, failure) if failure else None
    return None


def _last_failure(state: RunState, logs: Mapping[int, Iterable[Mapping[str, Any]]]) -> RunFailure | None:
    """Return the first failure that a rank of a dead run reported; None for other runs."""
    if state != "dead":
        return None
    failures = [
        (bool(event.get("secondary")), moment(event.get("time")) or 0.0, rank, event)
        for rank, log in logs.items()
        for event in log
        if event.get("kind") == "failure"
    ]
    if not failures:
        return None
    *_, rank, first = min(failures, key=lambda failure: failure[:3])
    code = count(first.get("exit_code"))
    return RunFailure(
        rank,
        f"rank {rank}: {first.get('message')}",
        _text(first, "help"),
        code if code in _EXIT_CODES else int(ExitCode.WORKER_FAILED),
    )


def find_run_folders(roots: Iterable[Path], *, depth: int = 3) -> Iterator[Path]:
    """Yield the run folders among ``roots`` and below them.

    Args:
        roots: Folders to look in.
        depth: Levels of folders below each root that are searched; run folders are not searched themselves.
    """
    for root in roots:
        # Anything else than a file is listed as unreadable, not passed over.
        if os.path.lexists(root / RUN):
            yield root
        elif depth > 0:
            with contextlib.suppress(OSError):
                inner = sorted(path for path in root.iterdir() if path.is_dir() and not path.is_symlink())
                yield from find_run_folders(
                    (path for path in inner if not path.name.startswith(".")), depth=depth - 1
                )


_POINTS = 1000
"""Points of a curve: more than a screen has columns to draw them in."""

_EVENTS = 300
"""Events of a page; the latest ones are kept."""

_METRICS_BYTES = 1 << 28
"""Bytes of metrics that are read: some 700,000 steps, the latest ones."""

_EVENT_BYTES, _ALL_EVENT_BYTES = 1 << 26, 1 << 30
"""Bytes of events that are read, of one rank and of all of them."""

_SHOWN = (
    "proof",
    "evaluation",
    "checkpoint",
    "checkpoint_damaged",
    "checkpoint_superseded",
    "resumed",
    "nonfinite",
    "warning",
    "failure",
)


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One point of the curves: a step, or the mean of neighbouring steps.

    Attributes:
        step: The (last) step.
        loss: Loss, or None if it was not finite.
        rate: Tokens per second, or samples per second for families without tokens.
        memory_bytes: Largest allocated peak of rank 0, or None where not measured.
        lowest, highest: Least and greatest loss of the steps, or None.
    """

    step: int
    loss: float | None
    rate: float | None
    memory_bytes: int | None
    lowest: float | None = None
    highest: float | None = None


@dataclass(frozen=True, slots=True)
class History:
    """The course of a run.

    Attributes:
        points: Points of the curves, by step.
        steps_per_point: How many steps a point stands for.
        unit: What ``rate`` counts.
        evaluations: Step and validation loss.
        events: The latest events worth showing, oldest first, as ranks wrote them.
        omitted: Earlier events that are left out.
    """

    points: tuple[StepPoint, ...]
    steps_per_point: int
    unit: str
    evaluations: tuple[tuple[int, float], ...]
    events: tuple[Mapping[str, Any], ...]
    omitted: int


class StepReader:
    """Reads the steps of a run as they are written, each once.

    A run that continues from a checkpoint replaces the file, which is then read again from its beginning.

    Args:
        folder: The run folder.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / METRICS
        self._clear()

    def _clear(self) -> None:
        self._file, self._offset = 0, 0
        self._steps = array("q")
        # Numbers that are not known are NaN.
        self._loss, self._seconds, self._tokens, self._samples, self._memory = (array("d") for _ in range(5))

    def __len__(self) -> int:
        """Return the number of steps that were read."""
        return len(self._steps)

    def read(self) -> bool:
        """Read what is new; return whether anything has changed."""
        try:
            with open_regular(self._path) as stream:
                seen = os.fstat(stream.fileno())
                changed = seen.st_ino != self._file or seen.st_size < self._offset
                if changed:
                    self._clear()
                    self._file = seen.st_ino
                began = self._offset
                for self._offset, record in records_after(stream, began, limit=_METRICS_BYTES):
                    if record is not None and is_step(record):
                        self._append(record)
        except (OSError, UnreadableError):
            changed = len(self) > 0
            self._clear()
            return changed
        return changed or self._offset > began

    def _append(self, line: Mapping[str, Any]) -> None:
        self._steps.append(int(line["step"]))
        for column, name in (
            (self._loss, "loss"),
            (self._seconds, "step_seconds"),
            (self._tokens, "tokens"),
            (self._samples, "samples"),
            (self._memory, "memory_allocated_peak_bytes"),
        ):
            value = number(line.get(name))
            column.append(value if value is not None else math.nan)

    @property
    def unit(self) -> str:
        """What the rate counts: ``tokens``, or ``samples`` for families without them."""
        return "tokens" if any(value > 0 for value in self._tokens) else "samples"

    def points(self, limit: int = _POINTS) -> tuple[StepPoint, ...]:
        """Return at most ``limit`` points: means of neighbouring steps, with their extremes."""
        size, counts = self.steps_per_point(limit), self._tokens if self.unit == "tokens" else self._samples
        return tuple(self._point(slice(at, at + size), counts) for at in range(0, len(self), size))

    def steps_per_point(self, limit: int = _POINTS) -> int:
        """Return how many steps one of at most ``limit`` points stands for."""
        return -(-len(self) // limit) or 1

    def _point(self, part: slice, counts: array[float]) -> StepPoint:
        losses, peaks = _known(self._loss[part]), _known(self._memory[part])
        seconds = sum(_known(self._seconds[part]))
        return StepPoint(
            self._steps[part][-1],
            sum(losses) / len(losses) if losses else None,
            sum(_known(counts[part])) / seconds if seconds else None,
            int(max(peaks)) if peaks else None,
            min(losses, default=None),
            max(losses, default=None),
        )


def _known(values: Iterable[float]) -> list[float]:
    return [value for value in values if value == value]


def read_history(folder: Path, steps: StepReader | None = None) -> History:
    """Return the course of the run in ``folder``.

    Args:
        folder: The run folder.
        steps: A reader of its steps that is up to date; None reads them now.
    """
    if steps is None:
        steps = StepReader(folder)
        steps.read()
    points, unit, size = steps.points(), steps.unit, steps.steps_per_point()
    logs = _events_of(folder, ranks_in(folder, MAX_WORLD))
    events = [event for _, log in logs for event in log if _is_shown(event)]
    events.sort(key=lambda event: event["time"])
    evaluations = tuple(
        (step, loss)
        for event in events
        if event["kind"] == "evaluation"
        and (step := count(event.get("step"))) is not None
        and (loss := number(event.get("loss"))) is not None
    )
    return History(points, size, unit, evaluations, tuple(events[-_EVENTS:]), max(len(events) - _EVENTS, 0))


def read_rank_memory(folder: Path, ranks: Iterable[int]) -> dict[str, dict[int, int]]:
    """Return the largest allocated peak of each rank in each phase, in bytes, over all starts of a run.

    Args:
        folder: The run folder.
        ranks: The ranks to look at.
    """
    peaks: dict[str, dict[int, int]] = {}
    for rank, log in _events_of(folder, tuple(ranks)):
        for event in log:
            moments = event.get("moments")
            for name, value in moments.items() if isinstance(moments, dict) else ():
                if (found := count(value)) is not None:
                    phase = peaks.setdefault(str(name), {})
                    phase[rank] = max(found, phase.get(rank, 0))
    return peaks


def _events_of(folder: Path, ranks: Sequence[int]) -> Iterator[tuple[int, Iterator[dict[str, Any]]]]:
    """Yield each rank's events over all starts, of many or long files the latest ones."""
    limit = min(_EVENT_BYTES, _ALL_EVENT_BYTES // max(len(ranks), 1))
    for rank in ranks:
        yield rank, read_lines(event_path(folder, rank), limit=limit)


def _is_shown(event: Mapping[str, Any]) -> bool:
    if moment(event.get("time")) is None:
        return False
    return event.get("kind") in _SHOWN or (
        event.get("kind") in ("started", "finished") and event.get("rank") == 0
    )
