"""The recipe of a plan: a file's, changed by the options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from fsdptool.errors import ConfigError, PlanError
from fsdptool.planning.request.options import OPTIMAL, Options, declared, settings_of
from fsdptool.records.annotations import bounds_text, fields_of, permits
from fsdptool.records.checkpointing import read_policy
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.fused_loss import NamedLoss
from fsdptool.records.recipe import (
    MAX_LORA_RANK,
    Batch,
    Data,
    DataOptions,
    Distillation,
    Lora,
    Method,
    MethodName,
    ModelChoice,
    Objective,
    Recipe,
    Sharding,
)

R = TypeVar("R")


def _checked(data: Data) -> Data:
    """Return data that Python described, into which it may have put what no file could hold.

    Raises:
        ConfigError: A value has another type than its field, or an option is beyond its bounds.
    """
    data = from_json(Data, to_json(data), where="recipe.data")
    for name, value in data.options.items():
        bounds = fields_of(DataOptions)[name].annotation.bounds
        if isinstance(value, int | float) and not permits(bounds, value):
            raise ConfigError(f"recipe.data.options.{name} must be {bounds_text(bounds)}, not {value}")
    return data


def build_recipe(options: Options) -> Recipe:
    """Return the recipe; options win over the file.

    Raises:
        PlanError: There is no model, or the options contradict each other.
        ConfigError: The recipe file cannot be used.
    """
    source, reference = options.get("recipe"), options.get("reference")
    given: frozenset[str] = frozenset()
    if source is not None:
        from fsdptool.config.recipe import given_keys, read_recipe
        from fsdptool.source import consented, located

        if isinstance(source, Recipe):
            recipe, where = replace(source, data=_checked(source.data)), "the recipe"
        else:
            recipe, where = located(read_recipe(Path(source)), Path(source).parent), str(source)
            given = given_keys(Path(source))
        consent = options.get("trust_remote_code", False)
        recipe = consented(recipe, where, trust_remote_code=consent)
    elif reference is not None:
        recipe = Recipe(ModelChoice(reference))
    else:
        raise PlanError("no model is given", help="name one (fsdptool plan llama3:8b ...) or give --recipe")
    changes = [(path, value) for path, value in settings_of(options, "recipe") if path[0] != "method"]
    changed = set_fields(recipe, changes)
    if "lengths" in options and source is None:
        # Without a recipe that says otherwise, lengths are given because they vary from step to step.
        changed = replace(changed, data=replace(changed.data, packing=False, padding="longest"))
    return replace(
        changed,
        method=_method(options, _method_of_adapter(options, changed, given)),
        objective=_objective(options, changed.objective),
        batch=_batch(options, changed.batch),
        sharding=_sharding(options, changed.sharding),
    )


def set_fields(record: R, changes: Iterable[tuple[tuple[str, ...], Any]]) -> R:
    """Return a record with fields of it, or of records within it, replaced: path to value."""
    for (name, *rest), value in changes:
        inner = set_fields(getattr(record, name), [(tuple(rest), value)]) if rest else value
        record = replace(record, **{name: inner})  # type: ignore[type-var]
    return record


def _method_of_adapter(options: Options, recipe: Recipe, given: frozenset[str]) -> Method:
    """Return the method of the file, or of the adapter that the model is."""
    from fsdptool.source import adapted, resolve_choice

    asked = "distillation" if "teacher" in options else options.get("method")
    if asked in ("full", "distillation"):
        named = replace(recipe, method=Method(cast("MethodName", asked)))
        adapted(named, resolve_choice(recipe.model, catalogue=True), {"method.name"})
        return recipe.method
    return adapted(recipe, resolve_choice(recipe.model, catalogue=True), given).method


def _method(options: Options, method: Method) -> Method:
    lora_changes = list(settings_of(options, "recipe.method.lora"))
    teacher = options.get("teacher")
    implied = "lora" if lora_changes else "distillation" if teacher is not None else method.name
    name = options.get("method") or implied
    for kind, flag in (("lora", _flag_of_lora(options)), ("distillation", teacher and "--teacher")):
        if flag is not None and name.removeprefix("q") != kind:
            message = f"{flag} is for {kind}, and the method is {name}"
            raise PlanError(message, help="leave one of the two out")
    if name == "qlora":
        base = options.get("lora_base", "nf4")
        if base != "nf4":
            raise PlanError(
                f"--method qlora stores the base in nf4, --lora-base asks for {base}",
                help=f"give --method lora --lora-base {base}",
            )
        name, lora_changes = "lora", [*lora_changes, (("base",), "nf4")]
    if name == "lora":
        return Method("lora", set_fields(method.lora or Lora(), lora_changes))
    if name == "distillation":
        choice = ModelChoice(teacher) if teacher is not None else None
        if method.distillation is None:
            if choice is None:
                raise PlanError("distillation needs a teacher", help="give --teacher REFERENCE")
            return Method("distillation", None, Distillation(choice))
        return Method(
            "distillation", None, replace(method.distillation, teacher=choice or method.distillation.teacher)
        )
    return Method(cast("MethodName", name))


def _flag_of_lora(options: Options) -> str | None:
    """Return the first given option of LoRA as it is spelled on the command line, or None."""
    items = (declared()[name] for name in options)
    return next((item.flags[0] for item in items if item.option.sets.startswith("recipe.method.lora.")), None)


def _objective(options: Options, objective: Objective) -> Objective:
    """Set the chunk of a loss over tokens (``families/objectives/entropy.py``); its default is chunked."""
    kept = {name: value for name, value in objective.options.items() if name != "chunk"}
    loss = options.get("loss")
    if loss in ("whole", "kept", "model"):
        return replace(objective, options={**kept, "chunk": 0})
    if loss in ("chunked", *get_args(NamedLoss)) and not objective.options.get("chunk"):
        return replace(objective, options=kept)
    return objective


def _batch(options: Options, batch: Batch) -> Batch:
    """An option replaces the file's other way of saying the same: accumulation or global batch."""
    if "global_batch" in options and "accumulation" in options:
        raise PlanError(
            "both --accumulation and --global-batch are given", help="give one: it decides the other"
        )
    if "accumulation" in options:
        return replace(batch, global_batch=None)
    return replace(batch, accumulation=1) if "global_batch" in options else batch


