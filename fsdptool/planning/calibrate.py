"""Calibration: fit the machine table to measured runs."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fsdptool.errors import PlanError
from fsdptool.files.values import read_object
from fsdptool.planning.compare import read_summary, required_prediction, sound
from fsdptool.planning.hardware import find_gpu, machine_for
from fsdptool.records.cluster import AttentionRate, Gpu, Machine
from fsdptool.records.codec import from_json
from fsdptool.records.measurements import Measurements, RankMeasurements
from fsdptool.records.plan import Candidate
from fsdptool.runs.recordings.rates import traced_rates
from fsdptool.runs.recordings.traces import KinetoTrace, read_trace

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
        predicted=required_prediction(folder),
        step_seconds=summary.get("throughput", {}).get("step_seconds_median"),
        reserved_bytes=max((line["memory_reserved_peak_bytes"] for line in lines), default=None),
        allocated_bytes=largest_peak(summary.get("measured_peak_bytes", ()), metrics),
    )


def calibrate(
    gpu: str | None,
    samples: Sequence[Sample],
    *,
    context_bytes: int | None = None,
    communicator_bytes: int | None = None,
    measured: Path | Measurements | None = None,
    traces: Sequence[Path] = (),
    gpus_file: Path | None = None,
    table: Path | None = None,
) -> Machine:
    """Return the table's row for a GPU, fitted to runs on it.

    Compute efficiencies are scaled by the median of predicted over measured compute, where measured
    compute is the median step less what the prediction gives communication, optimizer and offload.
    The reserved ratio is the largest seen, so that a plan with it errs towards safety.

    Figures of ``traces`` come first, then those of ``measured``; what runs or options say replaces them.

    Args:
        gpu: Catalogue name of the GPU the runs were made on; None takes that of ``measured``.
        samples: The runs.
        context_bytes: What the driver reported for a process before its first tensor.
        communicator_bytes: What it grew by when the first communicator was opened.
        measured: What ``fsdptool doctor --gpu`` wrote, or the probe measured.
        traces: Traces of torch's profiler of one run on this GPU.
        gpus_file: Further catalogue entries.
        table: Rows to start from instead of the shipped ones.

    Raises:
        PlanError: The runs have no measurements to fit, or the GPU is unknown.
        StorageError: A trace cannot be read.
        ConfigError: A trace does not contain work of a GPU.
    """
    recorded = [read_trace(path) for path in traces]
    ranks = _read_measurements(measured) if measured is not None else None
    if ranks is not None and ranks.memory_bytes is None:
        return _processor(ranks, table)
    name = (
        gpu
        or (ranks.gpu if ranks is not None else None)
        or next((trace.gpu for trace in recorded if trace.gpu), None)
    )
    if name is None:
        raise PlanError("no GPU is named", help="name the GPU of the runs with --gpu")
    spec = find_gpu(name, gpus_file=gpus_file).gpu
    base = machine_for(spec, table=table)
    changes, events = _traced(spec, recorded, base)
    if ranks is not None:
        changes |= _measured_rates(spec, ranks)
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
            "the runs and traces have no measurements to calibrate from",
            help="train on GPUs with a prediction (fsdptool train), or give --context; traces need"
            " record_shapes and several large products, copies or collectives",
        )
    origins = [sample.folder for sample in samples]
    if measured is not None:
        origins.append(str(measured) if isinstance(measured, Path) else "the probe")
    origins += [str(path) for path in traces]
    origin = ", ".join(origins) or "figures given as options"
    kept = sorted(set(_FRACTIONS) | set(events) | {"reserved_ratio", "context_bytes", "communicator_bytes"})
    untouched = [name for name in kept if name not in changes]
    source = f"measured: {origin}"
    if rests := [f"{field} on {number:,} {what}" for field, (number, what) in events.items()]:
        source += f"; of traces, {', '.join(rests)}"
    if untouched:
        source += f"; not measured, as shipped: {', '.join(untouched)}"
    return replace(base, name=spec.name, match=spec.name, measured=True, source=source, **changes)


SUSTAINED = 0.78
"""What training sustains of the best product: on H100 and A100 (``data/architectures.json``)."""

_STREAMED = 0.88
"""What elementwise operators in training sustain of the best: 0.78 of 0.89 on A100 (the same file)."""


PROBED_RANGE = (0.83, 1.02)
"""Measured over predicted throughput of a probed machine, 10th and 90th percentile of ten models on a CPU
(``benchmarks/results/planning_cpu_time.json``)."""


def _read_measurements(measured: Path | Measurements) -> RankMeasurements:
    """Return what ``fsdptool doctor --gpu``, or the probe, measured.

    Raises:
        PlanError: It is a rehearsal, or it ended before anything was measured.
        ConfigError: The file is not such a document.
    """
    if isinstance(measured, Path):
        data = read_object(measured, "measurements")
        body = {field.name: data[field.name] for field in fields(Measurements)}
        document, where = from_json(Measurements, body, where=str(measured)), str(measured)
    else:
        document, where = measured, "the probe"
    ranks = document.ranks
    if ranks is None or (document.device == "cpu" and not ranks.kernels):
        empty = f"empty: {document.error or 'nothing was measured'}"
        what = empty if ranks is None else "a rehearsal on the CPU"
        raise PlanError(f"{where} is {what}", help="run `fsdptool doctor --gpu -o FILE` on the GPUs")
    if document.error is not None and not ranks.kernels:
        raise PlanError(f"{where} ended early: {document.error}", help="measure again")
    return ranks


def _processor(ranks: RankMeasurements, table: Path | None) -> Machine:
    """Return the row of a CPU whose kernels were timed; its rates stand in them alone."""
    return replace(
        machine_for(None, table=table),
        name=ranks.gpu,
        match="cpu",
        measured=True,
        source=f"measured: {len(ranks.kernels)} kernels on one thread of {ranks.gpu}",
        matmul_efficiency=1.0,
        memory_efficiency=1.0,
        kernel_latency=ranks.kernel_latency or 0.0,
        kernels=ranks.kernels,
        throughput_range=PROBED_RANGE,
    )


def _measured_rates(gpu: Gpu, ranks: RankMeasurements) -> dict[str, Any]:
    """Return the fields of a machine's row that measurements of a device replace."""
    changes: dict[str, Any] = {}
    peaks = {name: rate for name, rate in gpu.flops.items() if rate}
    half = "bfloat16" if "bfloat16" in peaks else "float32"
    products = [item.flops_per_second for item in ranks.products if item.dtype == half]
    if products:
        changes["matmul_efficiency"] = _fraction(SUSTAINED * max(products) / peaks[half])
    copies = [item.traffic_per_second for item in ranks.copies if item.kind == "device"]
    if copies:
        changes["memory_efficiency"] = _fraction(_STREAMED * max(copies) / gpu.memory_bandwidth)
    if rates := _attention_rates(ranks, peaks[half]):
        changes["attention"] = rates
    # Small collectives show the latency of the ring's hops, large ones its rate.
    if ranks.collectives:
        fastest = max(item.link_bytes_per_second for item in ranks.collectives)
        changes["link_efficiency"] = _fraction(fastest / gpu.link_bandwidth)
        smallest = min(ranks.collectives, key=lambda item: (item.bytes, item.seconds))
        changes["link_latency"] = smallest.seconds / (smallest.ranks - 1)
    if ranks.kernels:
        changes |= {"kernels": ranks.kernels, "throughput_range": PROBED_RANGE}
    for name in ("context_bytes", "communicator_bytes", "further_communicator_bytes", "kernel_latency"):
        if (value := getattr(ranks, name)) is not None:
            changes[name] = value
    return changes


