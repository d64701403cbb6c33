"""Where the time of steps went: arithmetic on the intervals of traces, and ranks against each other."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from statistics import fmean, median

from fsdptool.records.plan import Candidate
from fsdptool.records.profile import (
    Clocks,
    GpuTime,
    MessageTime,
    OperationTime,
    PlannedTime,
    Profile,
    ProfiledStep,
    RankProfile,
    RanksCompared,
    RankWaiting,
    UnitTime,
)
from fsdptool.runs.recordings.traces import GpuWork, KinetoTrace, read_trace

_SECOND = 1e6
"""Microseconds, the unit of traces."""


def profile_traces(paths: Sequence[Path], planned: Candidate | None = None) -> Profile:
    """Say where the time of steps went.

    Args:
        paths: Traces of torch's profiler: one, or several ranks of one run.
        planned: What a plan said of the run.

    Raises:
        StorageError: A file cannot be read.
        ConfigError: A file does not contain work of a GPU.
    """
    traces = [read_trace(path) for path in paths]
    profiles = tuple(map(_profile, traces))
    return Profile(
        profiles,
        _compared(traces) if len(traces) > 1 else None,
        tuple(_planned(profiles, planned)) if planned is not None else (),
    )


class Busy:
    """When something ran: the union of intervals.

    Args:
        intervals: Starts and ends, in the order of the starts.
    """

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []
        for start, end in intervals:
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)
        lengths = (end - start for start, end in zip(self._starts, self._ends, strict=True))
        self._sums = list(accumulate(lengths, initial=0.0))

    def _before(self, moment: float) -> float:
        index = bisect_right(self._starts, moment)
        return self._sums[index] - (max(self._ends[index - 1] - moment, 0.0) if index else 0.0)

    def within(self, start: float, end: float) -> float:
        """Return for how long something ran between two moments."""
        return self._before(end) - self._before(start)


class _Timeline:
    """The work of one GPU, by kind."""

    def __init__(self, work: Sequence[GpuWork]) -> None:
        def busy(*kinds: str) -> Busy:
            return Busy((item.start, item.end) for item in work if item.kind in kinds)

        self.kernels = busy("kernel")
        self._collectives = busy("collective")
        self._copies = busy("copy")
        self._running = busy("kernel", "collective")
        self._all = busy("kernel", "collective", "copy")

    def time(self, start: float, end: float) -> GpuTime:
        """Return what ran between two moments."""
        length = max(end - start, 0.0)
        compute, running = self.kernels.within(start, end), self._running.within(start, end)
        anything = self._all.within(start, end)
        return GpuTime(
            length / _SECOND,
            compute / _SECOND,
            self._collectives.within(start, end) / _SECOND,
            max(running - compute, 0.0) / _SECOND,
            self._copies.within(start, end) / _SECOND,
            max(anything - running, 0.0) / _SECOND,
            max(length - anything, 0.0) / _SECOND,
        )

    def exposed(self, item: GpuWork) -> float:
        """Return for how long a collective ran without a kernel."""
        return max(item.end - item.start - self.kernels.within(item.start, item.end), 0.0)


def _profile(trace: KinetoTrace) -> RankProfile:
    timeline = _Timeline(trace.work)
    collectives = [item for item in trace.work if item.kind == "collective"]
    return RankProfile(
        file=trace.file,
        rank=trace.rank,
        world_size=trace.world_size,
        gpu=trace.gpu,
        complete=trace.complete,
        total=timeline.time(trace.work[0].start, max(item.end for item in trace.work)),
        steps=tuple(_steps(trace, timeline)),
        operations=tuple(_operations(collectives, timeline)),
        messages=tuple(_messages(collectives)),
        units=tuple(_units(trace, timeline)),
    )


def _steps(trace: KinetoTrace, timeline: _Timeline) -> Iterator[ProfiledStep]:
    """Yield the steps, on the GPU's time: the host runs ahead of it."""
    if not trace.steps:
        return
    starts = [step.start for step in trace.steps]
    first: dict[int, float] = {}
    earlier = 0.0
    for item in trace.work:
        launched = (
            trace.launches.get(item.launch, (item.start, ""))[0] if item.launch is not None else item.start
        )
        index = bisect_right(starts, launched) - 1
        if index >= 0:
            first.setdefault(index, item.start)
        else:
            earlier = max(earlier, item.end)
    last = max(item.end for item in trace.work)
    # The first step waits for the host before its first kernel, the last one after its last kernel.
    bounds = [max(starts[0], min(earlier, first.get(0, earlier)))]
    for index in range(1, len(starts)):
        bounds.append(max(first.get(index, starts[index]), bounds[-1]))
    bounds.append(max(trace.steps[-1].end, last, bounds[-1]))
    for index, step in enumerate(trace.steps):
        yield ProfiledStep(step.name, timeline.time(bounds[index], bounds[index + 1]))


