"""What fused kernels of other programs leave of the traffic and the launches of eager modules.

The operators of a module come in parts: residual sums and norms in a block, rotary embeddings and norms in
attention, the gated activation in an MLP, scale and sum around an adapter. ``data/fused_kernels.json`` says
what each part moves per element, eager and fused. A module keeps the ratio of what its parts move.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fsdptool.files.values import read_data
from fsdptool.records.anatomy import Anatomy

_DATA = Path(__file__).parents[1] / "data" / "fused_kernels.json"
_IN_TORCH = ("LayerNorm", "RMSNorm", "GroupNorm")
"""Norms that torch computes in one kernel."""
_GATES = ("gate_proj", "gate_up_proj", "w1")


@dataclass(frozen=True, slots=True)
class KernelShares:
    """What is left of a module's elementwise traffic and of its launches, in forward and in backward."""

    traffic: tuple[float, float] = (1.0, 1.0)
    launches: tuple[float, float] = (1.0, 1.0)

    def narrowed(self, share: float) -> KernelShares:
        """Return these shares, none of them above ``share``."""
        cut = [tuple(min(value, share) for value in pair) for pair in (self.traffic, self.launches)]
        return KernelShares((cut[0][0], cut[0][1]), (cut[1][0], cut[1][1]))


def fused_shares(anatomy: Anatomy, names: Collection[str]) -> dict[str, KernelShares]:
    """Return the shares of every module that the named kernels change, by its path.

    Args:
        anatomy: Of the model as it is trained, adapters included.
        names: Of fused kernels; others are passed over.
    """
    fused = {name for name in names if name in _parts()}
    if not fused:
        return {}
    found = {}
    for path, parts in _parts_of_modules(anatomy):
        if fused & parts.keys():
            found[path] = KernelShares(_ratio(parts, fused, "bytes"), _ratio(parts, fused, "kernels"))
    return found


def _parts_of_modules(anatomy: Anatomy) -> Iterator[tuple[str, Mapping[str, int]]]:
    """Yield every module that has parts of its own, and how often it has each."""
    children: dict[str, dict[str, str]] = {}
    for module in anatomy.modules:
        parent, _, name = module.path.rpartition(".")
        children.setdefault(parent, {})[name] = module.class_name
    rotary = any(key in anatomy.spec.config for key in ("rope_parameters", "rope_theta", "rope_scaling"))
    for module in anatomy.modules:
        own = children.get(module.path, {})
        norms = sum(_eager_norm(kind) for kind in own.values())
        if "lora_A" in own:
            yield module.path, {"fused_lora": 1}
        elif module.listed and norms:
            yield module.path, {"residual": 2, "fused_norm": norms}
        elif "Attention" in module.class_name and rotary:
            # Norms of queries and of keys see what the rotary embedding sees, half of it each.
            yield module.path, {"fused_rope": 1, **({"fused_norm": 1} if norms else {})}
        elif any(name in own for name in _GATES) and "down_proj" in own:
            yield module.path, {"fused_glu": 1}


def _eager_norm(kind: str) -> bool:
    return kind.endswith("Norm") and kind not in _IN_TORCH


def _ratio(parts: Mapping[str, int], fused: Collection[str], what: str) -> tuple[float, float]:
    sums = []
    for direction in (0, 1):
        eager = sum(_parts()[name]["eager"][what][direction] * count for name, count in parts.items())
        left = sum(
            _parts()[name]["fused" if name in fused else "eager"][what][direction] * count
            for name, count in parts.items()
        )
        sums.append(left / eager)
    return sums[0], sums[1]


@cache
def _parts() -> dict[str, Any]:
    parts: dict[str, Any] = read_data(_DATA)["parts"]
    return parts
