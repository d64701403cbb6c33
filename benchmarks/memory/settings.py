"""One measured setting, and the records that describe it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdptool.inspection import inspect
from fsdptool.modeling.resolve import resolve_run
from fsdptool.modeling.units import plan_teacher, plan_units
from fsdptool.records.checkpointing import read_policy
from fsdptool.records.codec import from_json
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import (
    Batch,
    Data,
    Distillation,
    Lora,
    Method,
    ModelChoice,
    Objective,
    Optimizer,
    Recipe,
    Sharding,
)
from fsdptool.records.sharding import FsdpSettings
from fsdptool.runs.folder import RunInputs
from fsdptool.source import resolve


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the matrix.

    Attributes:
        name: Unique.
        family: What the row counts as in the tables.
        reference, overrides: The model, reduced to fit a small machine.
        backend: ``fake`` or ``gloo``.
        ranks: World size; ``replicate`` of them hold copies (HSDP), ``context`` of them share a sequence
            and ``exchange`` its keys and values.
        method: ``full``, ``lora``, ``lora-replicated``, ``lora-nf4``, ``lora-int8``, ``lora-float8`` or
            ``distillation``.
        precision: ``fp32``, ``bf16`` (fp32 reduction) or ``bf16r`` (bf16 reduction).
        checkpointing: ``every_n``, or a policy as ``plan --checkpointing`` takes it.
        reshard: True, False or a number of ranks.
        batch: Sizes of a micro-batch.
        accumulation, held: Micro-batches per step; gradients held ``sharded`` or ``unsharded``.
        optimizer, implementation: As in a recipe.
        layout: ``native`` or ``accelerate``.
        prefetch: FSDP units to prefetch.
        packed: Whether batches contain packed documents under a mask.
        padded: Whether the first sample of every batch ends in padding, as a plan assumes wherever a batch
            has an ``attention_mask``.
        kept_aside: Held out while the model was tuned.
        objective, objective_options: As in a recipe.
    """

    name: str
    family: str
    reference: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "fake"
    ranks: int = 8
    replicate: int = 1
    context: int = 1
    exchange: str = "allgather"
    packed: bool = True
    padded: bool = False
    method: str = "full"
    precision: str = "bf16"
    checkpointing: str = "none"
    reshard: bool | int = True
    batch: Mapping[str, int] = field(default_factory=dict)
    accumulation: int = 1
    held: str = "sharded"
    optimizer: str = "adamw"
    implementation: str = "auto"
    layout: str = "native"
    prefetch: int = 1
    kept_aside: bool = False
    objective: str | None = None
    objective_options: Mapping[str, Any] = field(default_factory=dict)


def read_setting(data: Any) -> Setting:
    """Return a setting from its JSON form."""
    return from_json(Setting, data)


def records_of(setting: Setting) -> tuple[Recipe, FsdpSettings]:
    """Return the recipe and the settings of a row."""
    choice = ModelChoice(setting.reference, overrides=setting.overrides, weights="random", dtype="float32")
    method = Method()
    if setting.method == "lora":
        method = Method("lora", lora=Lora(rank=8, adapters="sharded"))
    elif setting.method == "lora-replicated":
        method = Method("lora", lora=Lora(rank=8, adapters="replicated"))
    elif setting.method.startswith("lora-"):
        base: Any = setting.method.removeprefix("lora-")
        method = Method("lora", lora=Lora(rank=8, base=base))
    elif setting.method == "distillation":
        method = Method("distillation", distillation=Distillation(choice))
    mode = setting.checkpointing
    recipe = Recipe(
        model=choice,
        method=method,
        objective=Objective(setting.objective, setting.objective_options),
        data=Data(packing=setting.packed),
        batch=Batch(**{"micro_batch": 1, **setting.batch, "accumulation": setting.accumulation}),
        optimizer=Optimizer(name=setting.optimizer, implementation=setting.implementation),  # type: ignore[arg-type]
        sharding=Sharding(
            layout=setting.layout,  # type: ignore[arg-type]
            reduce_dtype="bfloat16" if setting.precision == "bf16r" else "float32",
            reshard_after_forward=None if isinstance(setting.reshard, bool) else setting.reshard,
            prefetch=setting.prefetch,
            accumulation=setting.held,  # type: ignore[arg-type]
            checkpointing=None if mode == "none" else read_policy("every_2" if mode == "every_n" else mode),
        ),
    )
    settings = FsdpSettings(
        reshard_after_forward=setting.reshard is not False,
        activation_checkpointing=mode != "none",
        mixed_precision="no" if setting.precision == "fp32" else "bf16",
        mesh=ParallelDims(dp_replicate=setting.replicate, cp=setting.context),
        cp_comm_strategy=setting.exchange,  # type: ignore[arg-type]
        num_processes=setting.ranks,
        use_cpu=True,
    )
    return recipe, settings


def inputs_of(setting: Setting) -> RunInputs:
    """Return everything a worker needs."""
    recipe, settings = records_of(setting)
    spec = resolve(setting.reference, overrides=setting.overrides)
    anatomy = inspect(spec)
    run = resolve_run(recipe, settings)
    recipe, units = run.recipe, plan_units(anatomy, run)
    teacher = recipe.method.distillation is not None
    return RunInputs(
        Path(),
        recipe,
        settings,
        spec,
        units,
        teacher_spec=spec if teacher else None,
        teacher_units=plan_teacher(anatomy, run) if teacher else None,
    )
