"""Calibration: fit the machine table to measured runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdptool.errors import PlanError
from fsdptool.planning.compare import read_prediction, read_summary, sound
from fsdptool.planning.hardware import find_gpu, machine_for
from fsdptool.records.cluster import Machine
from fsdptool.records.plan import Candidate

_FRACTIONS = ("matmul_efficiency", "memory_efficiency")


@dataclass(frozen=True, slots=True)
class Sample:
    """What one run says. Seconds and bytes; None where the run did not measure it."""

    folder: str
    predicted: Candidate
    step_seconds: float | None
    reserved_bytes: int | None
    allocated_bytes: int | None


def read_sample(folder: Path) -> Sample:
    """Return a run's prediction and measurements.

    Raises:
        PlanError: The folder is not a finished run with a prediction.
    """
    from fsdptool.runs.events import largest_peak

    summary = read_summary(folder)
    metrics = _metrics(folder)
    lines = [line for line in metrics if line.get("memory_reserved_peak_bytes") is not None]
    return Sample(
        folder=str(folder),
        predicted=read_prediction(folder),
        step_seconds=summary.get("throughput", {}).get("step_seconds_median"),
        reserved_bytes=max((line["memory_reserved_peak_bytes"] for line in lines), default=None),
        allocated_bytes=largest_peak(summary.get("measured_peak_bytes", ()), metrics),
    )


def calibrate(
    gpu: str,
    samples: Sequence[Sample],
    *,
    context_bytes: int | None = None,
    communicator_bytes: int | None = None,
    gpus_file: Path | None = None,
    table: Path | None = None,
) -> Machine:
    """Return the table's row for a GPU, fitted to runs on it.

    Compute efficiencies are scaled by the median of predicted over measured compute, where measured
    compute is the median step less what the prediction gives communication, optimizer and offload.
    The reserved ratio is the largest seen, so that a plan with it errs towards safety.

    Args:
        gpu: Catalogue name of the GPU the runs were made on.
        samples: The runs.
        context_bytes: What the driver reported for a process before its first tensor.
        communicator_bytes: What it grew by when the first communicator was opened.
        gpus_file: Further catalogue entries.
        table: Rows to start from instead of the shipped ones.

    Raises:
        PlanError: The runs have no measurements to fit, or the GPU is unknown.
    """
    spec = find_gpu(gpu, gpus_file=gpus_file).gpu
    base = machine_for(spec, table=table)
    changes: dict[str, Any] = {}
    factors = [factor for sample in samples if (factor := _speed(sample)) is not None]
    if factors:
        factor = statistics.median(factors)
        changes |= {name: _scaled(getattr(base, name), factor) for name in _FRACTIONS}
        changes["attention"] = tuple(
            replace(rate, forward=_scaled(rate.forward, factor), backward=_scaled(rate.backward, factor))
            for rate in base.attention
        )
        # Others' machines no longer say how far off the estimate is.
        changes["throughput_range"] = None
    ratios = [
        sample.reserved_bytes / sample.allocated_bytes
        for sample in samples
        if sample.reserved_bytes is not None and sample.allocated_bytes
    ]
    if ratios:
        changes["reserved_ratio"] = max(*ratios, 1.0)
    if context_bytes is not None:
        changes["context_bytes"] = context_bytes
    if communicator_bytes is not None:
        changes["communicator_bytes"] = communicator_bytes
    if not changes:
        raise PlanError(
            "these runs have no measurements to calibrate from",
            help="train on GPUs with a prediction (fsdptool train), or give --context",
        )
    origin = ", ".join(sample.folder for sample in samples) or "figures given as options"
    kept = sorted(set(_FRACTIONS) | {"reserved_ratio", "context_bytes", "communicator_bytes"})
    untouched = [name for name in kept if name not in changes]
    source = f"measured: {origin}"
    if untouched:
        source += f"; not measured, as shipped: {', '.join(untouched)}"
    return replace(base, name=spec.name, match=spec.name, measured=True, source=source, **changes)


def _scaled(fraction: float, factor: float) -> float:
    return min(max(fraction * factor, 0.01), 1.0)


def _speed(sample: Sample) -> float | None:
    """Return predicted over measured compute, or None where the run or the prediction has no time."""
    parts = sample.predicted.seconds
    if sample.step_seconds is None or not parts:
        return None
    rest = parts["exposed_communication"] + parts["optimizer"] + parts["offload"]
    rest += parts.get("contention", 0.0)
    measured = sample.step_seconds - rest
    return parts["compute"] / measured if measured > 0 else None


def _metrics(folder: Path) -> list[dict[str, Any]]:
    from fsdptool.runs.events import read_lines

    return [line for line in read_lines(folder / "metrics.jsonl") if sound(line)]