def _traced(
    gpu: Gpu, traces: Sequence[KinetoTrace], base: Machine
) -> tuple[dict[str, Any], dict[str, tuple[int, str]]]:
    """Return the fields of a machine's row that traces replace, and on how many events each of them rests."""
    rates = traced_rates(traces, cache_bytes=base.cache_bytes)
    peak = next((gpu.flops[name] for name in ("bfloat16", "float16") if gpu.flops.get(name)), None)
    changes: dict[str, Any] = {}
    events: dict[str, tuple[int, str]] = {}
    if rates.products is not None and peak:
        changes["matmul_efficiency"] = _fraction(rates.products.value / peak)
        events["matmul_efficiency"] = rates.products.events, "products"
    if rates.copies is not None:
        changes["memory_efficiency"] = _fraction(_STREAMED * rates.copies.value / gpu.memory_bandwidth)
        events["memory_efficiency"] = rates.copies.events, "copies"
    if rates.link is not None:
        changes["link_efficiency"] = _fraction(rates.link.value / gpu.link_bandwidth)
        events["link_efficiency"] = rates.link.events, "collectives"
    if rates.hop is not None:
        changes["link_latency"] = rates.hop.value
        events["link_latency"] = rates.hop.events, "collectives"
    return changes, events


def _attention_rates(ranks: RankMeasurements, peak: float) -> tuple[AttentionRate, ...]:
    """Return the fastest kernel's rates at each head size, from causal attention in half precision."""
    best: dict[int, AttentionRate] = {}
    for item in ranks.attention:
        if item.masking != "causal" or item.dtype == "float32" or not item.chosen:
            continue
        if not item.forward_seconds or not item.backward_seconds:
            continue
        rate = AttentionRate(
            item.head_size,
            _fraction(item.flops / item.forward_seconds / peak),
            _fraction(2.5 * item.flops / item.backward_seconds / peak),
        )
        known = best.get(item.head_size)
        if known is None or rate.forward > known.forward:
            best[item.head_size] = rate
    return tuple(best[size] for size in sorted(best))


def _fraction(value: float) -> float:
    return min(max(value, 0.01), 1.0)


def _scaled(fraction: float, factor: float) -> float:
    return _fraction(fraction * factor)


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
