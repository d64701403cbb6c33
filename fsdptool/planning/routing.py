"""What the routing of a mixture's tokens does to memory: much where ranks exchange them, else nothing."""

from __future__ import annotations

from dataclasses import replace

from fsdptool.formatting import amount
from fsdptool.planning.candidate.estimator import Estimator
from fsdptool.planning.time.expert_time import exchange_sizes
from fsdptool.records.cluster import Cluster, Machine
from fsdptool.records.plan import Candidate
from fsdptool.records.plan_details import ExpertRouting
from fsdptool.tensor.sites import experts_of


def routing(
    estimator: Estimator, candidate: Candidate, cluster: Cluster, machine: Machine
) -> ExpertRouting | None:
    """Return the allocated peak under balanced and under the worst routing, and why; None without experts.

    A trace runs without values, so its memory cannot depend on which expert a token goes to: the
    products of all routed tokens are grouped, or every expert has room for a fixed number of them. A
    model that loops over the experts it hits cannot be traced, and both figures are unknown. Over an
    expert-parallel group, routing decides how many tokens come to a rank. The worst case, in which all tokens
    of the group do, is traced, too.
    """
    count = experts_of(estimator.anatomy.parameters)
    if count is None:
        return None
    peak = candidate.allocated_peak_bytes
    if peak is None:
        reason = "the tokens of each expert decide the sizes of its products, which are not known in advance"
        return ExpertRouting(count, None, None, reason)
    point = candidate.settings
    if point.ep == 1:
        reason = "all routed tokens are computed together, in buffers of the same size for every routing"
        return ExpertRouting(count, peak, peak, reason)
    worst = replace(estimator, worst_routing=True, _traces={}, _costs={}, _flops={})
    skewed = worst.candidate("worst", point, cluster, machine, detail=False, replay=False)
    units = estimator.units_of(point, cluster)
    most, least = (
        max(
            (size for ways in exchange_sizes(e.trace_of(point, cluster), units).values() for size in ways[0]),
            default=0,
        )
        for e in (worst, estimator)
    )
    reason = f"the tokens of all {point.ep} expert-parallel ranks may choose experts of one rank"
    return ExpertRouting(count, peak, skewed.allocated_peak_bytes, reason, least, most)


def routing_note(routing: ExpertRouting) -> str:
    """Return :func:`routing` in one line."""
    balanced, worst = amount(routing.balanced_bytes), amount(routing.worst_case_bytes)
    note = (
        f"{routing.experts} experts: the peak is {balanced} allocated with balanced routing and {worst}"
        f" in the worst case: {routing.reason}"
    )
    if routing.all_to_all_bytes is not None:
        least, most = amount(routing.all_to_all_bytes), amount(routing.worst_all_to_all_bytes)
        note += f"; each rank receives {least} to {most} in an all-to-all"
    return note
