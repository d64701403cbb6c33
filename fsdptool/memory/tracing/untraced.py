"""What is known of a model that cannot be traced: its states."""

from __future__ import annotations

from fsdptool.records.anatomy import Anatomy
from fsdptool.records.document import library_versions
from fsdptool.records.recipe import Recipe
from fsdptool.records.trace import Profile, Trace


def without_activations(anatomy: Anatomy, recipe: Recipe, profile: Profile, why: str) -> Trace:
    """Return a trace that only knows the states."""
    return Trace(
        profile=profile,
        compute_dtype=recipe.sharding.param_dtype or recipe.model.dtype,
        segments=(),
        sizes=(),
        kinds=(),
        names=(),
        vocabulary=(),
        buffers=anatomy.buffers,
        samples=recipe.batch.micro_batch,
        torch=library_versions().get("torch", "").split("+")[0],
        model=anatomy.spec.model_class,
        unknowns=(f"activations: {why}",),
    )
