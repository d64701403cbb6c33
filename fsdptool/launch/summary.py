"""The closing summary of a run, from what its ranks reported."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fsdptool.errors import ExitCode
from fsdptool.launch.create import newest_step
from fsdptool.launch.supervise import Outcome
from fsdptool.records.diagnostic import envelope
from fsdptool.records.run import RunFailure, Summary
from fsdptool.runs.events import event_path, read_lines
from fsdptool.runs.folder import (
    CHECKPOINTS,
    METRICS,
    SUMMARY,
    read_prediction,
    read_start,
    write_json,
)
from fsdptool.runs.manifest import folder_name


def summarise(folder: Path, outcome: Outcome, *, units: int, mesh: Mapping[str, int]) -> Summary:
    """Return the summary of a run that has ended.

    Args:
        folder: The run folder.
        outcome: How the supervisor saw it end.
        units: FSDP units of the plan.
        mesh: Resolved mesh sizes.
    """
    world_size = read_start(folder).world_size
    lines = list(read_lines(folder / METRICS))
    last_step = newest_step(folder)
    prediction = read_prediction(folder)
    predicted = prediction.allocated_peak_bytes if prediction else None
    measured = tuple(_peak(outcome.finished.get(rank)) for rank in range(world_size))
    known = [value for value in measured if value is not None]
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
        error_percent=100.0 * (predicted - max(known)) / max(known) if predicted and known else None,
        throughput=throughput(lines),
        last_checkpoint=f"{CHECKPOINTS}/{folder_name(last_step)}" if last_step is not None else None,
        last_good_step=last_step,
        export=None,
        restarts=outcome.restarts,
        failure=_failure(outcome),
        memory_report=None,
        measured_moments=_moments(outcome, world_size),
    )


def write_summary(folder: Path, summary: Summary) -> dict[str, Any]:
    """Write ``summary.json`` and return the document (raises ``OSError``)."""
    document = envelope("summary", summary, summary)
    write_json(folder / SUMMARY, document)
    return document


def exit_status(outcome: Outcome) -> int:
    """Return the exit status of a run (docs/exit-codes.md)."""
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


def _failure(outcome: Outcome) -> RunFailure | None:
    failure = outcome.failure
    if failure is None:
        return None
    return RunFailure(failure.rank, failure.message, failure.help, failure.exit_code)


def _peak(event: Mapping[str, Any] | None) -> int | None:
    return None if event is None else (event.get("peaks") or [None])[0]


def _moments(outcome: Outcome, world_size: int) -> dict[str, tuple[int | None, ...]]:
    by_rank = [(outcome.finished.get(rank) or {}).get("moments") or {} for rank in range(world_size)]
    names = dict.fromkeys(name for moments in by_rank for name in moments)
    return {name: tuple(moments.get(name) for moments in by_rank) for name in names}


def _proof(folder: Path) -> dict[str, Any]:
    proof: dict[str, Any] = {}
    for event in read_lines(event_path(folder, 0)):
        if event.get("kind") == "proof":
            proof = {k: v for k, v in event.items() if k not in ("kind", "time", "rank", "attempt", "pid")}
    return proof
