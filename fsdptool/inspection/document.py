"""The JSON document of ``fsdptool detect`` (schemas/detect.schema.json). Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Literal

from fsdptool.inspection.api import Inspection, cache_parts
from fsdptool.inspection.census import Census
from fsdptool.inspection.hazards import fused_experts, holds_embedding
from fsdptool.inspection.units import item_bytes, uneven, unit_plan
from fsdptool.inspection.views import leaves, parts, places, tree
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.detection import (
    BufferSize,
    ConsideredClass,
    Detection,
    EmbeddingPaths,
    FusedExperts,
    LargestUnit,
    ModelSummary,
    ParameterCounts,
    UnitSummary,
    WrapSummary,
)
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.document import envelope
from fsdptool.records.units import Unit, UnitPlan

View = Literal["leaves", "tree", "where"]


def detect_document(
    inspection: Inspection,
    *,
    world_size: int | None = None,
    layout: Literal["native", "accelerate"] = "native",
    views: Iterable[View] = (),
    diagnostics: Iterable[Diagnostic] = (),
) -> dict[str, Any]:
    """Return the document of an inspection.

    Args:
        inspection: What :func:`fsdptool.inspection.examine` returned.
        world_size: Ranks that share the parameters, for the uneven ones; None leaves them unknown.
        layout: Whose units to list.
        views: Further looks to include.
        diagnostics: Findings from outside (plugins that failed to load).

    Raises:
        ConfigError: The layout does not support this model.
    """
    anatomy = inspection.anatomy
    census = Census(anatomy.modules, anatomy.parameters)
    units = unit_plan(anatomy, layout=layout)
    wanted = set(views)
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
        world_size=world_size,
        uneven=uneven(anatomy.parameters, world_size) if world_size else (),
        cached=inspection.cached,
        leaves=leaves(census) if "leaves" in wanted else None,
        tree=tree(anatomy, census) if "tree" in wanted else None,
        where=places(anatomy, _shown(anatomy)) if "where" in wanted else None,
    )
    spec = anatomy.spec
    inputs = {
        **cache_parts(spec),
        "wrap": anatomy.wrap.classes,
        "world_size": world_size,
        "layout": layout,
    }
    return envelope(
        "detect",
        inputs,
        detection,
        diagnostics=(*diagnostics, *spec.diagnostics, *anatomy.diagnostics, *inspection.store),
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
