"""Why a mesh was chosen, in sentences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fsdptool.records.mesh import PLANNED
from fsdptool.report import plan_words as words

_NAMES = {**{item.name: item.title for item in PLANNED}, "experts_shard": "sharding of the experts"}
_SHOWN = 3
"""Other meshes that are listed."""


def mesh_lines(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the chosen mesh won: its groups and nodes, what it waits for, and the next best meshes."""
    choice = document["details"].get("mesh")
    if not choice:
        return
    step = words.shown(document)["step_seconds"]
    inside = [_group(item) for item in choice["groups"] if item["nodes"] == 1]
    across = [_group(item, nodes=True) for item in choice["groups"] if item["nodes"] > 1]
    places = [f"inside a node: {', '.join(inside)}"] if inside else []
    places += [f"between nodes: {', '.join(across)}"] if across else []
    yield f"mesh: {'; '.join(places)}; {_waits(choice['waits'], step)}"
    for other in choice["alternatives"][:_SHOWN]:
        verdict = "does not fit with the headroom"
        if other["fits"] and other["relative_speed"]:
            change = 1 / other["relative_speed"] - 1
            verdict = (
                f"{change:.0%} slower" if change >= 0 else f"{-change:.0%} faster, but needs more memory"
            )
            verdict += f", {_waits(other['waits'], step / other['relative_speed'])}"
        yield f"  {words.mesh(other)}: {verdict}"


def _group(item: Mapping[str, Any], *, nodes: bool = False) -> str:
    over = f" on {item['nodes']} nodes" if nodes else ""
    return f"{_NAMES[item['dimension']]} ({item['ranks']} ranks{over})"


def _waits(waits: Mapping[str, float], step: float) -> str:
    parts = [
        f"{waits[name] / step:.0%} of the step waits for {what}"
        for name, what in (("group", "sums and all-to-alls"), ("sharding", "gathers and reductions"))
        if step and waits[name] / step >= 0.005
    ]
    return " and ".join(parts) if parts else "no communication is exposed"
