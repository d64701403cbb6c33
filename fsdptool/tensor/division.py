"""Decides how a model is split over a tensor- or expert-parallel group and along sequences. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fsdptool.errors import ConfigError
from fsdptool.records.anatomy import Anatomy, Parameter
from fsdptool.records.tensor_plan import Indivisible, SequenceSpan, SplitModule, TensorPlan, WholeReason
from fsdptool.tensor.placements import placements, split_dim
from fsdptool.tensor.projections import LATENT, Layers, is_norm, is_router
from fsdptool.tensor.sites import Left, Site, attention, experts, feed_forward, fused

_STATE = frozenset({"A_log", "conv1d", "x_proj", "dt_proj"})
"""Names of children or parameters by which a recurrence is known (Mamba, gated delta rules)."""


@dataclass(slots=True)
class _Found:
    sites: list[Site] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)


def plan_tensor_parallel(
    anatomy: Anatomy,
    size: int,
    *,
    vocabulary: bool = True,
    sequence: bool = False,
    without: Collection[str] = (),
) -> TensorPlan:
    """Return how a model is split over ``size`` ranks.

    Args:
        anatomy: The published model (before adapters are added).
        size: Ranks of the group.
        vocabulary: Whether the vocabulary's embedding and head are divided where they can be.
        sequence: Whether hidden states are divided along the sequence.
        without: Modules whose parts another group holds.

    Raises:
        ConfigError: They cannot be.
    """
    layers = Layers(anatomy)
    found = _search(layers, _overruled(anatomy, layers), without)
    modules = [module for site in found.sites for module in site.modules]
    notes = [f"{left.path} stays whole: {left.words}" for left in _first_of_each(found.left)]
    if vocabulary:
        split, note = _vocabulary(anatomy, layers, size)
        modules += split
        notes += note
    named, findings = compare(anatomy.tensor_plan, layers, modules)
    notes += findings
    plan = TensorPlan(
        size=size,
        regions=tuple(site.path for site in found.sites if site.region),
        modules=named,
        heads={site.path: site.heads for site in found.sites if site.heads},
        attributes={path: sizes for site in found.sites for path, sizes in site.attributes.items()},
        sums=tuple(path for site in found.sites for path in site.sums),
        shared=tuple(name for site in found.sites for name in site.shared),
        divided_arguments=tuple(
            dict.fromkeys(name for site in found.sites for name in site.divided_arguments)
        ),
        indivisible=tuple(_indivisible(found.sites, size)),
        notes=tuple(notes),
    )
    plan = replace(plan, whole=_whole(anatomy, layers, found, plan))
    if not sequence:
        return plan
    left = {item.path: item.words for item in found.left}
    return replace(plan, sequence=find_span(anatomy, layers, plan, left, without))


def plan_expert_parallel(anatomy: Anatomy, size: int) -> TensorPlan:
    """Return how the fused experts of a model are shared out over ``size`` ranks: whole experts each.

    Args:
        anatomy: The published model.
        size: Ranks of the expert-parallel group.
    """
    layers = Layers(anatomy)
    stacked = [path for path in layers.modules if fused(layers, path)]
    # Llama 4's experts take every token, weighted already: there is nothing to send to other ranks.
    paths = [path for path in stacked if len(layers.modules[path].arguments) >= 3]
    counts = {path: next(iter(fused(layers, path).values()))[1].shape[0] for path in paths}
    indivisible = [
        Indivisible("experts", path, count, valid_sizes([count], size))
        for path, count in _first_paths(counts)
        if count % size
    ]
    if not paths:
        indivisible = [Indivisible("fused experts that take routed tokens", "", 0, (1,))]
    return TensorPlan(
        size=size,
        regions=tuple(paths),
        modules=tuple(SplitModule(path, "experts") for path in paths),
        attributes={
            path: {"num_experts": counts[path]}
            for path in paths
            if ("num_experts", counts[path]) in layers.modules[path].sizes
        },
        indivisible=tuple(indivisible),
    )


def localise(anatomy: Anatomy, plan: TensorPlan) -> Anatomy:
    """Return the anatomy of one rank's local model: parameters of local shape, everything else equal."""
    placed = placements(anatomy.parameters, plan)
    parameters = tuple(
        replace(parameter, shape=placement.local_shape(plan.size))
        for parameter, placement in zip(anatomy.parameters, placed, strict=True)
    )
    return replace(anatomy, parameters=parameters)


def valid_sizes(counts: Iterable[int], size: int) -> tuple[int, ...]:
    """Return the group sizes nearest to ``size`` that divide every count: the next below and above."""
    least = min(counts)
    fits = [n for n in range(1, least + 1) if all(not count % n for count in counts)]
    below = [n for n in fits if n < size][-1:]
    above = [n for n in fits if n > size][:1]
    return (*below, *above)


