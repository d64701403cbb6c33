"""Finds where hidden states can be divided along the sequence, or says what forbids it. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping

from fsdptool.errors import ConfigError
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.tensor_plan import SequenceSpan, TensorPlan
from fsdptool.tensor.projections import Layers, is_norm

_ALONG_SEQUENCE = ("BatchNorm", "GroupNorm", "InstanceNorm")
"""Norms over the positions of a sequence."""


def find_span(
    anatomy: Anatomy,
    layers: Layers,
    plan: TensorPlan,
    left: Mapping[str, str],
    without: Collection[str] = (),
) -> SequenceSpan:
    """Return where the hidden states of a model with one stack of blocks are divided.

    Everything in a block that does not lie in a region must compute position by position: norms, routers and
    gates. What is not known to do so is refused, since a wrong guess would train another model.

    Args:
        anatomy: The published model.
        layers: Its layers.
        plan: How its layers are divided.
        left: Why modules that look like regions are whole, by path.
        without: Modules of experts that another group shares out: they compute token by token.

    Raises:
        ConfigError: Names what forbids it.
    """
    inside = tuple(f"{path}." for path in plan.regions)
    alone = [m.path for m in plan.modules if m.style == "column" and not m.path.startswith(inside)]
    stacks = {_stack(path) for path in (*plan.regions, *alone)}
    if len(stacks) != 1 or None in stacks:
        raise _refusal("its divided layers do not lie in one list of blocks")
    blocks = stacks.pop()
    assert blocks is not None
    parent, norm = blocks.rpartition(".")[0], anatomy.final_norm
    if norm is None or norm.rpartition(".")[0] != parent:
        raise _refusal(f"no norm follows {blocks}")
    span = SequenceSpan(blocks, norm)
    words = next((f"{path} stays whole: {why}" for path, why in left.items() if span.covers(path)), None)
    if words is not None:
        raise _refusal(words)
    split = {*without, *(module.path for module in plan.modules)}
    for name, _ in layers.within(blocks):
        owner = name.rpartition(".")[0]
        if not (name.startswith(inside) or {name, owner} & split or _by_position(layers, plan, name, owner)):
            raise _refusal(f"{owner} may compute with several positions")
    return span


def _stack(path: str) -> str | None:
    """Return the list of blocks that a module lies in: the outermost one."""
    found = re.match(r"(.+?)\.\d+(\.|$)", path)
    return found[1] if found is not None else None


def _by_position(layers: Layers, plan: TensorPlan, name: str, owner: str) -> bool:
    module, layer = layers.modules.get(owner), layers.linear.get(owner)
    if module is not None and is_norm(module):
        return not any(
            word in kind for kind in (module.class_name, *module.bases) for word in _ALONG_SEQUENCE
        )
    return plan.whole.get(name) == "router" or (layer is not None and layer.outputs == 1)


def _refusal(words: str) -> ConfigError:
    return ConfigError(
        f"sharding.sequence_parallel is not supported: {words}",
        help="leave sharding.sequence_parallel out; tensor parallelism alone divides the layers",
    )
