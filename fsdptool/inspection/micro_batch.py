"""The tensors of a recipe's micro-batch, from the cache or from the model's family.

A family reads them off the model library's configuration class, whose module imports torch. A plan whose
traces are cached needs nothing else from torch, so the shapes are cached, too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from fsdptool.cache import Store, source_digest
from fsdptool.errors import ConfigError, InputsError
from fsdptool.families.protocol import TensorSpec
from fsdptool.families.registry import family_of
from fsdptool.inspection.api import cache_parts
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.plan import SampleSize, Size

if TYPE_CHECKING:
    from fsdptool.records.recipe import Recipe

KIND, SIZE_KIND = "batch", "sample"


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


def planned_batch(spec: ModelSpec, recipe: Recipe) -> tuple[TensorSpec, ...]:
    """Return what :func:`batch_spec` does, or nothing if nobody says what a micro-batch looks like.

    A plan then knows the states alone.

    Raises:
        ConfigError: The recipe's sizes do not suit the model.
        ModelError: What describes its inputs fails.
    """
    try:
        return batch_spec(spec, recipe)
    except InputsError:
        return ()


def sample_size(spec: ModelSpec, recipe: Recipe) -> SampleSize:
    """Return the size of a sample: what the recipe says, and what of the rest is the family's default.

    A default has a name only if giving it changes no tensor of the micro-batch.
    """
    store = Store()
    key = store.key(_parts(spec, recipe))
    kept, _ = store.get(SIZE_KIND, key)
    if kept is not None:
        try:
            return from_json(SampleSize, kept)
        except (ConfigError, TypeError):
            pass
    tensors = planned_batch(spec, recipe)
    given = {name: getattr(recipe.batch, name) for name in _SIZES}
    given = {name: size for name, size in given.items() if size is not None}
    assumed = {name: size for name, size in _defaults(spec, tensors).items() if name not in given}
    if assumed and not _same(spec, recipe, tensors, assumed):
        assumed = {}
    shapes = {}
    if not given and not assumed and "inputs" not in recipe.objective.options:
        shapes = {item.name: item.shape[1:] for item in tensors if len(item.shape) > 1}
    values: dict[str, Any] = {**given, **assumed}
    found = SampleSize(**values, assumed=cast("tuple[Size, ...]", tuple(assumed)), tensors=shapes)
    store.put(SIZE_KIND, key, to_json(found), about=f"sample of {spec.model_class} of {spec.reference.id}")
    return found


_SIZES = ("sequence_length", "height", "width", "frames")


def _defaults(spec: ModelSpec, tensors: tuple[TensorSpec, ...]) -> dict[str, int]:
    """Return the sizes that the family takes where nobody says, as far as they have names."""
    family: Any = family_of(spec)
    if hasattr(family, "default_size"):
        return dict(family.default_size(spec.config))
    shapes = {item.name: item.shape for item in tensors}
    tokens, pixels = shapes.get("input_ids", ()), shapes.get("pixel_values", ())
    sizes = {"sequence_length": tokens[1]} if len(tokens) == 2 else {}
    return {**sizes, "height": pixels[2], "width": pixels[3]} if len(pixels) == 4 else sizes


def _same(spec: ModelSpec, recipe: Recipe, tensors: tuple[TensorSpec, ...], sizes: dict[str, int]) -> bool:
    """Whether giving the sizes changes nothing."""
    values: dict[str, Any] = dict(sizes)
    try:
        return batch_spec(spec, replace(recipe, batch=replace(recipe.batch, **values))) == tensors
    except ConfigError:
        return False


def _parts(spec: ModelSpec, recipe: Recipe) -> dict[str, Any]:
    """Return everything the tensors depend on. A family may read any part of the recipe."""
    return {"model": cache_parts(spec), "recipe": to_json(recipe), "code": source_digest(__name__)}


def _decode(data: Any) -> tuple[TensorSpec, ...] | None:
    try:
        return tuple(from_json(TensorSpec, item) for item in data)
    except (ConfigError, TypeError):
        return None
