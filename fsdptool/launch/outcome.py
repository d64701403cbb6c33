"""How a start of a run ended: the failure's cause, the lack of memory behind it, and the closing summary."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdptool.errors import ExitCode, FsdptoolError
from fsdptool.launch.prepare import PreparedRun
from fsdptool.records.advice import Suggestion
from fsdptool.records.codec import to_json
from fsdptool.records.diagnostic import envelope
from fsdptool.records.plan import OWN_LOOP, Candidate
from fsdptool.records.run import RunFailure, RunStatus, Summary
from fsdptool.runs.events import event_path, largest_peak, read_lines
from fsdptool.runs.folder import (
    CHECKPOINTS,
    LOGS,
    METRICS,
    SUMMARY,
    read_prediction,
    read_start,
    write_json,
)
from fsdptool.runs.manifest import folder_name, newest_step
from fsdptool.runs.view import as_it_ran


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a start of the run ended.

    Attributes:
        rank: The rank, or None if no rank had announced itself.
        message: One line.
        help: What to do next.
        exit_code: Exit status the run should end with.
        retryable: Whether another start could help.
        fields: The failing rank's ``failure`` event, or empty.
    """

    rank: int | None
    message: str
    help: str | None = None
    exit_code: int = 4
    retryable: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RunOutcome:
    """How the run ended.

    Attributes:
        status: How the run ended.
        failure: Why it failed.
        restarts: How often torchrun relaunched the workers.
        finished: The ``finished`` event of every rank that sent one, by rank.
    """

    status: RunStatus
    failure: Failure | None
    restarts: int
    finished: Mapping[int, Mapping[str, Any]]


def failure_of_event(event: Mapping[str, Any]) -> Failure:
    """Return the failure that a rank reported in its ``failure`` event."""
    return Failure(
        rank=event["rank"],
        message=f"rank {event['rank']}: {event['message']}",
        help=event.get("help"),
        exit_code=int(event.get("exit_code", 4)),
        retryable=bool(event.get("retryable", True)),
        fields=event,
    )


REPORT = f"{LOGS}/out-of-memory.json"


@dataclass(frozen=True, slots=True)
class OutOfMemoryReport:
    """What is known of an out-of-memory failure.

    Attributes:
        rank: The rank that ran out of memory.
        seen: The rank's own report (``training/memory_snapshot.py``).
        planned_moment: The plan's moment that corresponds to where it failed, or None.
        planned_bytes: What the plan expected to be allocated there.
        peak_moment, peak_bytes: Where and how high the plan expects the peak.
        next_steps: Rungs of the plan's ladder, cheapest first.
    """

    rank: int | None
    seen: Mapping[str, Any]
    planned_moment: str | None
    planned_bytes: int | None
    peak_moment: str | None
    peak_bytes: int | None
    next_steps: tuple[Suggestion, ...]


def account_for_memory(prepared: PreparedRun, failure: Failure) -> OutOfMemoryReport | None:
    """Return the report on an out-of-memory failure, or None for any other failure."""
    seen = failure.fields.get("memory")
    if not failure.fields.get("out_of_memory") or not seen:
        return None
    plan = prepared.prediction
    moment = match_moment(str(seen["moment"]), plan)
    at = {m.name: m.allocated_bytes for m in plan.timeline} if plan else {}
    return OutOfMemoryReport(
        rank=failure.rank,
        seen=seen,
        planned_moment=moment,
        planned_bytes=at.get(moment) if moment else None,
        peak_moment=plan.peak.moment if plan and plan.peak else None,
        peak_bytes=plan.allocated_peak_bytes if plan else None,
        next_steps=_next_steps(prepared),
    )


def match_moment(seen: str, plan: Candidate | None) -> str | None:
    """Return the name of the plan's moment a rank was in.

    A rank names the module it was in; the plan names units, which are modules further up.
    """
    if plan is None:
        return None
    phase, _, path = seen.partition(" ")
    named = [m.name for m in plan.timeline]
    if seen in named:
        return seen
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        prefix = ".".join(parts[:length])
        for name in named:
            kind, _, units = name.partition(" ")
            if kind == phase and prefix in units.split("+"):
                return name
    if seen == "optimizer step":
        return None
    return next((name for name in named if name.startswith(phase)), None)


