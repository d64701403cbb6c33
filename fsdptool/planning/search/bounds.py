"""What a configuration needs at least, known before its micro-batch is traced and its step is simulated.

A search leaves out what cannot fit. The states of a rank, and the units that stay gathered after forward,
follow from the sharding alone, and no micro-batch needs less than both. What a micro-batch keeps for backward
needs a trace. Of two checkpointing policies, the one that recomputes less keeps more, so where a policy does
not fit by far, none that recomputes less is traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from fsdptool.formatting import amount
from fsdptool.planning.candidate.assembly import refused
from fsdptool.planning.candidate.verdict import usable_bytes
from fsdptool.records.plan import Candidate, PlanInputs, Rejection, RejectionKind, SearchPoint
from fsdptool.records.trace import ColourGroup

if TYPE_CHECKING:
    from fsdptool.planning.candidate.estimator import Estimator

BY_RECOMPUTATION = ("full", "selective", "none")
"""Checkpointing policies of which each recomputes less, and so keeps more, than those before it."""

_KEPT_AGAIN = 0.5
"""Part of a policy's activations that one which recomputes less may do without.

Selective checkpointing keeps the output of each product, of which backward without recomputation reads some
only in part (the product before a residual connection). What it keeps instead, another product's input, is as
large.
"""


def least_without_recomputation(candidate: Candidate) -> int | None:
    """Return the device bytes that a candidate would need at least if it recomputed less; None: not known."""
    total, peak = candidate.device_total_bytes, candidate.peak
    if total is None or peak is None:
        return None
    kept = sum(item.bytes for item in peak.live if item.name.group is ColourGroup.ACTIVATIONS)
    return total - int(_KEPT_AGAIN * kept)


def is_bounded(candidate: Candidate) -> bool:
    """Whether a candidate was not simulated, because it cannot fit."""
    kind = candidate.rejected_by.kind if candidate.rejected_by is not None else None
    return kind is RejectionKind.DEVICE_MEMORY and candidate.device_total_bytes is None


@dataclass(slots=True)
class Bounds:
    """Evaluates configurations of a search, and leaves out those that cannot fit.

    Args:
        estimator: Evaluates one configuration.
        inputs: The canonical inputs.
        active: Whether anything is left out.
    """

    estimator: Estimator
    inputs: PlanInputs
    active: bool = True
    _least: dict[SearchPoint, int] = field(default_factory=dict)

    def order(self, space: Sequence[SearchPoint]) -> list[int]:
        """Return the places of points in the order to evaluate them: what recomputes more comes first."""
        if not self.active:
            return list(range(len(space)))
        rank = {policy: place for place, policy in enumerate(BY_RECOMPUTATION)}
        return sorted(range(len(space)), key=lambda place: rank.get(space[place].checkpointing, 0))

    def candidate(self, point: SearchPoint) -> Candidate:
        """Return a point's candidate, simulated only if it may fit."""
        cluster, machine = self.inputs.clusters[point.cluster], self.inputs.machines[point.cluster]
        usable = usable_bytes(cluster)
        if self.active and cluster.gpu is not None and usable is not None:
            least = self._bound(point)
            if least is not None and least > usable:
                self._raise(point, least)
                return _without_room(point, least, usable)
        found = self.estimator.candidate("", point, cluster, machine, detail=False)
        if (least := least_without_recomputation(found)) is not None:
            self._raise(point, least)
        return found

    def find_leanest(self, candidates: list[Candidate]) -> None:
        """Simulate what was left out, in place, until the one that needs the least is among the simulated."""
        known = [c.device_total_bytes for c in candidates if c.device_total_bytes is not None]
        best = min(known, default=None)
        left = [place for place, candidate in enumerate(candidates) if is_bounded(candidate)]
        for place in sorted(left, key=lambda place: self._least.get(candidates[place].settings, 0)):
            point = candidates[place].settings
            if best is not None and self._least.get(point, 0) >= best:
                break
            cluster, machine = self.inputs.clusters[point.cluster], self.inputs.machines[point.cluster]
            found = self.estimator.candidate(candidates[place].id, point, cluster, machine, detail=False)
            candidates[place] = found
            if found.device_total_bytes is not None:
                best = min(best or found.device_total_bytes, found.device_total_bytes)

    def _bound(self, point: SearchPoint) -> int | None:
        """Return the least device bytes known of a point: its own, or what recomputing more needs."""
        cluster, machine = self.inputs.clusters[point.cluster], self.inputs.machines[point.cluster]
        own = self.estimator.least_bytes(point, cluster, machine)
        return max((n for n in (own, self._least.get(point)) if n is not None), default=None)

    def _raise(self, point: SearchPoint, least: int) -> None:
        """Note what a point needs at least, and with it each that recomputes less."""
        self._least[point] = max(least, self._least.get(point, 0))
        if point.checkpointing in BY_RECOMPUTATION:
            place = BY_RECOMPUTATION.index(point.checkpointing)
            for policy in BY_RECOMPUTATION[place + 1 :]:
                other = replace(point, checkpointing=policy)
                self._least[other] = max(least, self._least.get(other, 0))


def _without_room(point: SearchPoint, least: int, usable: int) -> Candidate:
    """Return a candidate that is not simulated, because it needs ``least`` bytes at least."""
    detail = f"needs at least {amount(least - usable)} more than the {amount(usable)} usable"
    return replace(refused("", point, Rejection(RejectionKind.DEVICE_MEMORY, detail)), usable_bytes=usable)