def _operations(collectives: Sequence[GpuWork], timeline: _Timeline) -> list[OperationTime]:
    times: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for item in collectives:
        times[item.operation].append((item.end - item.start, timeline.exposed(item)))
    found = []
    for operation, calls in times.items():
        whole, exposed = (sum(call[part] for call in calls) for part in (0, 1))
        overlap = min(max(1.0 - exposed / whole, 0.0), 1.0) if whole else 0.0
        found.append(OperationTime(operation, len(calls), whole / _SECOND, exposed / _SECOND, overlap))
    return sorted(found, key=lambda item: -item.seconds)


_BUS_FACTORS: Mapping[str, float] = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2, "all_to_all": 1}
"""By what bus bandwidth is the bytes times (n - 1) / n over the time (nccl-tests, doc/PERFORMANCE.md); all
other operations move their bytes once."""


def _messages(collectives: Sequence[GpuWork]) -> list[MessageTime]:
    times: dict[tuple[str, int, int], list[float]] = defaultdict(list)
    for item in collectives:
        if item.bytes is not None and item.group_size is not None:
            times[item.operation, item.bytes, item.group_size].append((item.end - item.start) / _SECOND)
    found = []
    for (operation, size, ranks), calls in times.items():
        share = _BUS_FACTORS[operation] * (ranks - 1) / ranks if operation in _BUS_FACTORS else 1.0
        bus = size * share / min(calls) if ranks > 1 and min(calls) > 0 else None
        found.append(
            MessageTime(operation, size, ranks, len(calls), min(calls), median(calls), max(calls), bus)
        )
    return sorted(found, key=lambda item: -item.calls * item.median_seconds)


_HOOK = re.compile(r"FSDP::(\w+)(?: \(([^()]*)\))?")
_ENTERS = {"pre_forward": "forward", "pre_backward": "backward"}
_LEAVES = ("post_forward", "post_backward_accumulate", "post_backward_reshard", "post_backward_reduce")
_GATHERS, _REDUCES = "all_gather", "post_backward_reduce"


def _units(trace: KinetoTrace, timeline: _Timeline) -> list[UnitTime]:
    """Return the time of each unit, by what its hooks launched and what was launched between them.

    The hooks are those of torch 2.13 (``distributed/fsdp/_fully_shard/_fsdp_param_group.py``).
    """
    seconds: dict[str, dict[str, float]] = {}
    places, owners = _owners(trace, seconds)
    for item in trace.work:
        launch = trace.launches.get(item.launch) if item.launch is not None else None
        if launch is None or item.kind == "copy" or launch[1] not in places:
            continue
        owner = owners[launch[1]][bisect_right(places[launch[1]], launch[0])]
        if owner is None:
            continue
        unit, part = owner
        length = item.end - item.start
        if item.kind == "kernel":
            seconds[unit][
                "forward" if part == "forward" else "backward" if part == "backward" else "own"
            ] += length
        elif part in (_GATHERS, _REDUCES):
            seconds[unit][part] += length
            seconds[unit][f"exposed {part}"] += timeline.exposed(item)
    return [
        UnitTime(
            unit,
            *(
                parts[part] / _SECOND
                for part in (
                    "forward", "backward", _GATHERS, f"exposed {_GATHERS}", _REDUCES, f"exposed {_REDUCES}",
                )
            ),
        )
        for unit, parts in seconds.items()
    ]  # fmt: skip


def _owners(
    trace: KinetoTrace, seconds: dict[str, dict[str, float]]
) -> tuple[dict[str, list[float]], dict[str, list[tuple[str, str] | None]]]:
    """Return, by thread, the moments at which the unit changes, and the unit and part before and after each.

    Args:
        trace: The trace.
        seconds: Gets an entry for each unit.
    """
    changes: dict[str, list[tuple[float, int, str, str]]] = defaultdict(list)
    for hook in trace.hooks:
        match = _HOOK.match(hook.name)
        if match is None:
            continue
        name, unit = match[1], match[2] or "(root)"
        if name in _ENTERS or name in _LEAVES or name == _GATHERS:
            seconds.setdefault(unit, defaultdict(float))
            changes[hook.thread].append((hook.start, 1, name, unit))
            changes[hook.thread].append((hook.end, 0, name, unit))
    places: dict[str, list[float]] = {}
    owners: dict[str, list[tuple[str, str] | None]] = {}
    for thread, moments in changes.items():
        open_units: list[tuple[str, str]] = []
        inside: dict[tuple[str, str], None] = {}
        places[thread], owners[thread] = [], [None]
        for moment, begins, name, unit in sorted(moments, key=lambda change: change[:2]):
            if begins:
                if name in _ENTERS:
                    open_units.append((unit, _ENTERS[name]))
                elif name in _LEAVES:
                    _leave(open_units, unit)
                if name in (_GATHERS, _REDUCES):
                    inside[unit, name] = None
            else:
                inside.pop((unit, name), None)
            special = next(reversed(inside), None)
            places[thread].append(moment)
            owners[thread].append(special or (open_units[-1] if open_units else None))
    return places, owners


_DEEPEST = 64
"""Units within each other that are looked through."""