def _overruled(anatomy: Anatomy, layers: Layers) -> dict[str, str]:
    """Return what the family says of modules, by path."""
    styles: dict[str, str] = {}
    for pattern, style in anatomy.family_plan.items():
        matching = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        styles.update((path, style) for path in layers.modules if matching.fullmatch(path))
    return styles


def _of_family(layers: Layers, path: str, style: str) -> Site | Left:
    """Return a module as its family wants it: whole, or a column or row layer by itself."""
    layer = layers.linear.get(path)
    if style not in ("column", "row") or layer is None:
        words = "its family keeps it whole" if style == "whole" else f"it cannot be a {style} layer"
        return Left(path, "overridden", words)
    row = style == "row"
    split = SplitModule(path, "row" if row else "column", (), layer.transposed, "family")
    counts = {"features": layer.inputs if row else layer.outputs}
    return Site(path, region=False, modules=[split], counts=counts, sums=[path] if row else [])


def _search(layers: Layers, overruled: Mapping[str, str], without: Collection[str]) -> _Found:
    """Find the sites, outermost first; nothing inside a region or a recurrence is searched."""
    found = _Found()
    stack = [""]
    while stack:
        path = stack.pop()
        if path in without:
            continue
        children = layers.children.get(path, [])
        if _is_recurrence(layers, path):
            found.left.append(Left(path, "state", "its channels are mixed along the sequence"))
            continue
        if path in overruled:
            site: Site | Left | None = _of_family(layers, path, overruled[path])
        elif any(name.startswith(f"{path}.") for name in overruled):
            site = None
        else:
            site = attention(layers, path) or experts(layers, path)
        if isinstance(site, Left):
            found.left.append(site)
            continue
        if site is not None:
            found.sites.append(site)
            continue
        inner = [
            item
            for item in feed_forward(layers, path)
            if not any(module.path in overruled for module in item.modules)
        ]
        found.sites += inner
        if not any(item.region for item in inner):
            stack.extend(reversed(children))
    return found


def _is_recurrence(layers: Layers, path: str) -> bool:
    names = {child.rpartition(".")[2] for child in layers.children.get(path, ())}
    names |= {name.rpartition(".")[2] for name, _ in layers.held.get(path, ())}
    return len(names & _STATE) >= 2


def _first_of_each(left: Iterable[Left]) -> Iterator[Left]:
    """Yield the first of the modules that stay whole for the same reason."""
    seen: set[str] = set()
    for item in left:
        if item.reason != "state" and item.words not in seen:
            seen.add(item.words)
            yield item


def _first_paths(counts: dict[str, int]) -> Iterator[tuple[str, int]]:
    seen: set[int] = set()
    for path, count in counts.items():
        if count not in seen:
            seen.add(count)
            yield path, count


def _indivisible(sites: Iterable[Site], size: int) -> Iterator[Indivisible]:
    """Yield what the size does not divide, the first of several alike, with the sizes that divide it all."""
    first: dict[tuple[str, int], str] = {}
    for site in sites:
        for item in site.counts.items():
            first.setdefault(item, site.path)
    if not first:
        yield Indivisible("layers that can be divided", "", 0, (1,))
        return
    near = valid_sizes([count for _, count in first], size)
    for (what, count), path in first.items():
        if count % size:
            yield Indivisible(what, path, count, near)


def _vocabulary(anatomy: Anatomy, layers: Layers, size: int) -> tuple[list[SplitModule], list[str]]:
    """Return the input embedding and the head as split modules, or why they stay whole."""
    modules: dict[str, SplitModule] = {}
    notes: dict[str, None] = {}
    for path in (anatomy.input_embedding, anatomy.output_embedding):
        held = layers.held.get(path, ()) if path is not None else ()
        weight = next(
            (item for name, item in held if name == f"{path}.weight" and len(item.shape) == 2), None
        )
        # A tied table is divided everywhere or nowhere: T5's encoder and decoder have their own modules.
        owners = layers.tree.owners(weight) if weight is not None else ()
        fits = all(layers.modules[owner].embedding or owner in layers.linear for owner in owners)
        if weight is None or not fits or set(owners) & set(anatomy.weights_read):
            continue
        if weight.shape[0] % size:
            near = " or ".join(str(n) for n in valid_sizes([weight.shape[0]], size))
            notes[
                f"{owners[0]} stays whole: {size} does not divide its {weight.shape[0]} rows ({near} does)"
            ] = None
        else:
            modules.update((owner, SplitModule(owner, "vocabulary")) for owner in owners)
    return list(modules.values()), list(notes)


