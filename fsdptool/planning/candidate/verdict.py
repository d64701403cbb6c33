"""From a footprint to a verdict: what the driver would report, against what the GPU can give."""

from __future__ import annotations

from dataclasses import dataclass

from fsdptool.formatting import amount
from fsdptool.planning.candidate.memory_range import shipped_spread
from fsdptool.planning.candidate.throughput_range import Division
from fsdptool.records.cluster import Cluster, Machine
from fsdptool.records.plan import (
    Candidate,
    ComponentBytes,
    Footprint,
    RangeBasis,
    Rejection,
    RejectionKind,
    SearchPoint,
)
from fsdptool.records.trace import Component

HEADROOM = 0.05
"""Share of usable memory that a search leaves free: reserved memory was never measured on a GPU.

See docs/explanation/verdict-and-choice.md.
"""


@dataclass(frozen=True, slots=True)
class FitCheck:
    """Bytes against bytes.

    Attributes:
        device_total_bytes: Reserved (or allocated) plus what lies outside the allocator.
        usable_bytes: What the GPU (or the host, for CPU runs) can give one rank.
        slack_bytes: The difference.
        host_bytes_per_node: Host memory all ranks of a node need.
        components: The footprint's, and a line for each overhead.
        rejection: Why it does not fit, or why that is unknown; None where it fits.
    """

    device_total_bytes: int | None
    usable_bytes: int | None
    slack_bytes: int | None
    host_bytes_per_node: int
    components: tuple[ComponentBytes, ...]
    rejection: Rejection | None


def check_fit(footprint: Footprint, point: SearchPoint, cluster: Cluster, machine: Machine) -> FitCheck:
    """Return whether one rank of the configuration fits one GPU (CPU: its share of the host)."""
    context, communicators = outside_allocator(point, cluster, machine)
    host = max(
        (p.host_bytes_per_rank * cluster.gpus_per_node + p.host_bytes_rank_0 for p in footprint.phases),
        default=footprint.host_bytes_per_rank * cluster.gpus_per_node,
    )
    inside = footprint.reserved_peak_bytes
    if inside is None and footprint.allocated_peak_bytes is not None:
        ratio = machine.reserved_ratio if cluster.gpu is not None else None
        inside = int(footprint.allocated_peak_bytes * (ratio or 1.0))
    allocator_slack = None
    if inside is not None and footprint.allocated_peak_bytes is not None:
        allocator_slack = inside - footprint.allocated_peak_bytes
    extra = (
        (Component.ALLOCATOR_SLACK, allocator_slack),
        (Component.CONTEXT, context),
        (Component.COMMUNICATORS, communicators),
    )
    components = footprint.components + tuple(
        ComponentBytes(component, size, component.basis) for component, size in extra if size
    )
    total = None if inside is None else inside + context + communicators
    usable = usable_bytes(cluster)
    if cluster.gpu is None and total is not None:
        host += total * cluster.gpus_per_node
    slack = usable - total if usable is not None and total is not None else None
    rejection = _rejection(total, usable, host, cluster)
    return FitCheck(total, usable, slack, host, components, rejection)


def outside_allocator(point: SearchPoint, cluster: Cluster, machine: Machine) -> tuple[int, int]:
    """Return the bytes that the allocator never sees: of the context and of communicators."""
    if cluster.gpu is None:
        return 0, 0
    if cluster.world_size == 1:
        return machine.context_bytes, 0  # one GPU needs no communicator
    further = process_groups(point) - 1
    return machine.context_bytes, machine.communicator_bytes + further * machine.further_communicator_bytes


def least_device_bytes(candidate: Candidate) -> int | None:
    """Return the bytes a candidate needs if its allocator reserves no more than is allocated, or None.

    A replay of the allocator cannot find less: what exceeds a limit by this figure needs no replay.
    """
    if candidate.device_total_bytes is None:
        return None
    slack = sum(item.bytes or 0 for item in candidate.components if item.name == Component.ALLOCATOR_SLACK)
    return candidate.device_total_bytes - slack


