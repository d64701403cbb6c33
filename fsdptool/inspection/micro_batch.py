"""The tensors of a recipe's micro-batch, from the cache or from the model's family.

A family reads them off the model library's configuration class, whose module imports torch. A plan whose
traces are cached needs nothing else from torch, so the shapes are cached, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdptool.cache import Store, source_digest
from fsdptool.errors import ConfigError
from fsdptool.families.protocol import TensorSpec
from fsdptool.families.registry import family_of
from fsdptool.inspection.api import cache_parts
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.codec import from_json, to_json

if TYPE_CHECKING:
    from fsdptool.records.recipe import Recipe

KIND = "batch"


def batch_spec(spec: ModelSpec, recipe: Recipe) -> tuple[TensorSpec, ...]:
    """Return the tensors of one micro-batch (``Family.batch_spec``), from the cache if it has them.

    Raises:
        ConfigError: The recipe's sizes do not suit the model.
        ModelError: The configuration does not say what its inputs look like.
    """
    store = Store()
    key = store.key(_parts(spec, recipe))
    kept, findings = store.get(KIND, key)
    if kept is not None and (cached := _decode(kept)) is not None:
        return cached
    tensors = family_of(spec).batch_spec(spec.config, recipe)
    if not findings:
        about = f"micro-batch of {spec.model_class} of {spec.reference.id}"
        store.put(KIND, key, [to_json(tensor) for tensor in tensors], about=about)
    return tensors


def _parts(spec: ModelSpec, recipe: Recipe) -> dict[str, Any]:
    """Return everything the tensors depend on. A family may read any part of the recipe."""
    return {"model": cache_parts(spec), "recipe": to_json(recipe), "code": source_digest(__name__)}


def _decode(data: Any) -> tuple[TensorSpec, ...] | None:
    try:
        return tuple(from_json(TensorSpec, item) for item in data)
    except (ConfigError, TypeError):
        return None
