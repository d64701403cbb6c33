"""A plan against another one, against the run it predicted, or against itself recomputed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptool.errors import PlanError
from fsdptool.files.values import check, read_object, read_own_json
from fsdptool.planning.plan import chosen_candidate, make_plan, plan_from, read_plan
from fsdptool.planning.request.file_run import read_file_run
from fsdptool.planning.request.inputs import Request, read_request
from fsdptool.planning.request.options import Options
from fsdptool.records.codec import to_json
from fsdptool.records.command_documents import ComparedFigure, Comparison, FigureUnit
from fsdptool.records.diagnostic import library_versions, tool_version
from fsdptool.records.plan import Candidate, Moment, Plan
from fsdptool.records.run import RunPhase
from fsdptool.runs.folder import read_prediction
from fsdptool.runs.view import as_it_ran

_PHASES = [phase.value for phase in RunPhase]

_SUMMARY, _METRICS, _PREDICTION = "summary.json", "metrics.jsonl", "prediction.json"


def compare(left: Path | Plan, right: Path | Plan) -> Comparison:
    """Return two plans side by side, or a plan (or the run's own prediction) against a run folder.

    ``left`` may be a run folder alone with ``right``: then its own prediction is the left side.

    Args:
        left, right: A plan, its document, a run folder, or a training file of some program, whose run is
            planned on the hardware of the other side's plan.

    Raises:
        PlanError: A side is none of these, or a run folder that has measured nothing.
    """
    first, second = (side if isinstance(side, Path) and side.is_dir() else None for side in (left, right))
    if first is not None and second is not None and first.resolve() != second.resolve():
        raise PlanError("two run folders cannot be compared", help="give a plan and a run folder")
    if second is not None:
        predicted = required_prediction(first) if first is not None else chosen_candidate(_plan(left))
        return _against_run(predicted, _name(left), second)
    if first is not None:
        return _against_run(chosen_candidate(_plan(right)), _name(right), first)
    a, b = _sides(left, right)
    return _plans(a, b, _name(left), _name(right))


def _sides(left: Path | Plan, right: Path | Plan) -> tuple[Plan, Plan]:
    runs = [read_file_run(str(side)) if isinstance(side, Path) else None for side in (left, right)]
    if None not in runs:
        raise PlanError(
            f"neither {left} nor {right} says which GPUs it runs on",
            help=f"plan one of them first: fsdptool plan {left} --gpu H100-80GB-SXM --gpus 8 -o plan.json",
        )
    if runs[0] is not None:
        other = _plan(right)
        return _planned_like(other, str(left)), other
    plan = _plan(left)
    return plan, _planned_like(plan, str(right)) if runs[1] is not None else _plan(right)


def _planned_like(plan: Plan, reference: str) -> Plan:
    """Return the plan of a training file on the hardware of another plan."""
    inputs = plan.inputs
    options = Options(reference=reference, clusters=inputs.clusters, search=False)
    return make_plan(read_request(options))


def _plan(side: Path | Plan) -> Plan:
    return side if isinstance(side, Plan) else read_plan(side)


def _name(side: Path | Plan) -> str:
    if isinstance(side, Path):
        return str(side)
    return f"{side.inputs.model.reference} ({side.chosen or 'nothing chosen'})"


def _plans(a: Plan, b: Plan, left: str, right: str) -> Comparison:
    first, second = chosen_candidate(a), chosen_candidate(b)
    rows = [ComparedFigure("verdict", a.verdict, b.verdict, "text"), *_figures(first, second)]
    rows += [
        ComparedFigure(f"{where}{key}", x, y, "text")
        for where, x_data, y_data in (
            ("", to_json(first.settings), to_json(second.settings)),
            ("recipe.", _flat(to_json(a.inputs.recipe)), _flat(to_json(b.inputs.recipe))),
            ("settings.", _flat(to_json(a.inputs.settings)), _flat(to_json(b.inputs.settings))),
        )
        for key, x, y in _different(x_data, y_data)
    ]
    moments = (*_both(first, second), *_moments(first.timeline, second.timeline))
    return Comparison("plans", left, right, tuple(rows), moments)


def _both(a: Candidate, b: Candidate) -> Iterator[ComparedFigure]:
    """Pair the phases of two runs; one that only one of them has is missing on the other side."""
    x, y = ({phase.name: phase.allocated_bytes for phase in side.phases} for side in (a, b))
    for name in dict.fromkeys([*x, *y]):
        yield _row(f"phase {name}", x.get(name), y.get(name), "bytes")


def _figures(a: Candidate, b: Candidate) -> Iterator[ComparedFigure]:
    for name in ("device_total_bytes", "allocated_peak_bytes", "reserved_peak_bytes", "host_bytes_per_node"):
        yield _row(name.removesuffix("_bytes").replace("_", " "), getattr(a, name), getattr(b, name), "bytes")
    yield _row("step", a.step_seconds, b.step_seconds, "seconds")
    yield _row("samples per second", a.samples_per_second, b.samples_per_second, "rate")
    if _rejection(a) != _rejection(b):
        yield ComparedFigure("rejected by", _rejection(a), _rejection(b), "text")
    x = {component.name: component.bytes for component in a.components}
    y = {component.name: component.bytes for component in b.components}
    for name in dict.fromkeys([*x, *y]):
        yield _row(name, x.get(name, 0), y.get(name, 0), "bytes")


def _moments(a: Sequence[Moment], b: Sequence[Moment]) -> Iterator[ComparedFigure]:
    """Pair moments by name and by how often the name was seen before."""
    x, y = _numbered(a), _numbered(b)
    for key in dict.fromkeys([*x, *y]):
        name, number = key
        label = name if number == 0 else f"{name} ({number + 1})"
        yield _row(label, x.get(key), y.get(key), "bytes")


def _numbered(moments: Sequence[Moment]) -> dict[tuple[str, int], int]:
    seen: dict[str, int] = {}
    result = {}
    for moment in moments:
        number = seen.get(moment.name, 0)
        seen[moment.name] = number + 1
        result[moment.name, number] = moment.allocated_bytes
    return result


def _against_run(predicted: Candidate, left: str, folder: Path) -> Comparison:
    from fsdptool.runs.events import largest_peak, read_lines

    summary = read_summary(folder)
    metrics = [line for line in read_lines(folder / _METRICS) if sound(line)]
    measured = largest_peak(summary.get("measured_peak_bytes", ()), metrics)
    if measured is None:
        raise PlanError(
            f"{folder} has no memory measurements of a step",
            help="a run measures its first steps; train at least two steps",
        )
    predicted = as_it_ran(predicted, folder)
    expected = predicted.allocated_peak_bytes
    rates = summary.get("throughput", {})
    rows = [
        _row("allocated peak", expected, measured, "bytes"),
        _row(
            "reserved peak",
            predicted.reserved_peak_bytes,
            _most(metrics, "memory_reserved_peak_bytes"),
            "bytes",
        ),
        _row("step", predicted.step_seconds, rates.get("step_seconds_median"), "seconds"),
        _row("samples per second", predicted.samples_per_second, rates.get("samples_per_second"), "rate"),
    ]
    moments = [
        *_phases(predicted, summary.get("measured_moments", {})),
        *(
            _row(f"rank {rank}", expected, value, "bytes")
            for rank, value in enumerate(summary["measured_peak_bytes"])
        ),
        *_fullest(expected, metrics),
    ]
    notes = [f"measured with {summary.get('instrument', 'an unnamed instrument')}"]
    if summary.get("world_size") != _ranks(predicted):
        notes.append(f"the plan is for {_ranks(predicted)} ranks, the run had {summary.get('world_size')}")
    error = 100.0 * (expected - measured) / measured if expected is not None else None
    if error is None:
        notes.append("the predicted peak is unknown, so the error is, too")
    return Comparison("run", left, str(folder), tuple(rows), tuple(moments), error, tuple(notes))


def read_summary(folder: Path) -> dict[str, Any]:
    """Return a run's ``summary.json``.

    Raises:
        ConfigError: It is missing, unreadable, or not what a run writes.
    """
    summary: dict[str, Any] = read_own_json(folder / _SUMMARY, "finished run folder")
    check(summary, "summary", where=str(folder / _SUMMARY))
    return summary


def sound(line: Mapping[str, Any]) -> bool:
    """Say whether a line of a run's metrics has the numbers that are compared: a damaged one is left out."""
    peaks = (line.get(f"memory_{name}_peak_bytes") for name in ("allocated", "reserved"))
    return type(line.get("step")) is int and all(peak is None or type(peak) is int for peak in peaks)


def _phases(predicted: Candidate, measured: Mapping[str, Sequence[int | None]]) -> Iterator[ComparedFigure]:
    """Hold every phase the run measured against its prediction; the fullest rank counts."""
    expected = {phase.name.value: phase.allocated_bytes for phase in predicted.phases}
    # Phases of another version's run, which this one does not know, come last.
    for name in sorted(measured, key=lambda name: _PHASES.index(name) if name in _PHASES else len(_PHASES)):
        known = [value for value in measured[name] if value is not None]
        yield _row(name, expected.get(name), max(known, default=None), "bytes")


def _fullest(expected: int | None, metrics: Sequence[Mapping[str, Any]]) -> Iterator[ComparedFigure]:
    """Name the step with the highest peak. Those of earlier steps say nothing: shorter batches need less."""
    peaks = [(line["memory_allocated_peak_bytes"], -line["step"]) for line in metrics if _measured(line)]
    if peaks:
        value, step = max(peaks)
        yield _row(f"step {-step}", expected, value, "bytes")


def _measured(line: Mapping[str, Any]) -> bool:
    return line.get("memory_allocated_peak_bytes") is not None


def _ranks(candidate: Candidate) -> int:
    return candidate.settings.ranks


def required_prediction(folder: Path) -> Candidate:
    """Return what a run's own prediction said.

    Raises:
        PlanError: The run was started without one.
        ConfigError: It is unreadable.
    """
    prediction = read_prediction(folder)
    if prediction is None:
        raise PlanError(f"{folder} has no prediction", help="give the plan it was started from")
    return prediction


def _most(lines: Sequence[Mapping[str, Any]], key: str) -> int | None:
    return max((line[key] for line in lines if line.get(key) is not None), default=None)


def _row(what: str, left: Any, right: Any, unit: FigureUnit) -> ComparedFigure:
    percent = None
    if isinstance(left, int | float) and isinstance(right, int | float) and left:
        percent = 100.0 * (right - left) / left
    return ComparedFigure(what, left, right, unit, percent)


def _flat(data: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(data, Mapping):
        result: dict[str, Any] = {}
        for key, value in data.items():
            result |= _flat(value, f"{prefix}{key}.")
        return result
    return {prefix.rstrip("."): data}


def _different(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for key in dict.fromkeys([*a, *b]):
        if a.get(key) != b.get(key):
            yield key, a.get(key), b.get(key)


@dataclass(frozen=True, slots=True)
class PlanDifference:
    """One thing that is no longer as the plan says: where, before and after."""

    what: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.what}: {self.before} became {self.after}"


def check_plan(
    path: Path, *, trust_remote_code: bool = False, progress: Any = None
) -> tuple[Plan, tuple[PlanDifference, ...]]:
    """Recompute a plan from a document's own inputs and return it with everything that changed.

    Args:
        path: The plan's document.
        trust_remote_code: Whether the model's own code may run, if the plan says that it is needed.
        progress: Told how far the search is.

    Raises:
        PlanError: The file is not a plan.
        ConfigError: It asks to run the model's own code, and ``trust_remote_code`` is not set.
    """
    from fsdptool.source import consented

    data = read_object(path)
    before = plan_from(data, where=str(path))
    consented(before.inputs.recipe, path, trust_remote_code=trust_remote_code)
    after = make_plan(Request(before.inputs), progress=progress)
    return after, changes_between(data, before, after)


def changes_between(data: Mapping[str, Any], before: Plan, after: Plan) -> tuple[PlanDifference, ...]:
    """Return what differs between a saved plan, with its document's head, and a new one."""
    libraries = _different(data["libraries"], library_versions())
    model = _different(to_json(before.inputs.model), to_json(after.inputs.model))
    pairs = [
        *((f"libraries.{key}", old, new) for key, old, new in sorted(libraries)),
        *((f"model.{key}", old, new) for key, old, new in sorted(model)),
        ("fsdptool", data["tool_version"], tool_version()),
        *(
            (name, getattr(before, name), getattr(after, name))
            for name in ("verdict", "chosen", "confidence")
        ),
        *_decisive(before, after),
    ]
    return tuple(PlanDifference(what, old, new) for what, old, new in pairs if old != new)


def _decisive(before: Plan, after: Plan) -> Iterator[tuple[str, Any, Any]]:
    """Pair what decides: figures of the requested candidates and of the chosen one."""
    candidates = {candidate.id: candidate for candidate in after.candidates}
    watched = {before.chosen, *before.details.asked}
    for old in before.candidates:
        if old.id not in watched:
            continue
        new = candidates.get(old.id)
        if new is None:
            yield f"candidate {old.id}", "present", "missing"
            continue
        for name in ("allocated_peak_bytes", "reserved_peak_bytes", "device_total_bytes", "usable_bytes"):
            yield f"{old.id} {name}", getattr(old, name), getattr(new, name)
        yield f"{old.id} rejected_by", _rejection(old), _rejection(new)


def _rejection(candidate: Candidate) -> str | None:
    return candidate.rejected_by.kind.value if candidate.rejected_by else None