def _whole(anatomy: Anatomy, layers: Layers, found: _Found, plan: TensorPlan) -> dict[str, WholeReason]:
    reasons: dict[str, WholeReason] = {}
    for left in found.left:
        reasons.update((name, left.reason) for name, _ in layers.within(left.path))
    for site in found.sites:
        reasons.update(site.whole)
    split = {module.path: module.style for module in plan.modules}
    for parameter in anatomy.parameters:
        owners = {name.rpartition(".")[0] for name in parameter.names}
        for name in parameter.names:
            owner = name.rpartition(".")[0]
            style = split.get(name) or split.get(owner)
            if style == "row" and name.endswith("bias"):
                reasons[name] = "after_sum"
            elif style is not None:
                reasons.pop(name, None)
            elif name not in reasons:
                reasons[name] = _reason(anatomy, layers, owner)
                if reasons[name] == "stream" and anatomy.output_embedding in owners:
                    reasons[name] = "head"  # BERT's bias of the vocabulary has a name outside the head, too
    return reasons


def _reason(anatomy: Anatomy, layers: Layers, owner: str) -> WholeReason:
    module = layers.modules.get(owner)
    last = owner.rpartition(".")[2]
    if owner == anatomy.output_embedding or last in ("lm_head", "classifier", "score"):
        return "head"
    if module is None:
        return "unknown"
    if module.embedding or owner == anatomy.input_embedding:
        return "embedding"
    if is_router(module) or (last == "gate" and owner not in layers.linear):
        return "router"
    if is_norm(module):
        return "norm"
    return "latent" if last in LATENT else "stream"


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


_FROM_END = {"colwise": 2, "packed_colwise": 2, "rowwise": 1, "packed_rowwise": 1}
"""Divided dimension of a weight by transformers' and diffusers' styles, counted from the last (1)."""
_VOCABULARY = frozenset({"embedding_rowwise", "colwise_gather_output", "colwise_rep", "colwise"})


def compare(
    stated: Mapping[str, str], layers: Layers, modules: Sequence[SplitModule]
) -> tuple[tuple[SplitModule, ...], tuple[str, ...]]:
    """Return the split modules with their origin, and findings about the library's plan.

    A rule that divides the same dimension makes the library the origin. Findings are rules that match
    nothing, that divide another dimension or what stays whole here, and layers that the plan leaves out.

    Args:
        stated: The library's plan: style by pattern.
        layers: The model.
        modules: What is split here.
    """
    if not stated:
        return tuple(modules), ()
    ours = {module.path: module for module in modules}
    parameters = {name: parameter for held in layers.held.values() for name, parameter in held}
    agreed: set[str] = set()
    notes: list[str] = []
    unmatched: list[str] = []
    for pattern, style in stated.items():
        matching = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        paths = [path for path in layers.modules if path and matching.fullmatch(path)]
        paths += [name for name in parameters if matching.fullmatch(name)]
        if not paths:
            unmatched.append(pattern)
            continue
        notes += _judge(pattern, style.partition(":")[0], paths, ours, parameters, agreed)
    left_out = {_folded(path) for path in ours if path not in agreed and not _named(path, stated)}
    if unmatched:
        notes.append(f"rules of the library's plan that match nothing in this model: {', '.join(unmatched)}")
    if left_out:
        notes.append(f"divided here, left whole by the library's plan: {', '.join(sorted(left_out))}")
    return (
        tuple(
            replace(m, origin="library") if m.path in agreed and m.origin != "family" else m for m in modules
        ),
        tuple(notes),
    )


def _judge(
    pattern: str,
    style: str,
    paths: Sequence[str],
    ours: Mapping[str, SplitModule],
    parameters: Mapping[str, Parameter],
    agreed: set[str],
) -> Iterator[str]:
    """Yield what is wrong with one rule; paths that it divides as here are added to ``agreed``."""
    dim = _FROM_END.get(style)
    for path in paths:
        module = ours.get(path)
        weight = parameters.get(path) or parameters.get(f"{path}.weight")
        if module is not None and module.style == "vocabulary":
            agreed.update({path} if style in _VOCABULARY else ())
        elif dim is None or weight is None:
            continue
        elif module is None:
            yield f"the library's plan divides {pattern} ({style}); it stays whole here"
            return
        elif len(weight.shape) < 2 or split_dim(weight, path, module) == len(weight.shape) - dim:
            agreed.add(path)
        else:
            yield f"the library's plan has {pattern} as {style}, which contradicts its shape here"
            return


def _named(path: str, stated: Mapping[str, str]) -> bool:
    return _folded(path) in stated or path in stated


def _folded(path: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in path.split("."))
