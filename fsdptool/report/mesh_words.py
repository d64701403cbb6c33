"""Why a mesh was chosen, in sentences."""

from __future__ import annotations

from collections.abc import Iterator

from fsdptool.records.mesh import PLANNED
from fsdptool.records.plan import Plan
from fsdptool.records.plan_details import CommunicationWaits, MeshGroup
from fsdptool.report import plan_words as words

_NAMES = {**{item.name: item.title for item in PLANNED}, "experts_shard": "sharding of the experts"}
_SHOWN = 3
"""Other meshes that are listed."""


def mesh_lines(plan: Plan) -> Iterator[str]:
    """Yield why the chosen mesh won: its groups and nodes, what it waits for, and the next best meshes."""
    choice = plan.details.mesh
    if choice is None:
        return
    step = words.shown(plan).step_seconds
    inside = [_group(item) for item in choice.groups if item.nodes == 1]
    across = [_group(item, nodes=True) for item in choice.groups if item.nodes > 1]
    places = [f"inside a node: {', '.join(inside)}"] if inside else []
    places += [f"between nodes: {', '.join(across)}"] if across else []
    yield f"mesh: {'; '.join(places)}; {_waits(choice.waits, step)}"
    for other in choice.alternatives[:_SHOWN]:
        verdict = "does not fit with the headroom"
        if other.fits and other.relative_speed:
            change = 1 / other.relative_speed - 1
            verdict = (
                f"{change:.0%} slower" if change >= 0 else f"{-change:.0%} faster, but needs more memory"
            )
            verdict += f", {_waits(other.waits, step / other.relative_speed if step else None)}"
        yield f"  {words.mesh(other)}: {verdict}"


def _group(item: MeshGroup, *, nodes: bool = False) -> str:
    over = f" on {item.nodes} nodes" if nodes else ""
    return f"{_NAMES[item.dimension]} ({item.ranks} ranks{over})"


def _waits(waits: CommunicationWaits, step: float | None) -> str:
    parts = [
        f"{seconds / step:.0%} of the step waits for {what}"
        for seconds, what in (
            (waits.group, "sums and all-to-alls"),
            (waits.sharding, "gathers and reductions"),
        )
        if step and seconds / step >= 0.005
    ]
    return " and ".join(parts) if parts else "no communication is exposed"