def _leave(open_units: list[tuple[str, str]], unit: str) -> None:
    """Close a unit, and what was opened after it and never closed."""
    for index in range(len(open_units) - 1, max(len(open_units) - 1 - _DEEPEST, -1), -1):
        if open_units[index][0] == unit:
            del open_units[index:]
            return


_CLOCK_TOLERANCE = 500.0
"""Microseconds by which the ends of a collective differ on ranks whose clocks agree."""

_CLEARLY_LESS = 0.75
"""Share of the others' median time in collectives below which a rank is late."""


def late_rank(seconds: Mapping[int, float]) -> int | None:
    """Return the rank that the others wait for: the one with clearly the least time in collectives.

    A rank that arrives late waits for nobody. The time of a step does not tell: all ranks end it together.

    Args:
        seconds: Time in the same collectives, by rank.
    """
    if len(seconds) < 2:
        return None
    rank = min(seconds, key=lambda each: seconds[each])
    others = median(value for each, value in seconds.items() if each != rank)
    return rank if seconds[rank] < _CLEARLY_LESS * others else None


def _compared(traces: Sequence[KinetoTrace]) -> RanksCompared:
    """Compare the collectives that all ranks recorded, one by one."""
    ranks = [index if trace.rank is None else trace.rank for index, trace in enumerate(traces)]
    if len(set(ranks)) < len(ranks):
        ranks = list(range(len(traces)))
    shared = list(_shared(traces))
    waiting = [
        RankWaiting(
            rank,
            sum(calls[index].end - calls[index].start for calls in shared) / _SECOND,
            sum(
                index == min(range(len(calls)), key=lambda each: calls[each].end - calls[each].start)
                for calls in shared
            ),
        )
        for index, rank in enumerate(ranks)
    ]
    clocks, ends, starts = _clocks(traces, shared) if shared else (None, None, None)
    return RanksCompared(
        len(shared),
        tuple(waiting),
        late_rank({each.rank: each.seconds for each in waiting}) if shared else None,
        clocks,
        ends,
        starts,
    )


def _shared(traces: Sequence[KinetoTrace]) -> Iterator[tuple[GpuWork, ...]]:
    """Yield the collectives that all ranks called: of each group and operation those of the same place.

    An operation of which ranks have different counts is left out: nobody can say which of them match.
    """
    calls: list[dict[tuple[str, str], list[GpuWork]]] = []
    for trace in traces:
        mine: dict[tuple[str, str], list[GpuWork]] = defaultdict(list)
        for item in trace.work:
            if item.kind == "collective":
                mine[item.group, item.operation].append(item)
        calls.append(mine)
    for key in calls[0]:
        if len({len(mine.get(key, ())) for mine in calls}) == 1:
            yield from zip(*(mine[key] for mine in calls), strict=True)


def _clocks(
    traces: Sequence[KinetoTrace], shared: Sequence[Sequence[GpuWork]]
) -> tuple[Clocks, float, float | None]:
    """Return whether clocks agree, and the largest differences of ends and of starts in seconds."""
    bases = [(trace.base - traces[0].base) / 1e3 for trace in traces]
    ends = [[item.end + base for item, base in zip(calls, bases, strict=True)] for calls in shared]
    spread = max(max(each) - min(each) for each in ends)
    shifts = [median(each[index] - each[0] for each in ends) for index in range(len(traces))]
    level = [[end - shift for end, shift in zip(each, shifts, strict=True)] for each in ends]
    left = max(max(each) - min(each) for each in level)
    if min(spread, left) > _CLOCK_TOLERANCE:
        return "disagree", spread / _SECOND, None
    agree = spread <= _CLOCK_TOLERANCE
    moved = bases if agree else [base - shift for base, shift in zip(bases, shifts, strict=True)]
    starts = [[item.start + by for item, by in zip(calls, moved, strict=True)] for calls in shared]
    return (
        "agree" if agree else "shifted",
        spread / _SECOND,
        max(max(each) - min(each) for each in starts) / _SECOND,
    )


def _planned(profiles: Sequence[RankProfile], planned: Candidate) -> Iterator[PlannedTime]:
    """Yield the parts of a step as planned and as measured."""

    def measured(part: str) -> float:
        return median(
            fmean(getattr(time, part) for time in [step.time for step in profile.steps] or [profile.total])
            for profile in profiles
        )

    parts = planned.seconds
    yield PlannedTime("step", planned.step_seconds, measured("seconds"))
    compute = parts["compute"] + parts.get("optimizer", 0.0) if "compute" in parts else None
    yield PlannedTime("compute", compute, measured("compute_seconds"))
    for part, name in (
        ("communication", "communication_seconds"),
        ("exposed_communication", "exposed_communication_seconds"),
    ):
        yield PlannedTime(part, parts.get(part), measured(name))
    yield PlannedTime("copies", parts.get("offload"), measured("exposed_copy_seconds"))
    yield PlannedTime("idle", None, measured("idle_seconds"))
