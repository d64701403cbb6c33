"""The course of a run over all its starts: steps, evaluations and events, as many as a page can show."""

from __future__ import annotations

import math
import os
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptool.files.text import UnreadableError, open_regular
from fsdptool.files.values import count, moment, number
from fsdptool.runs.events import event_path, ranks_in, read_lines, records_after
from fsdptool.runs.folder import MAX_WORLD, METRICS
from fsdptool.runs.view import is_step

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
