"""Finds attention, feed-forward and expert modules that can be divided, by names and shapes. Torch-free.

A *site* is one such module with its column and row layers. Whether a group size divides it is asked later:
a site lists the counts that the size must divide.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from fsdptool.records.anatomy import Parameter
from fsdptool.records.tensor_plan import SplitModule, SplitStyle, WholeReason
from fsdptool.tensor.projections import (
    ADDED,
    ATTENTION_ROWS,
    FEED_FORWARDS,
    FUSED,
    GATES,
    INTERLEAVED,
    JOINED,
    KEYS,
    LATENT,
    OUTER_ROWS,
    PARALLEL,
    QUERIES,
    SECOND_ROWS,
    WHOLE_CLASSES,
    Layer,
    Layers,
    is_norm,
)

_LISTED = re.compile(r"\.experts\.(\d+)\.")
HEADS = ("num_heads", "n_heads", "heads", "num_attention_heads", "n_head", "config.num_attention_heads")
KEY_HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "kv_heads",
    "n_kv_heads",
    "config.num_key_value_heads",
)
HEAD_SIZES = ("head_dim", "attention_head_size", "head_size", "key_value_proj_dim", "dim_head", "d_head")
WIDTHS = (
    "split_size",
    "inner_dim",
    "inner_kv_dim",
    "kv_inner_dim",
    "all_head_size",
    "embed_dim",
    "hidden_size",
    "out_dim",
)
"""Attributes that name a divided width; modules whose code reads them before their row layer."""
FEED_FORWARD_WIDTHS = ("intermediate_size", "intermediate_dim", "mlp_hidden_dim", "expert_dim")


@dataclass(slots=True)
class Site:
    """A module that can be divided.

    Attributes:
        path: Of the module.
        region: Whether the module is a region; else every column layer is one by itself.
        modules: What is split.
        counts: What the group size must divide, by what is counted.
        heads: Heads of queries, and of keys and values; empty for others.
        attributes: Integer attributes of modules to divide (``TensorPlan.attributes``).
        whole: Why parameters inside stay whole, by name.
        sums: Modules whose output is summed.
        shared: Whole parameters that every rank adds before the sum.
        divided_arguments: Arguments that arrive divided.
    """

    path: str
    region: bool = True
    modules: list[SplitModule] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    heads: tuple[int, ...] = ()
    attributes: dict[str, dict[str, int]] = field(default_factory=dict)
    whole: dict[str, WholeReason] = field(default_factory=dict)
    sums: list[str] = field(default_factory=list)
    shared: list[str] = field(default_factory=list)
    divided_arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Left:
    """A module that looks like a site and cannot be divided: the reason for its parameters, in words too."""

    path: str
    reason: WholeReason
    words: str


def attention(layers: Layers, path: str) -> Site | Left | None:
    """Return the site of an attention module, why it cannot be divided, or None if it is none."""
    names = {child.rpartition(".")[2]: child for child in layers.children[path]}
    fused = [name for name in names if name in FUSED | INTERLEAVED and names[name] in layers.linear]
    queries = [name for name in names if name in QUERIES and names[name] in layers.linear]
    keys = [name for name in names if name in KEYS and names[name] in layers.linear]
    if PARALLEL in names:
        return _parallel(layers, path)
    if not fused and not (queries and keys) and not (queries and "kv_b_proj" in names):
        return None
    if words := WHOLE_CLASSES.get(layers.modules[path].class_name):
        return Left(path, "coupled", words)
    rows = layers.at(path, *ATTENTION_ROWS)[:1] or layers.at(path.rpartition(".")[0], *OUTER_ROWS)[:1]
    rows += layers.at(path, *SECOND_ROWS)
    sizes = dict(layers.modules[path].sizes)
    columns = [*queries, *keys, *(name for name in names if name in ADDED | GATES)]
    counted = _heads(layers, sizes, [names[n] for n in queries], [names[n] for n in keys], rows)
    if counted is None:
        return Left(path, "unknown", "its number of heads is not known")
    heads, key_heads = counted
    site = Site(path, heads=counted, counts={"attention heads": heads, "key and value heads": key_heads})
    widths = set()
    for name in columns:
        layer = layers.linear[names[name]]
        if layer.outputs % (key_heads if name in KEYS else heads):
            return Left(path, "unknown", f"{name} has {layer.outputs} outputs for {heads} heads")
        site.modules.append(_split(layer, "column"))
        widths.add(layer.outputs)
    for name in fused:
        layer = layers.linear[names[name]]
        sections = _fused(name, layer, heads, key_heads)
        if sections is None:
            return Left(path, "unknown", f"{name} has {layer.outputs} outputs for {heads} heads")
        site.modules.append(_split(layer, "column", sections))
        widths.update(sections or (layer.outputs,))
    for layer in rows:
        if layer.inputs % heads:
            return Left(path, "unknown", f"{layer.path} has {layer.inputs} inputs for {heads} heads")
        site.modules.append(_split(layer, "row"))
        widths.add(layer.inputs)
        site.sums.append(layer.path)
    if not rows and not _join(layers, site):
        return Left(path, "unknown", "no layer takes what it returns")
    if left := _others(layers, site, widths):
        return left
    site.attributes |= _attributes(layers, path, heads, key_heads, widths) | _stated(layers, site)
    if "position_bias" in layers.modules[path].arguments:
        site.divided_arguments = ("position_bias",)
    return site


def _join(layers: Layers, site: Site) -> bool:
    """Add the block's layer that takes attention and feed-forward features side by side, if it has one."""
    block = site.path.rpartition(".")[0]
    first, last = (layers.linear.get(f"{block}.{name}") for name in JOINED)
    inner = next((layers.linear[m.path].outputs for m in site.modules if m.path in layers.linear), 0)
    width = last.inputs - inner if last is not None else 0
    if first is None or last is None or first.outputs not in (width, 2 * width):
        return False
    gated = (width, width) if first.outputs == 2 * width else ()
    site.modules += [_split(first, "column", gated), _split(last, "row", (inner, width))]
    site.counts["intermediate features"] = width
    site.sums.append(last.path)
    if dict(layers.modules[block].sizes).get("mlp_hidden_dim") == width:
        site.attributes[block] = {"mlp_hidden_dim": width}
    return True