def _sharding(options: Options, sharding: Sharding) -> Sharding:
    """Set the part of resharding and checkpointing that no accelerate YAML can say."""
    reshard, checkpointing = options.get("reshard"), options.get("checkpointing")
    if reshard is not None:
        ranks = reshard if isinstance(reshard, int) and not isinstance(reshard, bool) else None
        sharding = replace(sharding, reshard_after_forward=ranks)
    if checkpointing == OPTIMAL:
        sharding = replace(sharding, checkpointing=None)
    elif checkpointing is not None:
        policy = read_policy(checkpointing)
        before = sharding.checkpointing
        if policy.mode == "selective" and not policy.save_operators and before is not None:
            policy = replace(policy, save_operators=before.save_operators)
        sharding = replace(sharding, checkpointing=None if policy.mode in ("none", "full") else policy)
    return sharding


MAX_SIZE = 1 << 40
"""Samples x positions or pixels of a micro-batch beyond which byte counts no longer mean anything."""

MAX_TOKENS = 1 << 24
"""Tokens of a micro-batch: sixteen million. Losses run over them in chunks, a trace through every one."""


def check_sizes(recipe: Recipe) -> None:
    """Refuse sizes no memory arithmetic can mean.

    Raises:
        PlanError: The micro-batch has more positions, pixels or samples than is possible, or an
            adapter's rank is larger than any layer.
    """
    lora = recipe.method.lora
    if lora is not None and lora.rank > MAX_LORA_RANK:
        raise PlanError(
            f"LoRA rank {lora.rank:,} is larger than the width of any layer",
            help="ranks of 8 to 256 are usual",
        )
    batch = recipe.batch
    sizes = {
        "micro-batch": batch.micro_batch,
        "sequence length": batch.sequence_length,
        "height": batch.height,
        "width": batch.width,
        "frames": batch.frames,
    }
    total = 1
    for name, size in sizes.items():
        if size is not None and size > MAX_SIZE:
            raise PlanError(
                f"{name} {size:,} is too large for memory arithmetic", help="check for a typing error"
            )
        if size is not None and size < 1 and name != "micro-batch":
            raise PlanError(f"{name} must be at least 1, not {size}")
        total *= size or 1
    tokens = batch.micro_batch * (batch.sequence_length or 1)
    if tokens > MAX_TOKENS and total <= MAX_SIZE:
        raise PlanError(
            f"{tokens:,} tokens in one forward are too many for one rank",
            help="check for a typing error, or accumulate smaller micro-batches",
        )
    if total > MAX_SIZE:
        parts = " x ".join(f"{name} {size:,}" for name, size in sizes.items() if size is not None)
        raise PlanError(
            f"{parts} = {total:,} is too large for memory arithmetic", help="check for a typing error"
        )
