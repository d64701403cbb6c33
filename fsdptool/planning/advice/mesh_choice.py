"""Why a mesh was chosen: the nodes its groups span, what its ranks wait for, and what other meshes cost."""

from __future__ import annotations

from collections.abc import Sequence

from fsdptool.planning.search.choice import merit, roomy
from fsdptool.records.cluster import Cluster
from fsdptool.records.mesh import PLANNED
from fsdptool.records.plan import Candidate, SearchPoint
from fsdptool.records.plan_details import CommunicationWaits, MeshAlternative, MeshChoice, MeshGroup

_DIMENSIONS = tuple(item.name for item in PLANNED)


def mesh_choice(
    candidates: Sequence[Candidate], chosen: Candidate, cluster: Cluster, *, prefer: str = "speed"
) -> MeshChoice | None:
    """Return why the chosen mesh won over the others that were evaluated; None where there was no other."""
    best: dict[tuple[int, ...], Candidate] = {}
    for candidate in candidates:
        if candidate.settings.cluster != chosen.settings.cluster or candidate.step_seconds is None:
            continue
        key = _sizes(candidate.settings)
        if key not in best or _rank(candidate, prefer) > _rank(best[key], prefer):
            best[key] = candidate
    own = _sizes(chosen.settings)
    others = sorted(
        (c for key, c in best.items() if key != own), key=lambda c: _rank(c, prefer), reverse=True
    )
    if not others:
        return None
    speed = merit(chosen, prefer)
    return MeshChoice(
        groups=_groups(chosen.settings, cluster),
        waits=_waits(chosen),
        alternatives=tuple(
            MeshAlternative(
                **dict(zip(_DIMENSIONS, _sizes(other.settings), strict=True)),
                id=other.id,
                fits=_fits(other),
                relative_speed=merit(other, prefer) / speed if speed else None,
                waits=_waits(other),
            )
            for other in others
        ),
    )


def _sizes(point: SearchPoint) -> tuple[int, ...]:
    return tuple(getattr(point, name) for name in _DIMENSIONS)


def _fits(candidate: Candidate) -> bool:
    reason = candidate.rejected_by
    return roomy(candidate) and not (reason is not None and reason.kind.does_not_fit)


def _rank(candidate: Candidate, prefer: str) -> tuple[bool, float]:
    if _fits(candidate):
        return True, merit(candidate, prefer)
    return False, candidate.slack_bytes if candidate.slack_bytes is not None else float("-inf")


def _groups(point: SearchPoint, cluster: Cluster) -> tuple[MeshGroup, ...]:
    """Return every group of more than one rank, and the nodes that one such group spans."""
    sharding = point.dp_shard * point.cp
    groups = (
        ("tp", point.tp, 1),
        ("ep", point.ep, 1),
        ("cp", point.cp, point.tp),
        ("dp_shard", sharding, point.tp),
        ("experts_shard", sharding * point.tp // point.ep if point.ep > 1 else 1, point.ep),
        ("dp_replicate", point.dp_replicate, sharding * point.tp),
    )
    return tuple(
        MeshGroup(name, ranks, _nodes(ranks, stride, cluster.gpus_per_node))
        for name, ranks, stride in groups
        if ranks > 1
    )


def _nodes(ranks: int, stride: int, per_node: int) -> int:
    return -(-ranks // max(per_node // stride, 1))


def _waits(candidate: Candidate) -> CommunicationWaits:
    group = candidate.seconds.get("group_communication", 0.0)
    exposed = candidate.seconds.get("exposed_communication", 0.0)
    return CommunicationWaits(group, max(exposed - group, 0.0))
