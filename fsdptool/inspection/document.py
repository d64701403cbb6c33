"""The answer of ``fsdptool detect``, the views of an anatomy it shows, every parameter's place. No torch."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from fsdptool.errors import ConfigError
from fsdptool.formatting import numberless
from fsdptool.inspection.api import Inspection, cache_parts
from fsdptool.inspection.census import CONTAINERS, Census, item_bytes, uneven, unit_plan
from fsdptool.inspection.hazards import fused_experts, holds_embedding
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.detection import (
    Branch,
    BufferSize,
    ConsideredClass,
    Detection,
    EmbeddingPaths,
    FusedExperts,
    LargestUnit,
    LeafClass,
    ModelSummary,
    ParameterCounts,
    Part,
    Place,
    PlacedParameter,
    SplitSummary,
    UnitSummary,
    WrapSummary,
)
from fsdptool.records.diagnostic import Answer, Diagnostic, answer
from fsdptool.records.sharding import Unit, UnitPlan
from fsdptool.records.tensor_plan import SequenceSpan, TensorPlan
from fsdptool.source.adapters import read_adapter
from fsdptool.tensor import refusals
from fsdptool.tensor.division import plan_expert_parallel, plan_tensor_parallel
from fsdptool.tensor.placements import placements

View = Literal["leaves", "tree", "where"]


def describe(
    inspection: Inspection,
    *,
    world_size: int | None = None,
    layout: Literal["native", "accelerate"] = "native",
    views: Iterable[View] = (),
    tensor_parallel: int | None = None,
    sequence_parallel: bool = False,
    expert_parallel: int | None = None,
    published: Anatomy | None = None,
    diagnostics: Iterable[Diagnostic] = (),
) -> Answer[Detection]:
    """Return what ``detect`` answers about an inspected model.

    Args:
        inspection: What :func:`fsdptool.inspection.examine` returned.
        world_size: Ranks that share the parameters, for the uneven ones; None leaves them unknown.
        layout: Whose units to list.
        views: Further looks to include.
        tensor_parallel: Ranks of a tensor-parallel group to show the division for.
        sequence_parallel: Whether that group divides hidden states along the sequence, too.
        expert_parallel: Ranks of an expert-parallel group to show the division for.
        published: The model before an adapter changed it, whose divisions are shown; None if it is the same.
        diagnostics: Findings from outside (plugins that failed to load).

    Raises:
        ConfigError: The layout does not support this model, or there is no tensor-parallel group that could
            divide sequences.
    """
    if sequence_parallel and (tensor_parallel or 1) == 1:
        raise ConfigError(
            "sequence parallelism needs tensor-parallel ranks", help="give --tp 2 or more, or leave it out"
        )
    anatomy, spec = inspection.anatomy, inspection.anatomy.spec
    census = Census(anatomy.modules, anatomy.parameters)
    units = unit_plan(anatomy, layout=layout)
    wanted = set(views)
    tensors, span, undivided = (
        divided_tensors(published or anatomy, tensor_parallel, sequence=sequence_parallel)
        if tensor_parallel
        else (None, None, ())
    )
    experts = expert_summary(published or anatomy, expert_parallel) if expert_parallel else None
    findings = [*undivided, *(violations(experts, "--ep") if experts else ())]
    detection = Detection(
        reference=anatomy.spec.reference,
        model=_model(anatomy),
        parameters=_counts(anatomy),
        wrap=WrapSummary(
            classes=anatomy.wrap.classes,
            units=len(units.units),
            origin=anatomy.wrap.origin,
            layout=units.layout,
            concern_code=anatomy.wrap.concern_code,
            concern=anatomy.wrap.concern,
        ),
        classes=_classes(anatomy, census),
        no_split_modules=anatomy.wrap.no_split_modules,
        repeated_blocks=anatomy.repeated_blocks,
        fsdp_plan_unmatched=anatomy.fsdp_plan_unmatched,
        units=tuple(_unit(unit) for unit in units.units),
        largest_unit=_largest(units, anatomy),
        embeddings=EmbeddingPaths(anatomy.input_embedding, anatomy.output_embedding, anatomy.final_norm),
        parts=parts(anatomy, census),
        experts=_experts(anatomy),
        ties=anatomy.ties,
        buffers=tuple(
            BufferSize(buffer.fqn, buffer.persistent, _bytes(buffer.shape, buffer.dtype), buffer.dtype)
            for buffer in anatomy.buffers
        ),
        lora=read_adapter(spec.adapter, spec.reference.id) if spec.adapter is not None else None,
        world_size=world_size,
        uneven=uneven(anatomy.parameters, world_size) if world_size else (),
        cached=inspection.cached,
        leaves=leaves(census) if "leaves" in wanted else None,
        tree=tree(anatomy, census) if "tree" in wanted else None,
        where=places(anatomy, _shown(anatomy)) if "where" in wanted else None,
        tensor_parallel=tensors,
        sequence_parallel=span,
        expert_parallel=experts,
    )
    inputs = {
        **cache_parts(spec),
        "wrap": anatomy.wrap.classes,
        "world_size": world_size,
        "layout": layout,
        "tensor_parallel": tensor_parallel,
        "sequence_parallel": sequence_parallel,
        "expert_parallel": expert_parallel,
    }
    return answer(
        "detect",
        inputs,
        detection,
        diagnostics=(*diagnostics, *spec.diagnostics, *anatomy.diagnostics, *inspection.store, *findings),
        unknowns=() if world_size else ("parameters that shard unevenly (use --world-size)",),
    )


def checkpoint_dtype(anatomy: Anatomy) -> str | None:
    """Return the dtype the configuration says its weights were saved in, or None."""
    for section in (anatomy.spec.config, anatomy.spec.config.get("text_config") or {}):
        for key in ("dtype", "torch_dtype"):
            value = section.get(key)
            if isinstance(value, str):
                return value.removeprefix("torch.")
    return None


def _model(anatomy: Anatomy) -> ModelSummary:
    spec = anatomy.spec
    return ModelSummary(
        class_=spec.model_class,
        library=spec.library,
        family=spec.family,
        flavour=spec.flavour,
        component=spec.component,
        objective=spec.objective,
        checkpoint_dtype=checkpoint_dtype(anatomy),
        adapter=spec.adapter is not None,
    )


def _counts(anatomy: Anatomy) -> ParameterCounts:
    total = anatomy.total_parameters
    trainable = sum(p.numel for p in anatomy.parameters if p.trainable)
    by_dtype: Counter[str] = Counter()
    for parameter in anatomy.parameters:
        by_dtype[parameter.dtype] += parameter.numel
    return ParameterCounts(
        total=total,
        trainable=trainable,
        frozen=total - trainable,
        tied_saved=sum(p.numel * len(p.aliases) for p in anatomy.parameters),
        by_dtype=dict(sorted(by_dtype.items())),
        frozen_fqns=tuple(p.fqn for p in anatomy.parameters if not p.trainable),
    )


def _classes(anatomy: Anatomy, census: Census) -> tuple[ConsideredClass, ...]:
    return tuple(
        ConsideredClass(
            **{field.name: getattr(candidate, field.name) for field in fields(candidate)},
            holds_embedding=any(holds_embedding(census, path) for path in census.by_class[candidate.name]),
        )
        for candidate in anatomy.wrap.candidates
    )


def _unit(unit: Unit) -> UnitSummary:
    fqns = tuple(parameter.fqn for parameter in unit.parameters)
    return UnitSummary(unit.id, unit.kind, unit.class_name, fqns, unit.numel)


def _largest(units: UnitPlan, anatomy: Anatomy) -> LargestUnit:
    largest = max(units.units, key=lambda unit: unit.numel)
    return LargestUnit(
        id=largest.id,
        kind=largest.kind,
        parameters=largest.numel,
        share=largest.numel / max(anatomy.total_parameters, 1),
        bytes_16bit=largest.numel * 2,
    )


def _experts(anatomy: Anatomy) -> FusedExperts | None:
    names = set(fused_experts(anatomy.parameters))
    if not names:
        return None
    experts = [parameter for parameter in anatomy.parameters if parameter.fqn in names]
    total = sum(parameter.numel for parameter in experts)
    return FusedExperts(
        tensors=len(experts),
        parameters=total,
        share=total / max(anatomy.total_parameters, 1),
        counts=tuple(sorted({parameter.shape[0] for parameter in experts})),
        largest=max(parameter.numel for parameter in experts),
    )


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    size = item_bytes(dtype)
    for length in shape:
        size *= length
    return size


def _shown(anatomy: Anatomy) -> list[str]:
    return [anatomy.modules[0].class_name, *(candidate.name for candidate in anatomy.wrap.candidates)]


def parts(anatomy: Anatomy, census: Census) -> tuple[Part, ...]:
    """Split the model into the subtrees that contain its lists of blocks, and the modules next to them."""
    blocks = {path for name in anatomy.wrap.classes for path in census.by_class.get(name, ())}
    subtrees = []
    counted: set[str] = set()
    for path in _split(census, "", blocks):
        names = [
            name for name in (census.below(path) if path in census.modules else ()) if name not in counted
        ]
        counted.update(names)
        sizes = [census.parameters[name] for name in names]
        total = sum(parameter.numel for parameter in sizes)
        if total:
            trainable = sum(parameter.numel for parameter in sizes if parameter.trainable)
            kind = census.modules[path].class_name
            subtrees.append(Part(path, kind, total, trainable, total / max(census.total, 1)))
    rest = [p for name, p in census.parameters.items() if name not in counted]
    if rest:
        total = sum(parameter.numel for parameter in rest)
        trainable = sum(parameter.numel for parameter in rest if parameter.trainable)
        root = census.modules[""].class_name
        subtrees.append(Part("", root, total, trainable, total / max(census.total, 1)))
    return tuple(subtrees)


def _split(census: Census, path: str, blocks: set[str]) -> list[str]:
    """Open a module as long as several of its branches hold lists of blocks; the root always."""
    holders = _holders(census, path, blocks)
    if not holders or not (path == "" or _branches(census, path, blocks)):
        return [path]
    return [
        part
        for child in census.inner(path)
        for part in (_split(census, child, blocks) if child in holders else [child])
    ]


def _holders(census: Census, path: str, blocks: set[str]) -> list[str]:
    """Return the children below which blocks lie; none if ``path`` holds a list of blocks itself."""
    children = census.inner(path)
    inner = [child for child in children if any(block.startswith(f"{child}.") for block in blocks)]
    bare = any(census.modules[child].class_name in CONTAINERS for child in inner)
    return [] if bare else inner


def _branches(census: Census, path: str, blocks: set[str]) -> bool:
    holders = _holders(census, path, blocks)
    return len(holders) > 1 or (len(holders) == 1 and _branches(census, holders[0], blocks))


def leaves(census: Census) -> tuple[LeafClass, ...]:
    """Return the classes that own parameters directly, the largest first."""
    by_class: dict[str, list[str]] = defaultdict(list)
    for path, module in census.modules.items():
        if census.owned.get(path):
            by_class[module.class_name].append(path)
    leaves = []
    for name, paths in by_class.items():
        owned = {fqn for path in paths for fqn in census.owned[path]}
        total = sum(census.parameters[fqn].numel for fqn in owned)
        leaves.append(LeafClass(name, len(paths), total, total / max(census.total, 1), tuple(paths[:5])))
    return tuple(sorted(leaves, key=lambda leaf: (-leaf.parameters_total, leaf.name)))


def tree(anatomy: Anatomy, census: Census) -> Branch:
    """Return the module tree with equal neighbours folded together."""
    return _branch(census, "", "(root)", 1, set(anatomy.wrap.classes))


def _branch(census: Census, path: str, name: str, count: int, wrapped: set[str]) -> Branch:
    kind = census.modules[path].class_name
    runs: list[tuple[list[str], object]] = []
    for child in census.inner(path):
        shape = (census.modules[child].class_name, census.signature(child))
        if runs and runs[-1][1] == shape and census.modules[child].listed:
            runs[-1][0].append(child)
        else:
            runs.append(([child], shape))
    children = []
    for same, _ in runs:
        first, last = same[0].rpartition(".")[2], same[-1].rpartition(".")[2]
        label = first if len(same) == 1 else f"{first}-{last}"
        children.append(_branch(census, same[0], label, len(same), wrapped))
    return Branch(name, kind, count, census.size(path), bool(path) and kind in wrapped, tuple(children))


def places(anatomy: Anatomy, names: Iterable[str]) -> tuple[Place, ...]:
    """Return where classes are defined, found in the sources as text: nothing is imported."""
    places = []
    for name in names:
        module = anatomy.class_modules.get(name, "")
        file = _source(module)
        places.append(Place(name, module, str(file) if file else None, _line(file, name) if file else None))
    return tuple(places)


def _source(module: str) -> Path | None:
    top, *rest = module.split(".")
    try:
        spec = find_spec(top) if top else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin else None
    for folder in spec.submodule_search_locations or ():
        base = Path(folder).joinpath(*rest)
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def _line(file: Path, name: str) -> int | None:
    pattern = re.compile(rf"class {re.escape(name)}\b")
    try:
        with file.open(encoding="utf-8") as stream:
            return next((number for number, line in enumerate(stream, 1) if pattern.match(line)), None)
    except OSError:
        return None


INDIVISIBLE = "DET140"
WHOLE_SEQUENCES = "DET141"


def divided_tensors(
    anatomy: Anatomy, size: int, *, sequence: bool
) -> tuple[SplitSummary, SequenceSpan | None, tuple[Diagnostic, ...]]:
    """Return how a tensor-parallel group divides a model, where it divides sequences, and what it cannot.

    Args:
        anatomy: The model.
        size: Ranks of the group.
        sequence: Whether hidden states are divided along the sequence where the model allows it.
    """
    refused: tuple[Diagnostic, ...] = ()
    try:
        plan = plan_tensor_parallel(anatomy, size, sequence=sequence)
    except ConfigError as error:
        plan = plan_tensor_parallel(anatomy, size)
        refused = (Diagnostic(WHOLE_SEQUENCES, "error", error.message, help=error.help),)
    split = summary(anatomy, plan)
    return split, plan.sequence, (*violations(split, "--tp"), *refused)


def expert_summary(anatomy: Anatomy, size: int) -> SplitSummary:
    """Return how an expert-parallel group of ``size`` ranks divides a model's fused experts."""
    return summary(anatomy, plan_expert_parallel(anatomy, size))


