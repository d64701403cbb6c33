"""The JSON document of ``fsdptool detect`` (schemas/detect.schema.json). Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

from fsdptool.inspection.api import Inspection, cache_parts
from fsdptool.inspection.census import Census
from fsdptool.inspection.hazards import fused_experts, holds_embedding
from fsdptool.inspection.units import item_bytes, uneven, unit_plan
from fsdptool.inspection.views import leaves, parts, places, tree
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.codec import to_json
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.document import envelope
from fsdptool.records.units import UnitPlan

View = Literal["leaves", "tree", "where"]


def detect_document(
    found: Inspection,
    *,
    world_size: int | None = None,
    layout: Literal["native", "accelerate"] = "native",
    views: Iterable[View] = (),
    diagnostics: Iterable[Diagnostic] = (),
) -> dict[str, Any]:
    """Return the document of an inspection.

    Args:
        found: What :func:`fsdptool.inspection.examine` returned.
        world_size: Ranks that share the parameters, for the uneven ones; None leaves them unknown.
        layout: Whose units to list.
        views: Further looks to include.
        diagnostics: Findings from outside (plugins that failed to load).

    Raises:
        ConfigError: The layout does not support this model.
    """
    anatomy = found.anatomy
    census = Census(anatomy.modules, anatomy.parameters)
    units = unit_plan(anatomy, layout=layout)
    wanted = set(views)
    body = {
        **_model(anatomy),
        "wrap": {
            "classes": anatomy.wrap.classes,
            "units": len(units.units),
            "origin": anatomy.wrap.origin,
            "layout": units.layout,
            "concern_code": anatomy.wrap.concern_code,
            "concern": anatomy.wrap.concern,
        },
        "classes": _classes(anatomy, census),
        "no_split_modules": anatomy.wrap.no_split_modules,
        "repeated_blocks": anatomy.repeated_blocks,
        "fsdp_plan_unmatched": anatomy.fsdp_plan_unmatched,
        "units": [_unit(unit) for unit in units.units],
        "largest_unit": _largest(units, anatomy),
        "embeddings": {
            "input": anatomy.input_embedding,
            "output": anatomy.output_embedding,
            "final_norm": anatomy.final_norm,
        },
        "parts": parts(anatomy, census),
        "experts": _experts(anatomy),
        "ties": [list(names) for names in anatomy.ties],
        "buffers": [
            {
                "fqn": buffer.fqn,
                "persistent": buffer.persistent,
                "bytes": _bytes(buffer.shape, buffer.dtype),
                "dtype": buffer.dtype,
            }
            for buffer in anatomy.buffers
        ],
        "world_size": world_size,
        "uneven": uneven(anatomy.parameters, world_size) if world_size else [],
        "cached": found.cached,
        "leaves": leaves(census) if "leaves" in wanted else None,
        "tree": tree(anatomy, census) if "tree" in wanted else None,
        "where": places(anatomy, _shown(anatomy)) if "where" in wanted else None,
    }
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
        body,
        diagnostics=(*diagnostics, *spec.diagnostics, *anatomy.diagnostics, *found.store),
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


def _model(anatomy: Anatomy) -> dict[str, Any]:
    spec = anatomy.spec
    total = anatomy.total_parameters
    trainable = sum(p.numel for p in anatomy.parameters if p.trainable)
    saved = sum(p.numel * len(p.aliases) for p in anatomy.parameters)
    by_dtype: Counter[str] = Counter()
    for parameter in anatomy.parameters:
        by_dtype[parameter.dtype] += parameter.numel
    frozen = [p.fqn for p in anatomy.parameters if not p.trainable]
    return {
        "reference": spec.reference,
        "model": {
            "class": spec.model_class,
            "library": spec.library,
            "family": spec.family,
            "flavour": spec.flavour,
            "component": spec.component,
            "objective": spec.objective,
            "checkpoint_dtype": checkpoint_dtype(anatomy),
            "adapter": spec.adapter is not None,
        },
        "parameters": {
            "total": total,
            "trainable": trainable,
            "frozen": total - trainable,
            "tied_saved": saved,
            "by_dtype": dict(sorted(by_dtype.items())),
            "frozen_fqns": frozen,
        },
    }


def _classes(anatomy: Anatomy, census: Census) -> list[dict[str, Any]]:
    found = []
    for candidate in anatomy.wrap.candidates:
        paths = census.by_class[candidate.name]
        owns = any(holds_embedding(census, path) for path in paths)
        found.append({**to_json(candidate), "holds_embedding": owns})
    return found


def _unit(unit: Any) -> dict[str, Any]:
    return {
        "id": unit.id,
        "kind": unit.kind,
        "class": unit.class_name,
        "fqns": [parameter.fqn for parameter in unit.parameters],
        "parameters": unit.numel,
    }


def _largest(units: UnitPlan, anatomy: Anatomy) -> dict[str, Any]:
    largest = max(units.units, key=lambda unit: unit.numel)
    return {
        "id": largest.id,
        "kind": largest.kind,
        "parameters": largest.numel,
        "share": largest.numel / max(anatomy.total_parameters, 1),
        "bytes_16bit": largest.numel * 2,
    }


def _experts(anatomy: Anatomy) -> dict[str, Any] | None:
    fused = set(fused_experts(anatomy.parameters))
    if not fused:
        return None
    held = [parameter for parameter in anatomy.parameters if parameter.fqn in fused]
    total = sum(parameter.numel for parameter in held)
    return {
        "tensors": len(held),
        "parameters": total,
        "share": total / max(anatomy.total_parameters, 1),
        "counts": sorted({parameter.shape[0] for parameter in held}),
        "largest": max(parameter.numel for parameter in held),
    }


def _bytes(shape: tuple[int, ...], dtype: str) -> int:
    size = item_bytes(dtype)
    for length in shape:
        size *= length
    return size


def _shown(anatomy: Anatomy) -> list[str]:
    return [anatomy.modules[0].class_name, *(candidate.name for candidate in anatomy.wrap.candidates)]
