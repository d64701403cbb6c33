"""From a run folder's records to a sharded, materialised, proven model ready for its first step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from fsdptool.errors import ConfigError
from fsdptool.families.registry import family_of
from fsdptool.inspection.build import build
from fsdptool.training.context import attention_of, check_context
from fsdptool.training.ema import Ema
from fsdptool.training.initialisation import Blueprint, draw_blueprint
from fsdptool.training.materialize import Origins, materialize
from fsdptool.training.methods.apply import prepare_model
from fsdptool.training.methods.float8 import convert_layers
from fsdptool.training.methods.losses import Student, Task
from fsdptool.training.optimizer import Update, build_optimizer
from fsdptool.training.precision import LossScaler
from fsdptool.training.proof import prove
from fsdptool.training.recompute import checkpoint_units
from fsdptool.training.schedule import base_rate
from fsdptool.training.shard import shard, store_masters
from fsdptool.training.step import MicroLoss, Stepper
from fsdptool.training.weights import Weights

if TYPE_CHECKING:
    from fsdptool.families.protocol import Objective
    from fsdptool.records.model import ModelSpec
    from fsdptool.records.recipe import ModelChoice, Recipe
    from fsdptool.records.settings import FsdpSettings
    from fsdptool.records.units import UnitPlan
    from fsdptool.training.run_inputs import RunInputs
    from fsdptool.training.session import Session

Phase = Callable[[str], None]


@dataclass(slots=True)
class Assembled:
    """Everything a loop steps with.

    Attributes:
        model: Sharded and materialised.
        stepper: Takes optimizer steps.
        optimizer: Over the trainable parameters.
        scaler: For fp16, else None.
        ema: Sharded average, or None.
        objective: The task, for evaluation.
        rate: Learning rate before the schedule.
        proof: What was proven about the sharding (``summary.json``).
        initialised: Parameters a pretrained checkpoint lacked.
    """

    model: nn.Module
    stepper: Stepper
    optimizer: Update
    scaler: LossScaler | None
    ema: Ema | None
    objective: Objective
    rate: float
    proof: dict[str, Any]
    initialised: tuple[str, ...]


def objective_for(recipe: Recipe, spec: ModelSpec) -> Objective:
    """Return the objective the recipe names, or the family's default for this model.

    Raises:
        ConfigError: The family does not train under it.
    """
    family = family_of(spec)
    known = family.objectives()
    name = recipe.objective.name or spec.objective or family.objective_for(spec.config)
    if name not in known:
        raise ConfigError(
            f"family {family.name} has no objective {name!r}", help=f"it has: {', '.join(sorted(known))}"
        )
    try:
        return known[name](**dict(recipe.objective.options))
    except TypeError as error:
        raise ConfigError(f"objective {name}: {error}", help="check objective.options") from error


def assemble(inputs: RunInputs, session: Session, *, phase: Phase = lambda name: None) -> Assembled:
    """Build, shard, fill and prove the model of a run, and make its optimizer.

    Args:
        inputs: The run's records.
        session: This rank.
        phase: Called with the name of each phase as it begins.

    Raises:
        FsdptoolError: The records do not suit the model or this machine.
        WorkerError: The sharding is not what the unit plan lists.
    """
    recipe, spec, plan = inputs.recipe, inputs.spec, inputs.units
    objective = objective_for(recipe, spec)
    check_context(spec, recipe, inputs.settings)
    made = build_sharded(
        spec, recipe.model, plan, inputs.settings, session, recipe=recipe, seed=recipe.seed, phase=phase
    )
    phase("proving")
    proof = prove(made.model, plan, session)
    micro_loss: MicroLoss = Task(objective)
    if recipe.method.name == "distillation":
        micro_loss = _student(inputs, session, objective, phase)
    named = list(made.model.named_parameters())
    rate = base_rate(recipe.optimizer, session.data_ranks)
    home = torch.device("cpu") if plan.cpu_offload else session.device
    optimizer = build_optimizer(recipe.optimizer, named, rate=rate, device=home)
    scaler = LossScaler() if plan.param_dtype == "float16" else None
    stepper = Stepper(
        made.model,
        micro_loss,
        optimizer,
        session,
        clip=recipe.optimizer.clip_grad_norm,
        unsharded=recipe.sharding.accumulation == "unsharded",
        scaler=scaler,
    )
    ema = Ema(named, recipe.ema.decay) if recipe.ema.decay is not None else None
    return Assembled(
        made.model, stepper, optimizer, scaler, ema, objective, rate, proof, tuple(made.initialised)
    )


@dataclass(frozen=True, slots=True)
class _Made:
    model: nn.Module
    initialised: list[str]


def build_sharded(
    spec: ModelSpec,
    choice: ModelChoice,
    plan: UnitPlan,
    settings: FsdpSettings,
    session: Session,
    *,
    recipe: Recipe | None,
    seed: int,
    phase: Phase = lambda name: None,
) -> _Made:
    """Build a model on meta, shard it and give each rank its rows.

    Args:
        spec: The model.
        choice: dtype, attention and where weights come from.
        plan: Its units.
        settings: Activation checkpointing offload.
        session: This rank.
        recipe: Method and recomputation; None freezes the model (a teacher).
        seed: Seed of random weights.
        phase: Called with the name of each phase.
    """
    phase("building")
    model = build(spec, dtype=choice.dtype, attention=attention_of(choice, session.sizes.cp))
    _no_cache(model)
    weights = open_weights(spec, choice, model)
    adapters: Blueprint | None = None
    if recipe is None:
        model.requires_grad_(False)
        model.eval()
    else:
        model = prepare_model(model, recipe, family_of(spec), spec.config)
        if recipe.method.name == "lora":
            from fsdptool.training.methods.lora import adapter_blueprint

            adapters = adapter_blueprint(model)
        convert_layers(model, recipe, settings, session.device)
        model.train()
    phase("sharding")
    store_masters(model, plan)
    checkpointing = recipe.sharding.checkpointing if recipe is not None else None
    checkpoint_units(model, plan, checkpointing, offload=settings.activation_checkpointing_offload)
    if recipe is not None and recipe.sharding.compile:
        _compile_units(model, plan)
    shard(model, plan, session)
    phase("loading" if weights is not None else "initialising")
    blueprint = draw_blueprint(lambda: _build_here(spec, choice), seed=seed, library=spec.library)
    origins = Origins(blueprint, weights, adapters, seed)
    initialised = materialize(model, origins, session, offload=plan.cpu_offload)
    if weights is not None:
        weights.close()
    return _Made(model, initialised)


def open_weights(spec: ModelSpec, choice: ModelChoice, model: nn.Module) -> Weights | None:
    """Open the pretrained weights a choice asks for, or return None for random ones.

    Raises:
        ConfigError: Pretrained weights are wanted and there are none.
    """
    if choice.weights == "random" or (choice.weights == "auto" and not spec.weights):
        return None
    if not spec.weights:
        raise ConfigError(
            f"{spec.reference.id} has no safetensors weights on this machine",
            help="download it first, or set model.weights: random",
        )
    return Weights(spec.weights, model)


def _build_here(spec: ModelSpec, choice: ModelChoice) -> nn.Module:
    return family_of(spec).build(
        spec.config,
        model_class=spec.model_class,
        dtype=choice.dtype,
        attention=choice.attention,
        folder=spec.folder,
        trust_remote_code=spec.trust_remote_code,
    )


def _no_cache(model: nn.Module) -> None:
    """Generation caches grow twice when a block is recomputed; training needs none."""
    config = getattr(model, "config", None)
    if config is not None and getattr(config, "use_cache", False):
        config.use_cache = False


def _compile_units(model: nn.Module, plan: UnitPlan) -> None:
    """Compile each block by itself: equal blocks share one compilation."""
    for unit in plan.units:
        if unit.kind == "block":
            for path in unit.modules:
                model.get_submodule(path).compile()


def _student(inputs: RunInputs, session: Session, objective: Objective, phase: Phase) -> Student:
    settings = inputs.recipe.method.distillation
    assert settings is not None and inputs.teacher_spec is not None and inputs.teacher_units is not None
    check_context(inputs.teacher_spec, inputs.recipe, inputs.settings)
    made = build_sharded(
        inputs.teacher_spec,
        settings.teacher,
        inputs.teacher_units,
        inputs.settings,
        session,
        recipe=None,
        seed=inputs.recipe.seed,
        phase=lambda name: phase(f"teacher: {name}"),
    )
    prove(made.model, inputs.teacher_units, session)
    return Student(objective, made.model, settings, objective_for(inputs.recipe, inputs.teacher_spec))