def _next_steps(prepared: PreparedRun) -> tuple[Suggestion, ...]:
    from fsdptool.inspection import inspect
    from fsdptool.modeling.resolve import resolve_run
    from fsdptool.planning.advice.suggestions import suggest
    from fsdptool.planning.candidate.estimator import Estimator
    from fsdptool.planning.candidate.point import point_of
    from fsdptool.planning.hardware import machine_for
    from fsdptool.records.cluster import Cluster, device_profile
    from fsdptool.records.plan import PlanInputs

    profile = device_profile(prepared.device)
    cluster = None
    if prepared.device == "cuda":
        from fsdptool.launch.machine import local_cluster

        cluster = local_cluster(prepared.settings)
    cluster = cluster or Cluster(None, prepared.per_machine, prepared.world_size // prepared.per_machine)
    recipe, settings = prepared.recipe, prepared.settings
    try:
        run = resolve_run(recipe, settings, ranks=cluster.world_size)
        estimator = Estimator(prepared.spec, inspect(prepared.spec), run, profile=profile)
        machine = machine_for(cluster.gpu)
        point = point_of(run)
        requested = estimator.candidate("requested", point, cluster, machine)
        inputs = PlanInputs(recipe, settings, (cluster,), (machine,), profile=profile, loop=OWN_LOOP)
        return suggest(estimator, inputs, point, requested)
    except FsdptoolError:
        return ()


def write_report(folder: Path, account: OutOfMemoryReport) -> str:
    """Write the report into the run folder; return its relative path (raises ``OSError``)."""
    write_json(folder / REPORT, to_json(account))
    return REPORT


def summarise(folder: Path, outcome: RunOutcome, *, units: int, mesh: Mapping[str, int]) -> Summary:
    """Return the summary of a run that has ended.

    Args:
        folder: The run folder.
        outcome: How the supervisor saw it end.
        units: FSDP units of the plan.
        mesh: Resolved mesh sizes.
    """
    world_size = read_start(folder).world_size
    lines = list(read_lines(folder / METRICS))
    last_step = newest_step(folder / CHECKPOINTS)
    prediction = read_prediction(folder)
    predicted = planned_peak(prediction, folder) if prediction else None
    measured = tuple(_peak(outcome.finished.get(rank)) for rank in range(world_size))
    largest = largest_peak(measured, lines)
    instruments = {str(event.get("instrument")) for event in outcome.finished.values()}
    return Summary(
        status=outcome.status,
        exit_code=int(exit_status(outcome)),
        resumable=outcome.status == "stopped" or (outcome.status != "completed" and last_step is not None),
        steps=int(lines[-1]["step"]) if lines else 0,
        world_size=world_size,
        mesh=dict(mesh),
        units=units,
        sharding_proof=_proof(folder),
        predicted_peak_bytes=predicted,
        measured_peak_bytes=measured,
        instrument=", ".join(sorted(instruments)) or "none",
        error_percent=100.0 * (predicted - largest) / largest if predicted and largest else None,
        throughput=throughput(lines),
        last_checkpoint=f"{CHECKPOINTS}/{folder_name(last_step)}" if last_step is not None else None,
        last_good_step=last_step,
        export=None,
        restarts=outcome.restarts,
        failure=_failure(outcome),
        memory_report=None,
        measured_moments=_moments(outcome, world_size),
    )


def planned_peak(prediction: Candidate, folder: Path) -> int | None:
    """Return the planned peak of what the run has done."""
    return as_it_ran(prediction, folder).allocated_peak_bytes


def write_summary(folder: Path, summary: Summary) -> dict[str, Any]:
    """Write ``summary.json`` and return the document (raises ``OSError``)."""
    document = envelope("summary", summary, summary)
    write_json(folder / SUMMARY, document)
    return document


def exit_status(outcome: RunOutcome) -> int:
    """Return the exit status of a run (docs/reference/exit-codes.md)."""
    if outcome.status == "completed":
        return ExitCode.CLEAN
    if outcome.status == "stopped":
        return ExitCode.RESUMABLE
    if outcome.status == "interrupted":
        return ExitCode.INTERRUPTED
    return outcome.failure.exit_code if outcome.failure else ExitCode.WORKER_FAILED


def throughput(lines: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return rates and step-time percentiles.

    The first steps are left out: compilation, first allocations, and the CPU meter's profiler.
    """
    every = list(lines)
    steps = every[3:] if len(every) > 6 else every[1:]
    seconds = [float(line["step_seconds"]) for line in steps if line.get("step_seconds")]
    total = sum(seconds)
    result: dict[str, float | None] = dict.fromkeys(
        (
            "tokens_per_second",
            "samples_per_second",
            "step_seconds_median",
            "step_seconds_p95",
            "data_share",
            "mfu",
        )
    )
    if not seconds:
        return result
    tokens = [line["tokens"] for line in steps if line.get("tokens") is not None]
    if tokens:
        result["tokens_per_second"] = sum(tokens) / total
    result["samples_per_second"] = sum(line.get("samples") or 0 for line in steps) / total
    result["step_seconds_median"] = statistics.median(seconds)
    result["step_seconds_p95"] = sorted(seconds)[min(int(0.95 * len(seconds)), len(seconds) - 1)]
    result["data_share"] = sum(line.get("data_seconds") or 0.0 for line in steps) / total
    mfu = [line["mfu"] for line in steps if line.get("mfu") is not None]
    if mfu:
        result["mfu"] = statistics.median(mfu)
    return result


def _failure(outcome: RunOutcome) -> RunFailure | None:
    failure = outcome.failure
    if failure is None:
        return None
    return RunFailure(failure.rank, failure.message, failure.help, failure.exit_code)


def _peak(event: Mapping[str, Any] | None) -> int | None:
    return None if event is None else (event.get("peaks") or [None])[0]


def _moments(outcome: RunOutcome, world_size: int) -> dict[str, tuple[int | None, ...]]:
    by_rank = [(outcome.finished.get(rank) or {}).get("moments") or {} for rank in range(world_size)]
    names = dict.fromkeys(name for moments in by_rank for name in moments)
    return {name: tuple(moments.get(name) for moments in by_rank) for name in names}


def _proof(folder: Path) -> dict[str, Any]:
    proof: dict[str, Any] = {}
    for event in read_lines(event_path(folder, 0)):
        if event.get("kind") == "proof":
            proof = {k: v for k, v in event.items() if k not in ("kind", "time", "rank", "attempt", "pid")}
    return proof