def _parallel(layers: Layers, path: str) -> Site | Left | None:
    """Return the site of FLUX.2's single blocks, whose attention modules hold feed-forward layers, too."""
    both, last = layers.linear.get(f"{path}.{PARALLEL}"), layers.linear.get(f"{path}.to_out")
    sizes = dict(layers.modules[path].sizes)
    heads, inner, width = (sizes.get(name, 0) for name in ("heads", "inner_dim", "mlp_hidden_dim"))
    if both is None or last is None or not heads:
        return None
    gates = (width,) * sizes.get("mlp_mult_factor", 1)
    if both.outputs != 3 * inner + sum(gates) or last.inputs != inner + width:
        return Left(path, "unknown", f"{PARALLEL} has {both.outputs} outputs")
    site = Site(path, heads=(heads, heads), counts={"attention heads": heads, "intermediate features": width})
    site.modules = [_split(both, "column", (inner,) * 3 + gates), _split(last, "row", (inner, width))]
    site.sums = [last.path]
    site.attributes = {path: {"heads": heads, "inner_dim": inner, "mlp_hidden_dim": width}}
    return _others(layers, site, {inner}) or site


def _heads(
    layers: Layers,
    sizes: Mapping[str, int],
    queries: list[str],
    keys: list[str],
    rows: list[Layer],
) -> tuple[int, int] | None:
    """Return the heads of queries and of keys: from the module's attributes, else from the size of a head."""
    heads = next((sizes[name] for name in HEADS if name in sizes), 0)
    size = next((sizes[name] for name in HEAD_SIZES if name in sizes), 0)
    # What enters the row layer is one output per head; a query projection may hold a gate, too.
    inner = rows[0].inputs if rows else layers.linear[queries[0]].outputs if queries else 0
    if size and inner and not inner % size:
        heads = heads or inner // size
    if not heads:
        return None
    if len(keys) > 0 and inner and not inner % heads:
        outputs = layers.linear[keys[0]].outputs
        size = size or inner // heads
        if outputs % size == 0:
            return heads, outputs // size
    key_heads = next((sizes[name] for name in KEY_HEADS if name in sizes), heads)
    return heads, key_heads


def _fused(name: str, layer: Layer, heads: int, key_heads: int) -> tuple[int, ...] | None:
    """Return the sections of a fused projection, () for one, None where the shapes do not fit."""
    if name in INTERLEAVED:
        return () if not layer.outputs % (heads + 2 * key_heads) else None
    if name == "c_attn" and layer.outputs == 2 * layer.inputs:
        return (layer.inputs,) * 2  # GPT-2's cross-attention: keys and values only
    if layer.outputs % (heads + 2 * key_heads):
        return None
    size = layer.outputs // (heads + 2 * key_heads)
    return (heads * size, key_heads * size, key_heads * size)


