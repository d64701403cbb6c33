"""The recipe a plan is asked for: a file's, changed by the options given beside it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from fsdptool.config.recipe_constraints import MAX_RANK
from fsdptool.errors import PlanError
from fsdptool.modeling.optimizers import OPTIMIZERS
from fsdptool.planning.options import Options
from fsdptool.planning.search_point import split_checkpointing
from fsdptool.records.recipe import (
    Batch,
    Checkpointing,
    Distillation,
    Ema,
    Lora,
    Method,
    ModelChoice,
    Recipe,
    Sharding,
)


def build_recipe(options: Options) -> Recipe:
    """Return the recipe; options win over the file.

    Raises:
        PlanError: There is no model, or the options contradict each other.
        ConfigError: The recipe file cannot be used.
    """
    if options.recipe is not None:
        from fsdptool.config.recipe import read_recipe
        from fsdptool.source import consented

        if isinstance(options.recipe, Recipe):
            recipe, where = options.recipe, "the recipe"
        else:
            recipe, where = _beside(read_recipe(options.recipe), options.recipe), str(options.recipe)
        recipe = consented(recipe, where, trust_remote_code=bool(options.trust_remote_code))
    elif options.reference is not None:
        recipe = Recipe(ModelChoice(options.reference))
    else:
        raise PlanError(
            "there is no model to plan", help="name one (fsdptool plan llama3:8b ...) or give --recipe"
        )
    return replace(
        recipe,
        model=_model(options, recipe.model),
        method=_method(options, recipe.method),
        objective=given(recipe.objective, name=options.objective),
        batch=_batch(options, recipe),
        optimizer=given(
            recipe.optimizer,
            name=choice("optimizer", options.optimizer, tuple(OPTIMIZERS)),
            implementation=choice(
                "optimizer-implementation",
                options.optimizer_implementation,
                ("auto", "fused", "foreach", "for_loop"),
            ),
        ),
        sharding=_sharding(options, recipe),
        ema=recipe.ema if options.ema is None else Ema(_decay(options.ema)),
    )


def _decay(value: float) -> float:
    if not 0.0 < value < 1.0:
        raise PlanError(f"a moving average with decay {value} averages nothing", help="give 0.999 or so")
    return value


def _beside(recipe: Recipe, path: Path) -> Recipe:
    """Relative model paths count from the working directory, then from the recipe (as ``train`` does)."""
    from fsdptool.source import locate

    def located(model: ModelChoice) -> ModelChoice:
        return replace(model, reference=locate(model.reference, path.parent))

    taught = recipe.method.distillation
    if taught is not None:
        taught = replace(taught, teacher=located(taught.teacher))
        recipe = replace(recipe, method=replace(recipe.method, distillation=taught))
    return replace(recipe, model=located(recipe.model))


def _model(options: Options, model: ModelChoice) -> ModelChoice:
    return given(
        model,
        reference=options.reference,
        revision=options.revision,
        component=options.component,
        trust_remote_code=options.trust_remote_code,
        overrides=options.overrides or None,
        dtype=choice("dtype", options.dtype, ("float32", "bfloat16", "float16", "float64")),
        attention=choice("attention", options.attention, ("sdpa", "eager", "flash_attention_2")),
    )


def _method(options: Options, method: Method) -> Method:
    name = choice("method", options.method, ("full", "lora", "distillation"))
    lora_options = (options.lora_rank, options.lora_targets, options.lora_base, options.adapters)
    if name is None and any(option is not None for option in lora_options):
        name = "lora"
    if name is None and options.teacher is not None:
        name = "distillation"
    name = name or method.name
    if name == "lora":
        if options.lora_rank is not None and options.lora_rank < 1:
            raise PlanError(f"LoRA rank {options.lora_rank} adapts nothing", help="give 1 or more")
        lora = given(
            method.lora or Lora(),
            rank=options.lora_rank,
            targets=options.lora_targets,
            base=choice("lora-base", options.lora_base, ("unchanged", "nf4", "int8", "float8")),
            adapters=choice("adapters", options.adapters, ("replicated", "sharded")),
        )
        return Method("lora", lora)
    if name == "distillation":
        if options.teacher is None and method.distillation is None:
            raise PlanError("distillation needs a teacher", help="give --teacher REFERENCE")
        kept = method.distillation
        teacher = ModelChoice(options.teacher) if options.teacher is not None else None
        if kept is None:
            return Method("distillation", None, Distillation(teacher)) if teacher else method
        return Method("distillation", None, given(kept, teacher=teacher))
    return Method("full")


def _batch(options: Options, recipe: Recipe) -> Batch:
    batch = given(
        recipe.batch,
        micro_batch=options.micro_batch,
        accumulation=options.accumulation,
        global_batch=options.global_batch,
        sequence_length=options.sequence_length,
        height=options.height,
        width=options.width,
        frames=options.frames,
    )
    for name in ("sequence_length", "height", "width", "frames"):
        value = getattr(batch, name)
        if value is not None and value < 1:
            raise PlanError(f"{name.replace('_', ' ')} {value} is not positive")
    if options.global_batch is not None and options.accumulation is not None:
        raise PlanError("both accumulation and global batch are given", help="give one: it decides the other")
    # An option replaces the file's other way of saying the same.
    if options.accumulation is not None:
        return replace(batch, global_batch=None)
    return replace(batch, accumulation=1) if options.global_batch is not None else batch


def _sharding(options: Options, recipe: Recipe) -> Sharding:
    sharding = given(
        recipe.sharding,
        layout=choice("layout", options.layout, ("native", "accelerate")),
        prefetch=options.prefetch,
        accumulation=choice("gradients", options.gradients, ("sharded", "unsharded")),
    )
    if options.prefetch is not None and options.prefetch < 1:
        raise PlanError(f"prefetch {options.prefetch} gathers nothing ahead", help="give 1 or more")
    if options.reduce_dtype is not None:
        names = ("float32", "bfloat16", "float16", "param")
        wanted = one_of("reduce-dtype", options.reduce_dtype, names)
        sharding = replace(sharding, reduce_dtype=None if wanted == "param" else wanted)
    if options.reshard is not None:
        integer = not isinstance(options.reshard, bool)
        sharding = replace(sharding, reshard_after_forward=options.reshard if integer else None)
    if options.checkpointing is not None:
        mode, every_n = split_checkpointing(options.checkpointing)
        plain = mode in ("none", "full")
        kept = sharding.checkpointing or Checkpointing()
        chosen = None if plain else replace(kept, mode=mode, every_n=every_n)
        sharding = replace(sharding, checkpointing=chosen)
    return sharding


R = TypeVar("R")


def given(record: R, **values: Any) -> R:
    """Return ``record`` with the values that are not None."""
    changed = {name: value for name, value in values.items() if value is not None}
    return replace(record, **changed) if changed else record  # type: ignore[type-var]


def choice(name: str, value: str | None, choices: tuple[str, ...]) -> Any:
    """Return what :func:`one_of` returns; None stays None.

    Raises:
        PlanError: The value is none of the choices.
    """
    return None if value is None else one_of(name, value, choices)


def one_of(name: str, value: str, choices: tuple[str, ...]) -> Any:
    """Return the choice ``value`` spells, forgiving case and dashes.

    Raises:
        PlanError: It is none of them.
    """
    spelled = {choice.replace("-", "_").lower(): choice for choice in choices}
    found = spelled.get(value.replace("-", "_").lower())
    if found is None:
        raise PlanError(f"{name} {value!r} is not known", help=f"choose one of: {', '.join(choices)}")
    return found


MAX_SIZE = 1 << 40
"""Samples x positions or pixels of a micro-batch beyond which byte counts no longer mean anything."""

MAX_TOKENS = 1 << 24
"""Tokens of a micro-batch: sixteen million. Losses run over them in chunks, a trace through every one."""


def check_sizes(recipe: Recipe) -> None:
    """Refuse sizes no memory arithmetic can mean.

    Raises:
        PlanError: The micro-batch holds more positions, pixels or samples than anything could, or an
            adapter's rank is larger than any layer.
    """
    lora = recipe.method.lora
    if lora is not None and lora.rank > MAX_RANK:
        raise PlanError(
            f"LoRA rank {lora.rank:,} is larger than any layer is wide",
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
