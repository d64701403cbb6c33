"""``trace``: a model and a recipe in, one micro-batch's events out, from the cache if it has them."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from fsdptool.cache import Store, source_digest
from fsdptool.errors import ConfigError
from fsdptool.families.registry import family_digest
from fsdptool.modeling.methods import method_of
from fsdptool.modeling.units import with_stored_dtypes
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.diagnostic import digest, library_versions, tool_version
from fsdptool.records.recipe import Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.records.trace import Profile, Trace
from fsdptool.source.imports import own_code_digest

KIND = "trace"


def trace(
    spec: ModelSpec,
    recipe: Recipe,
    settings: FsdpSettings,
    *,
    profile: Profile | None = None,
    teacher: ModelSpec | None = None,
    worst_routing: bool = False,
    own_loss: bool = False,
    masked: bool = False,
    use_cache: bool = True,
    refresh: bool = False,
) -> Trace:
    """Return what one micro-batch of this recipe does to memory, on any number of ranks.

    Args:
        spec: The model.
        recipe: Method, objective, sizes, precision, checkpointing.
        settings: Precision and checkpointing as the YAML says.
        profile: Whose kernels to assume; None follows ``settings.use_cpu``.
        teacher: A distillation's teacher; None resolves the recipe's.
        worst_routing: Whether the tokens of a whole expert-parallel group come to this rank.
        own_loss: Whether the loss is the one that the model's own forward computes from ``labels``.
        masked: Whether masks keep packed documents apart, as in other programs' loops.
        use_cache: Whether to read and keep cached traces.
        refresh: Ignore the cached trace and replace it.

    Raises:
        FsdptoolError: The recipe does not suit the model (a sequence beyond its positions, unknown
            LoRA targets). A model that merely cannot be traced gives a trace without segments whose
            ``unknowns`` say why.
    """
    recipe = with_stored_dtypes(recipe, settings)
    assumed: Profile = profile or ("cpu" if settings.use_cpu else "cuda")
    choice = method_of(recipe).teacher_choice(recipe)
    if choice is not None and teacher is None:
        from fsdptool.source import resolve_choice

        teacher = resolve_choice(choice)
    store = Store() if use_cache or refresh else None
    parts = _parts(spec, recipe, settings, assumed, teacher)
    if worst_routing:
        parts["worst_routing"] = True
    if own_loss:
        parts["own_loss"] = True
    if masked:
        parts["masked"] = True
    key = store.key(parts) if store is not None else ""
    if store is not None and not refresh:
        kept, _ = store.get(KIND, key)
        if kept is not None and (cached := _decode(kept)) is not None:
            return cached
    from fsdptool.families.objectives.packed_attention import under_masks
    from fsdptool.memory.tracing.make_trace import make_trace
    from fsdptool.modeling import expert_parallel

    batch = {**parts["batch"], "micro_batch": None}
    tp, ep = parts["tensor"]
    alike = digest({**parts, "batch": batch, "tensor": [tp, ep > 1]})
    with (
        expert_parallel.worst_routing() if worst_routing else nullcontext(),
        under_masks() if masked else nullcontext(),
    ):
        traced = make_trace(spec, recipe, settings, assumed, teacher, own_loss=own_loss, alike=alike)
    if store is not None and traced.known:
        store.put(KIND, key, to_json(traced), about=f"{spec.model_class} of {spec.reference.id}")
    return traced


def _decode(data: Any) -> Trace | None:
    try:
        return from_json(Trace, data)
    except (ConfigError, TypeError):
        return None


def _parts(
    spec: ModelSpec,
    recipe: Recipe,
    settings: FsdpSettings,
    profile: Profile,
    teacher: ModelSpec | None,
) -> dict[str, Any]:
    """Return everything a trace depends on."""
    return {
        "model": _model(spec),
        "teacher": _model(teacher) if teacher is not None else None,
        **traced_configuration(recipe, settings),
        "profile": profile,
        "libraries": library_versions(),
        "tool": f"{tool_version()}:{source_digest(__name__)}",
    }


def traced_configuration(recipe: Recipe, settings: FsdpSettings) -> dict[str, Any]:
    """Return what a trace depends on beside the model: nothing that changes without changing it."""
    sharding = recipe.sharding
    parts: dict[str, Any] = {
        "choice": [recipe.model.dtype, recipe.model.attention],
        "method": to_json(recipe.method),
        "objective": to_json(recipe.objective),
        "data": [recipe.data.packing, recipe.data.document_mask, recipe.data.source],
        "off_step": [
            recipe.evaluation.wanted,
            recipe.evaluation.sampled,
            recipe.data.options.get("sample_tokens"),
            bool(recipe.data.options.get("prompts")),
        ],
        "batch": to_json(replace(recipe.batch, accumulation=1, global_batch=None)),
        "sharding": [sharding.layout, sharding.param_dtype, sharding.output_dtype],
        "precision": settings.mixed_precision,
        "ignored": settings.ignored_modules,
        "tensor": [settings.mesh.tp, sharding.expert_parallel],
        "sequence": sharding.sequence_parallel,
        "context": [settings.mesh.cp, settings.cp_comm_strategy] if settings.mesh.cp > 1 else None,
    }
    wrapping = [settings.wrap_policy, list(settings.wrap_classes), settings.min_num_params]
    if sharding.compile:
        # Every block unit is compiled by itself.
        parts["compiled"] = wrapping
    if settings.activation_checkpointing:
        parts["checkpointing"] = [
            to_json(sharding.checkpointing),
            settings.activation_checkpointing_offload,
            *wrapping,
        ]
    return parts


def _model(spec: ModelSpec) -> dict[str, Any]:
    return {
        "config": to_json(spec.config),
        "class": spec.model_class,
        "family": spec.family,
        "plugin": family_digest(spec.family),
        "objective": spec.objective,
        "revision": spec.reference.revision,
        "component": spec.component,
        "folder": spec.folder if spec.trust_remote_code else None,
        "code": own_code_digest(spec),
    }