def summary(anatomy: Anatomy, plan: TensorPlan) -> SplitSummary:
    """Return a plan with the placement of every distinct parameter: names that differ in numbers are one."""
    split = {module.path: module for module in plan.modules}
    rows: dict[tuple[object, ...], PlacedParameter] = {}
    total = 0
    for parameter, placement in zip(anatomy.parameters, placements(anatomy.parameters, plan), strict=True):
        # A size that the group does not divide has no local shape; the violations say which.
        fits = all(section % plan.size == 0 for section in placement.sections)
        local = placement.local_shape(plan.size) if fits else placement.shape
        found = (split.get(name) or split.get(name.rpartition(".")[0]) for name in parameter.names)
        module = next((item for item in found if item is not None), None)
        divided = module if placement.dim is not None else None
        numel = 1
        for length in local:
            numel *= length
        total += numel
        name = numberless(parameter.fqn)
        key = (name, placement.shape, placement.dim, placement.sections, placement.reason)
        known = rows.get(key)
        rows[key] = PlacedParameter(
            name=name,
            count=known.count + 1 if known else 1,
            shape=placement.shape,
            local_shape=local,
            style=divided.style if divided else None,
            dim=placement.dim,
            sections=placement.sections,
            partial_gradient=placement.partial_gradient,
            reason=placement.reason,
            origin=divided.origin if divided else None,
        )
    return SplitSummary(
        size=plan.size,
        parameters=tuple(rows.values()),
        local_parameters=total,
        regions=tuple(dict.fromkeys(numberless(path) for path in plan.regions)),
        indivisible=plan.indivisible,
        notes=plan.notes,
    )


def violations(split: SplitSummary, option: str) -> Iterator[Diagnostic]:
    """Yield an error for everything that the group does not divide."""
    for message, advice in refusals.violations(option, split.size, split.indivisible):
        yield Diagnostic(INDIVISIBLE, "error", message, help=advice)
