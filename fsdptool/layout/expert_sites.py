"""Finds fused experts: modules that hold the weights of all experts in single tensors. Torch-free."""

from __future__ import annotations

from fsdptool.layout.projections import Layers
from fsdptool.layout.sites import FEED_FORWARD_WIDTHS, Left, Site
from fsdptool.records.anatomy import Parameter
from fsdptool.records.tensor_plan import SplitModule

FIRST = ("gate_up_proj", "up_proj")
SECOND = "down_proj"


def fused(layers: Layers, path: str) -> dict[str, tuple[str, Parameter]]:
    """Return the tensors of fused experts that a module holds, by their names there; empty if none."""
    held = {name.rpartition(".")[2]: (name, parameter) for name, parameter in layers.held.get(path, ())}
    stacks = [held[name][1] for name in (*FIRST, SECOND) if name in held]
    if len(stacks) < 2 or any(len(stack.shape) != 3 for stack in stacks):
        return {}
    return held


def experts(layers: Layers, path: str) -> Site | Left | None:
    """Return how the intermediate width of fused experts is divided, or None if the module holds none.

    Weights are stored as [experts, out, in], or as [experts, in, out] (gpt-oss, Llama 4). Gate and up lie one
    after the other, or alternate (gpt-oss: ``is_concatenated`` is false); alternating ones are one section.
    """
    held = fused(layers, path)
    if not held:
        return None
    first = next(name for name in FIRST if name in held)
    factor = 2 if first == "gate_up_proj" else 1
    (_, one, two), (_, three, four) = held[first][1].shape, held[SECOND][1].shape
    if (one, two) == (factor * four, three):
        width, transposed = four, False
    elif (one, two) == (four, factor * three):
        width, transposed = three, True
    else:
        return Left(path, "unknown", f"{first} and {SECOND} do not fit together")
    sizes = dict(layers.modules[path].sizes)
    apart = factor == 2 and sizes.get("is_concatenated", 1)
    sections = (width, width) if apart else ()
    site = Site(path, counts={"intermediate features of experts": width}, sums=[path])
    for name, (fqn, parameter) in held.items():
        if name == SECOND:
            site.modules.append(SplitModule(fqn, "row", (), transposed))
        elif name in (first, f"{first}_bias"):
            site.modules.append(SplitModule(fqn, "column", sections, transposed))
        elif name == f"{SECOND}_bias":
            site.whole[fqn] = "after_sum"
            site.shared.append(fqn)
        else:
            return Left(path, "unknown", f"what {name} {list(parameter.shape)} does is not known")
    divided = {name: value for name, value in sizes.items() if name in FEED_FORWARD_WIDTHS and value == width}
    if divided:
        site.attributes[path] = divided
    return site
