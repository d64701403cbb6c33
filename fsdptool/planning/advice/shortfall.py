"""Why nothing fits: the part of a rank's memory that decides it, and whether more GPUs would shrink it.

Sharding divides what a rank keeps between steps by the number of ranks. It does not divide a gathered unit,
which FSDP2 makes whole on every rank (torch 2.13, ``FSDPParamGroup.unshard``), nor the activations of a
micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from fsdptool.planning.candidate.estimator import Estimator
from fsdptool.planning.candidate.verdict import needed_outside
from fsdptool.records.advice import Shortfall, ShortfallKind
from fsdptool.records.plan import Candidate, PlanInputs, RejectionKind
from fsdptool.records.trace import ColourGroup, Component

_UNDIVIDED = (Component.REPLICATED, Component.BUFFERS)
"""States that every rank keeps whole."""

_KINDS = {
    ColourGroup.STATES: ShortfallKind.STATES,
    ColourGroup.GATHERED: ShortfallKind.GATHERED_UNITS,
    ColourGroup.ACTIVATIONS: ShortfallKind.ACTIVATIONS,
    ColourGroup.PASSING: ShortfallKind.ACTIVATIONS,
}


def leanest(candidates: Sequence[Candidate]) -> Candidate | None:
    """Return the candidate that needs the least device memory; None where no need is known."""
    known = [c for c in candidates if c.device_total_bytes is not None]
    return min(known, key=lambda c: c.device_total_bytes or 0, default=None)


def find_shortfall(
    estimator: Estimator, inputs: PlanInputs, candidates: Sequence[Candidate]
) -> Shortfall | None:
    """Return why none of the candidates fits, judged by the one that needs the least device memory.

    Args:
        estimator: Knows the units.
        inputs: The clusters.
        candidates: Everything that was evaluated; none fits.

    Returns:
        The cause; None where the memory of every candidate is unknown.
    """
    over = [c for c in candidates if c.rejected_by and c.rejected_by.kind is RejectionKind.DEVICE_MEMORY]
    candidate = leanest(over)
    if candidate is None or candidate.usable_bytes is None:
        return _host_shortfall(inputs, candidates)
    kinds = dict.fromkeys(_KINDS.values(), 0)
    divided = 0
    for item in candidate.components:
        component = Component(item.name)
        if component.group in _KINDS:
            kinds[_KINDS[component.group]] += item.bytes or 0
        if component.group is ColourGroup.STATES and component not in _UNDIVIDED:
            divided += item.bytes or 0
    kind = max(kinds, key=lambda name: kinds[name])
    cluster = inputs.clusters[candidate.settings.cluster]
    unit = None
    if kind is ShortfallKind.GATHERED_UNITS:
        unit = estimator.largest_unit(candidate.settings, cluster)
        if unit is None:  # every rank holds a copy: these are its gradients, and the buckets that sum them
            kind = ShortfallKind.STATES
            kinds[kind] += kinds[ShortfallKind.GATHERED_UNITS]
    # What any number of ranks would leave; of activations, context parallelism may divide a part.
    remaining = (candidate.device_total_bytes or 0) - divided
    if kind is ShortfallKind.GATHERED_UNITS:
        remaining = kinds[kind] + needed_outside(candidate)
    return Shortfall(
        kind=kind,
        candidate=candidate.id,
        bytes=kinds[kind],
        needed_bytes=candidate.device_total_bytes or 0,
        available_bytes=candidate.usable_bytes,
        more_gpus_help=remaining <= candidate.usable_bytes and cluster.gpu is not None,
        unit=unit,
    )


def _host_shortfall(inputs: PlanInputs, candidates: Sequence[Candidate]) -> Shortfall | None:
    """Return the shortfall of host memory, where that alone rules every candidate out."""
    over = [c for c in candidates if c.rejected_by and c.rejected_by.kind is RejectionKind.HOST_MEMORY]
    known = [c for c in over if c.host_bytes_per_node is not None]
    if not known:
        return None
    candidate = min(known, key=lambda c: c.host_bytes_per_node or 0)
    needed = candidate.host_bytes_per_node or 0
    available = inputs.clusters[candidate.settings.cluster].host_memory_bytes or 0
    return Shortfall(
        kind=ShortfallKind.HOST_MEMORY,
        candidate=candidate.id,
        bytes=needed,
        needed_bytes=needed,
        available_bytes=available,
        more_gpus_help=True,
    )