@dataclass(frozen=True, slots=True)
class ReservedRange:
    """What published runs say of a reserved peak.

    Attributes:
        ends: Bytes between which it lies: the 10th and the 90th percentile.
        fit_share: Share of the runs, by weight, with whose error the plan fits; None if the limit is unknown.
        basis: The runs.
    """

    ends: tuple[int, int]
    fit_share: float | None
    basis: RangeBasis


def reserved_range(
    footprint: Footprint,
    verdict: FitCheck,
    cluster: Cluster,
    machine: Machine,
    *,
    expandable: bool,
    division: Division,
) -> ReservedRange | None:
    """Return between which bytes the reserved peak lies; None where published runs say nothing of it.

    No run needs less than what follows from shapes and dtypes alone. A machine that was measured has ratios
    of its own, and no caching allocator reserves the memory of hosts.
    """
    reserved, total = footprint.reserved_peak_bytes, verdict.device_total_bytes
    if cluster.gpu is None or machine.measured or reserved is None or total is None:
        return None
    least = min(reserved, sum(item.bytes or 0 for item in footprint.components if item.basis == "exact"))
    spread = shipped_spread(expandable, cluster.world_size > 1, division)
    outside, usable = total - reserved, verdict.usable_bytes

    def peak(factor: float) -> int:
        return max(int(reserved * factor), least)

    share = spread.share(lambda factor: outside + peak(factor) <= usable) if usable is not None else None
    return ReservedRange((peak(spread.low), peak(spread.high)), share, spread.basis)


def lowest_total(candidate: Candidate) -> int | None:
    """Return the least that the driver would report, by published runs; None where the total is unknown.

    What exceeds a limit by this figure certainly does not fit.
    """
    total = candidate.device_total_bytes
    if total is None or candidate.reserved_range_bytes is None:
        return total
    return total - (candidate.reserved_peak_bytes or 0) + candidate.reserved_range_bytes[0]


def highest_total(candidate: Candidate) -> int | None:
    """Return what the driver would report at the upper end of the reserved range; None: not known."""
    if candidate.reserved_range_bytes is None or candidate.device_total_bytes is None:
        return None
    outside = candidate.device_total_bytes - (candidate.reserved_peak_bytes or 0)
    return outside + candidate.reserved_range_bytes[1]


def needed_outside(candidate: Candidate) -> int:
    """Return the bytes of context, communicators and workspaces: the same for every model."""
    outside = (Component.CONTEXT, Component.COMMUNICATORS, Component.WORKSPACES)
    return sum(item.bytes or 0 for item in candidate.components if item.name in outside)


def usable_bytes(cluster: Cluster) -> int | None:
    """Return what one rank may use: the driver's total of its GPU, or its share of the host."""
    if cluster.gpu is not None:
        return cluster.gpu.memory_bytes
    if cluster.host_memory_bytes is None:
        return None
    return cluster.host_memory_bytes // cluster.gpus_per_node


def process_groups(point: SearchPoint) -> int:
    """Return how many communicators the run opens: the default one, one per further mesh dimension,
    and one for an integer reshard (torch 2.13, ``_fully_shard.py``)."""
    hybrid = 2 if point.dp_replicate > 1 and point.dp_shard * point.cp > 1 else 0
    integer = 0 if isinstance(point.reshard_after_forward, bool) else 1
    shared = sum(2 for size in (point.cp, point.tp, point.ep) if size > 1)
    return 1 + hybrid + integer + shared


def _rejection(total: int | None, usable: int | None, host: int, cluster: Cluster) -> Rejection | None:
    limit = cluster.host_memory_bytes
    if limit is not None and host > limit:
        detail = f"each node needs {amount(host)} of host memory and has {amount(limit)}"
        return Rejection(RejectionKind.HOST_MEMORY, detail)
    if total is None:
        return Rejection(RejectionKind.UNKNOWN_ACTIVATIONS, "the activations are unknown")
    if usable is None:
        return Rejection(RejectionKind.UNKNOWN_HOST_MEMORY, "the host's memory is unknown")
    if total > usable:
        detail = f"needs {amount(total - usable)} more than the {amount(usable)} usable"
        return Rejection(RejectionKind.DEVICE_MEMORY, detail)
    return None
