"""A candidate of a plan, put together from its memory, its time and its verdict."""

from __future__ import annotations

from fsdptool.planning.candidate.throughput_range import Division, range_of
from fsdptool.planning.candidate.verdict import FitCheck, reserved_range
from fsdptool.planning.time.step_time import Timing
from fsdptool.records.cluster import Cluster, Machine
from fsdptool.records.plan import Candidate, Footprint, Rejection, RejectionKind, SearchPoint


def assemble(
    id: str,
    point: SearchPoint,
    cluster: Cluster,
    footprint: Footprint,
    verdict: FitCheck,
    timing: Timing | None,
    machine: Machine,
    *,
    expandable: bool,
    division: Division,
) -> Candidate:
    """Return the candidate; its FLOPs are added by who knows them.

    The range of throughput is that of the machine table or, if the machine was not measured, that of
    published runs (``division``: what divides the model). The range of reserved memory is that of published
    runs, too (``expandable``: whether its segments grow).
    """
    price = None
    if timing is not None and cluster.price_per_gpu_hour is not None:
        per_second = cluster.price_per_gpu_hour * cluster.world_size / 3600
        price = per_second / timing.samples_per_second * 1e6
    step = timing.step if timing is not None else None
    seconds = step.seconds if step is not None else None
    speed = timing.tokens_per_second if timing is not None else None
    published = None
    if machine.throughput_range is None and not machine.measured:
        published = range_of(cluster, division)
    slow, fast = (published.slow, published.fast) if published else machine.throughput_range or (1.0, 1.0)
    ranged = published is not None or machine.throughput_range is not None
    peak = reserved_range(footprint, verdict, cluster, machine, expandable=expandable, division=division)
    return Candidate(
        id=id,
        settings=point,
        allocated_peak_bytes=footprint.allocated_peak_bytes,
        reserved_peak_bytes=footprint.reserved_peak_bytes,
        device_total_bytes=verdict.device_total_bytes,
        usable_bytes=verdict.usable_bytes,
        slack_bytes=verdict.slack_bytes,
        host_bytes_per_node=verdict.host_bytes_per_node,
        components=verdict.components,
        peak=footprint.peak,
        timeline=footprint.timeline,
        step_seconds=seconds,
        tokens_per_second=speed,
        rejected_by=verdict.rejection,
        samples_per_second=timing.samples_per_second if timing is not None else None,
        price_per_million_samples=price,
        seconds=step.parts() if step is not None else {},
        bound=step.bound if step is not None else None,
        phases=footprint.phases if footprint.timeline else (),
        step_seconds_range=(seconds / fast, seconds / slow) if ranged and seconds is not None else None,
        tokens_per_second_range=(speed * slow, speed * fast) if ranged and speed is not None else None,
        range_basis=published.basis if published is not None and seconds is not None else None,
        reserved_range_bytes=peak.ends if peak is not None else None,
        reserved_range_basis=peak.basis if peak is not None else None,
        fit_share=peak.fit_share if peak is not None else None,
        allocated_peak_range_bytes=footprint.allocated_peak_range_bytes,
    )


def refused(id: str, point: SearchPoint, rejection: Rejection) -> Candidate:
    """Return a candidate that cannot be evaluated: the model cannot be divided so."""
    return Candidate(
        id=id,
        settings=point,
        allocated_peak_bytes=None,
        reserved_peak_bytes=None,
        device_total_bytes=None,
        usable_bytes=None,
        slack_bytes=None,
        host_bytes_per_node=None,
        components=(),
        peak=None,
        timeline=(),
        step_seconds=None,
        tokens_per_second=None,
        rejected_by=rejection,
    )


def is_refused(candidate: Candidate) -> bool:
    """Whether a candidate was never evaluated, because the model cannot be divided so."""
    refusals = RejectionKind.INDIVISIBLE, RejectionKind.UNSUPPORTED
    return candidate.rejected_by is not None and candidate.rejected_by.kind in refusals