def _others(layers: Layers, site: Site, widths: set[int]) -> Left | None:
    """Place every parameter of an attention module that no projection holds, or say what forbids it."""
    heads, key_heads = site.heads
    head_size = max(widths) // heads
    split = {module.path for module in site.modules}
    for name, parameter in layers.within(site.path):
        owner = name.rpartition(".")[0]
        if owner in split:
            continue
        module = layers.modules[owner]
        if is_norm(module):
            if len(parameter.shape) == 2 and parameter.shape[0] in (heads, key_heads):
                site.modules.append(SplitModule(owner, "column"))  # Cohere: a weight per head
                split.add(owner)
            elif parameter.numel in widths - {head_size} and "_a_" not in owner.rpartition(".")[2]:
                return Left(site.path, "spanned", f"{owner.rpartition('.')[2]} normalises over all heads")
            else:
                site.whole[name] = "norm"
        elif owner.rpartition(".")[2] in LATENT:
            site.whole[name] = "latent"
        elif module.embedding and len(parameter.shape) == 2 and parameter.shape[1] == heads:
            site.modules.append(SplitModule(owner, "column", transposed=True))
        elif owner == site.path and parameter.shape in ((heads,), (heads, 1, 1)):
            site.modules.append(SplitModule(name, "column"))
        else:
            return Left(site.path, "unknown", f"what {name} does is not known")
    return None


def _attributes(
    layers: Layers, path: str, heads: int, key_heads: int, widths: set[int]
) -> dict[str, dict[str, int]]:
    sizes = layers.modules[path].sizes
    divided = {
        name: value
        for name, value in sizes
        if (name in HEADS and value == heads)
        or (name in KEY_HEADS and value == key_heads)
        or (name.removeprefix("config.") in WIDTHS and value in widths)
    }
    return {path: divided} if divided else {}


def _stated(layers: Layers, site: Site) -> dict[str, dict[str, int]]:
    """Return what split layers say of their own outputs and compute with: ``nf`` of GPT-2's ``Conv1D``."""
    sizes = {
        module.path: dict(layers.modules[module.path].sizes)
        for module in site.modules
        if module.path in layers.linear
    }
    return {
        path: {"nf": stated["nf"]}
        for path, stated in sizes.items()
        if "nf" in stated and path not in site.sums
    }


def feed_forward(layers: Layers, path: str) -> Iterator[Site]:
    """Yield the feed-forward sites that a module holds directly (BART: beside attention)."""
    taken: set[str] = set()
    for columns, row in FEED_FORWARDS:
        firsts, seconds = layers.at(path, *columns), layers.at(path, row)
        if len(firsts) != len(columns) or not seconds or {layer.path for layer in firsts} & taken:
            continue
        second = seconds[0]
        sections: tuple[int, ...] = ()
        if all(layer.outputs == second.inputs for layer in firsts):
            pass
        elif len(firsts) == 1 and firsts[0].outputs == 2 * second.inputs:
            sections = (second.inputs,) * 2
        else:
            continue
        yield _feed_forward(layers, path, firsts, second, sections)
        taken.update(layer.path for layer in (*firsts, second))


def _feed_forward(
    layers: Layers, path: str, firsts: list[Layer], second: Layer, sections: tuple[int, ...]
) -> Site:
    site = Site(path, counts={"intermediate features": second.inputs}, sums=[second.path])
    site.modules = [*(_split(layer, "column", sections) for layer in firsts), _split(second, "row")]
    split = {module.path for module in site.modules}
    site.attributes.update(_stated(layers, site))
    # BLOOM adds the residual inside the module: it is an argument whose gradient is whole already.
    site.region = "residual" not in layers.modules[path].arguments and all(
        name.rpartition(".")[0] in split for name, _ in layers.within(path)
    )
    if site.region and (
        widths := {
            name: value
            for name, value in layers.modules[path].sizes
            if name in FEED_FORWARD_WIDTHS and value == second.inputs
        }
    ):
        site.attributes[path] = widths
    return site


def _split(layer: Layer, style: SplitStyle, sections: tuple[int, ...] = ()) -> SplitModule:
    return SplitModule(layer.path, style, sections, layer.transposed)


FIRST = ("gate_up_proj", "up_proj")
SECOND = "down_proj"


def experts_of(parameters: Iterable[Parameter]) -> int | None:
    """Return how many experts a layer routes tokens to, or None if it has none.

    Fused experts are stacked in one tensor below an ``experts`` module; others are listed there.
    """
    count = 0
    for parameter in parameters:
        listed = _LISTED.search(f".{parameter.fqn}")
        if listed is not None:
            count = max(count, int(listed[1]) + 1)
        elif ".experts." in f".{parameter.fqn}" and len(parameter.shape) == 3:
            count = max(count, parameter.shape[0])
    return count if count > 1 else None


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
