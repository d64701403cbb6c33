"""``trace``: a model and a recipe in, one micro-batch's events out, from the cache if it has them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from fsdptool.cache import Store, source_digest
from fsdptool.errors import ConfigError, FsdptoolError, ModelError, PlanError
from fsdptool.families.registry import family_digest
from fsdptool.modeling.methods import method_of
from fsdptool.modeling.units import TrainedModel
from fsdptool.records.anatomy import Anatomy, ModelSpec
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.diagnostic import digest, library_versions, tool_version
from fsdptool.records.resolved_run import ResolvedRun
from fsdptool.records.trace import Profile, Trace
from fsdptool.source.references import own_code_digest
from fsdptool.source.vae import pixels_per_latent

KIND, REFUSAL = "trace", "refusal"
_REFUSALS: Mapping[str, type[FsdptoolError]] = {
    kind.__name__: kind for kind in (ConfigError, ModelError, PlanError)
}
"""Errors that say that a model and a recipe do not suit each other. They are kept as traces are, and so are
traces that know the states alone."""


def trace(
    spec: ModelSpec,
    run: ResolvedRun,
    *,
    profile: Profile | None = None,
    trained: TrainedModel | None = None,
    teacher: Anatomy | None = None,
    worst_routing: bool = False,
    use_cache: bool = True,
    refresh: bool = False,
) -> Trace:
    """Return what one micro-batch of a run does to memory, on any number of ranks.

    Args:
        spec: The model.
        run: Method, objective, sizes, precision, checkpointing, and whose loop computes the loss.
        profile: Whose kernels to assume; None follows ``settings.use_cpu``.
        trained: The model as it will be trained; None inspects it.
        teacher: A distillation's teacher; None resolves and inspects the recipe's.
        worst_routing: Whether the tokens of a whole expert-parallel group come to this rank.
        use_cache: Whether to read and keep cached traces.
        refresh: Ignore the cached trace and replace it.

    Raises:
        FsdptoolError: The recipe does not suit the model (a sequence beyond its positions, unknown
            LoRA targets). A model that merely cannot be traced gives a trace without segments whose
            ``unknowns`` say why.
    """
    assumed: Profile = profile or ("cpu" if run.settings.use_cpu else "cuda")
    choice = method_of(run.recipe).teacher_choice(run.recipe)
    if choice is not None and teacher is None:
        from fsdptool.inspection import inspect
        from fsdptool.source import resolve_choice

        teacher = inspect(resolve_choice(choice))
    store = Store() if use_cache or refresh else None
    parts = _parts(spec, run, assumed, teacher)
    if trained is not None and not run.sharding.wrap_classes:
        parts["wrap"] = trained.anatomy.wrap.classes
    if worst_routing:
        parts["worst_routing"] = True
    if run.loop.own_loss:
        parts["own_loss"] = True
    if run.loop.tiles is not None or run.loop.head_chunks:
        wraps = ["wraps adapters"] if run.loop.wraps_adapters else []
        parts["head"] = [to_json(run.loop.tiles), run.loop.head_chunks, *wraps]
    if run.loop.head_loss is not None:
        parts["head"] = [run.loop.head_loss, run.recipe.sharding.compile]
    if run.loop.masked:
        parts["masked"] = True
    if run.loop.masked_from_rows:
        # One micro-batch may have a mask where a smaller one has none: their traces are not alike.
        parts["padded"] = [
            run.loop.masked_from_rows,
            run.recipe.batch.micro_batch >= run.loop.masked_from_rows,
        ]
    key = store.key(parts) if store is not None else ""
    if store is not None and not refresh and (cached := _kept(store, key, run)) is not None:
        return cached
    from fsdptool.families.objectives.packed_attention import under_masks
    from fsdptool.memory.tracing.make_trace import make_trace

    batch = {**parts["batch"], "micro_batch": None}
    alike = digest({**parts, "batch": batch, "tensor": [size > 1 for size in parts["tensor"]]})
    about = f"{spec.model_class} of {spec.reference.id}"
    with under_masks() if run.loop.masked or not run.flash else nullcontext():
        try:
            traced = make_trace(
                spec, run, assumed, trained, teacher, worst_routing=worst_routing, alike=alike
            )
        except FsdptoolError as error:
            kind = type(error).__name__
            if store is not None and _REFUSALS.get(kind) is type(error) and not error.others:
                refusal = {"error": kind, "message": error.message, "help": error.help}
                store.put(REFUSAL, _refusal_key(store, key, run), refusal, about=about)
            raise
    if store is not None and traced.known:
        store.put(KIND, key, to_json(traced), about=about)
    elif store is not None:
        store.put(REFUSAL, _refusal_key(store, key, run), to_json(traced), about=about)
    return traced


def _kept(store: Store, key: str, run: ResolvedRun) -> Trace | None:
    """Return the trace that the store has, or None.

    Raises:
        FsdptoolError: The store has that the trace is refused.
    """
    for kind, name in ((KIND, key), (REFUSAL, _refusal_key(store, key, run))):
        kept, _ = store.get(kind, name)
        if isinstance(kept, dict) and kept.get("error") in _REFUSALS:
            raise _REFUSALS[kept["error"]](kept["message"], help=kept["help"])
        if kept is not None and (cached := _decode(kept)) is not None:
            return cached
    return None


def _refusal_key(store: Store, key: str, run: ResolvedRun) -> str:
    """Return the key of a refusal: all of a run may be refused, and a package installed later may lift it."""
    places = (Path(name) for name in sys.path if name.endswith(("site-packages", "dist-packages")))
    return store.key([key, to_json(run), [place.stat().st_mtime_ns for place in places if place.is_dir()]])


def _decode(data: Any) -> Trace | None:
    try:
        return from_json(Trace, data)
    except (ConfigError, TypeError):
        return None


def _parts(
    spec: ModelSpec,
    run: ResolvedRun,
    profile: Profile,
    teacher: Anatomy | None,
) -> dict[str, Any]:
    """Return everything a trace depends on."""
    return {
        "model": _model(spec),
        "teacher": _model(teacher.spec) if teacher is not None else None,
        **traced_configuration(run),
        "profile": profile,
        "libraries": library_versions(),
        "tool": f"{tool_version()}:{source_digest(__name__)}",
    }


def traced_configuration(run: ResolvedRun) -> dict[str, Any]:
    """Return what a trace depends on beside the model: nothing that changes without changing it."""
    recipe, settings, sharding = run.recipe, run.settings, run.sharding
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
        "sharding": [sharding.layout, sharding.compute_dtype, sharding.output_dtype],
        "precision": settings.mixed_precision,
        "ignored": sharding.ignored_modules,
        "tensor": [run.mesh.tp, run.mesh.ep],
        "sequence": recipe.sharding.sequence_parallel,
        "context": [run.mesh.cp, settings.cp_comm_strategy] if run.mesh.cp > 1 else None,
    }
    wrapping = [sharding.wrap_policy, list(sharding.wrap_classes), sharding.min_num_params]
    if not run.flash:
        parts["flash"] = False
    if sharding.trained_dtype is not None:
        parts["trained"] = sharding.trained_dtype
    if recipe.sharding.compile:
        # Every block unit is compiled by itself.
        parts["compiled"] = wrapping
    if sharding.recomputes:
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
        "vae": pixels_per_latent(spec),
    }
