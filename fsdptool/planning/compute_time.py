"""Seconds of compute per FSDP unit: a roofline over the trace's segments.

A segment lies between two module boundaries and mixes matrix products with elementwise operators, which
run one after another: its arithmetic and its memory traffic add up. Segments of module paths are
summed, then units collect the paths they contain; blocks that were not traced take the times of the
block they repeat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fsdptool.memory.simulation.program import traced_path
from fsdptool.records.cluster import Gpu, Machine
from fsdptool.records.sharding import UnitPlan
from fsdptool.records.trace import Repeat, Segment, Trace


@dataclass(frozen=True, slots=True)
class Cost:
    """One module's own work in one micro-batch: seconds forward and backward (recomputation included)."""

    forward: float = 0.0
    backward: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.forward + other.forward, self.backward + other.backward)

    def times(self, count: int) -> Cost:
        """Return the work of ``count`` such modules."""
        return Cost(self.forward * count, self.backward * count)


def peak_flops(gpu: Gpu, dtype: str) -> float:
    """Return the dtype's peak; bfloat16 without tensor cores for it runs at fp32's rate.

    fp32 is taken without TF32, which torch leaves off for matrix products by default (2.13).
    """
    return gpu.flops.get(dtype, gpu.flops["float32"])


def segment_seconds(segment: Segment, gpu: Gpu, machine: Machine) -> float:
    """Return the roofline of one segment, never faster than its kernels can be launched."""
    arithmetic = sum(
        flops / (peak_flops(gpu, dtype) * machine.matmul_efficiency) for dtype, flops in segment.flops.items()
    )
    traffic = segment.bytes_moved / (gpu.memory_bandwidth * machine.memory_efficiency)
    return max(arithmetic + traffic, segment.kernels * machine.kernel_latency)


def module_costs(trace: Trace, gpu: Gpu, machine: Machine) -> dict[str, Cost]:
    """Return every traced module's own work; key ``""`` is the root's and the loss's."""
    costs: dict[str, Cost] = {}
    owner = ""
    backward = False
    for segment in trace.segments:
        if segment.marker == "backward":
            backward = True
        owner = _owner(segment, owner)
        seconds = segment_seconds(segment, gpu, machine)
        if not seconds:
            continue
        cost = Cost(0.0, seconds) if backward else Cost(seconds)
        costs[owner] = costs.get(owner, Cost()) + cost
    return costs


def exchanged_bytes(trace: Trace) -> dict[str, Cost]:
    """Return what every traced module gathers in forward from the ranks that share its sequence.

    Bytes, under ``forward``: :func:`unit_costs` then sums them per unit. A collective's output is the
    one thing in a forward that ``new_empty`` allocates (``families.objectives.context``).
    """
    exchanged: dict[str, Cost] = {}
    owner = ""
    for segment in trace.segments:
        if segment.marker == "backward":
            break
        owner = _owner(segment, owner)
        allocated = [event - 1 for event in segment.events if event > 0]
        size = sum(trace.sizes[n] for n in allocated if trace.vocabulary[trace.names[n]] == "new_empty")
        if size:
            exchanged[owner] = exchanged.get(owner, Cost()) + Cost(forward=float(size))
    return exchanged


def model_flops(trace: Trace) -> float:
    """Return the FLOPs a micro-batch needs at full depth, recomputation not counted.

    Blocks that were not traced count as the period they repeat; a distillation's teacher counts, its
    forward being part of what the method computes.
    """
    total = model_flops(trace.teacher) if trace.teacher is not None else 0.0
    owner = ""
    for segment in trace.segments:
        owner = _owner(segment, owner)
        total += (sum(segment.flops.values()) - segment.recomputed) * _copies(owner, trace.repeats)
    return total


def _copies(path: str, repeats: Sequence[Repeat], within: str = "") -> int:
    """Return how many modules of the real model a traced one stands for, in one module ``within``."""
    count = 1
    for repeat in repeats:
        prefix = f"{repeat.path}." if repeat.path else ""
        if within.startswith(prefix):
            # Its parent is itself in one block of this list: each copy of the parent has its own.
            continue
        number = path[len(prefix) :].partition(".")[0] if path.startswith(prefix) else ""
        if number.isdigit() and repeat.cut - repeat.period <= int(number) < repeat.cut:
            count *= 1 + repeat.copies
    return count


def _owner(segment: Segment, current: str) -> str:
    """Return the module whose code runs after a module boundary: the module itself, or who called it."""
    if segment.marker in ("enter", "grad_enter"):
        return segment.path
    if segment.marker in ("leave", "grad_leave"):
        return segment.path.rpartition(".")[0]
    return "" if segment.marker in ("start", "loss", "backward", "end") else current


def unit_costs(costs: Mapping[str, Cost], repeats: Sequence[Repeat], units: UnitPlan) -> list[Cost]:
    """Return the work of each unit, in the plan's order: what its modules do, nested units apart.

    Args:
        costs: What :func:`module_costs` returned.
        repeats: The trace's shortened lists.
        units: The units of the real model.
    """
    traced = [tuple(traced_path(path, repeats) for path in unit.modules) for unit in units.units]
    owners: dict[str, int] = {}
    for index, paths in enumerate(traced):
        for path in paths:
            owners.setdefault(path, index)
    sums: dict[int, Cost] = {}
    for path, cost in costs.items():
        holder = _holder(path, owners)
        owner = owners.get(holder)
        if owner is not None:
            sums[owner] = sums.get(owner, Cost()) + cost.times(_copies(path, repeats, within=holder))
    return [sums.get(owners[paths[0]], Cost()) if paths else Cost() for paths in traced]


def _holder(path: str, owners: Mapping[str, int]) -> str:
    while path and path not in owners:
        path = path.rpartition(".")[0]
    return path
