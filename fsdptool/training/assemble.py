"""From a run folder's records to a sharded, materialised, proven model ready for its first step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from fsdptool.distributed.initialisation import Blueprint, draw_blueprint
from fsdptool.distributed.materialize import Origins, materialize
from fsdptool.distributed.proof import prove
from fsdptool.distributed.shard import shard, store_masters
from fsdptool.distributed.weights import Weights
from fsdptool.errors import ConfigError, ModelError
from fsdptool.families.registry import family_of
from fsdptool.inspection.build import build
from fsdptool.modeling.activation_checkpointing import checkpoint_units
from fsdptool.modeling.context_parallel import attention_of, check_context
from fsdptool.modeling.methods.apply import prepare_model
from fsdptool.modeling.methods.float8 import convert_layers
from fsdptool.modeling.methods.losses import Student, Task
from fsdptool.modeling.objective import objective_for
from fsdptool.runs.events import WorkerPhase
from fsdptool.runs.watchdog import PhaseReport, no_report
from fsdptool.training.optimizers.sharded import Update, base_rate, build_optimizer
from fsdptool.training.state import Ema
from fsdptool.training.step import LossScaler, MicroLoss, Stepper

if TYPE_CHECKING:
    from fsdptool.distributed.session import Session
    from fsdptool.families.protocol import Objective
    from fsdptool.records.model import ModelSpec
    from fsdptool.records.recipe import ModelChoice, Recipe
    from fsdptool.records.settings import FsdpSettings
    from fsdptool.records.units import UnitPlan
    from fsdptool.runs.folder import RunInputs


_SHOWN = 3
"""Names of missing parameters a note gives."""


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
        notes: What a person should know of where the weights came from, a sentence each.
    """

    model: nn.Module
    stepper: Stepper
    optimizer: Update
    scaler: LossScaler | None
    ema: Ema | None
    objective: Objective
    rate: float
    proof: dict[str, Any]
    notes: tuple[str, ...]


def assemble(inputs: RunInputs, session: Session, *, phase: PhaseReport = no_report) -> Assembled:
    """Build, shard, fill and prove the model of a run, and make its optimizer.

    Args:
        inputs: The run's records.
        session: This rank.
        phase: Called as each phase begins.

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
    phase(WorkerPhase.PROVING)
    proof = prove(made.model, plan, session)
    notes = made.notes
    micro_loss: MicroLoss = Task(objective)
    if recipe.method.name == "distillation":
        micro_loss, about_teacher = _student(inputs, session, objective, phase)
        notes += about_teacher
    named = list(made.model.named_parameters())
    rate = base_rate(recipe.optimizer, session.data_ranks)
    optimizer = build_optimizer(recipe.optimizer, named, rate=rate)
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
    return Assembled(made.model, stepper, optimizer, scaler, ema, objective, rate, proof, notes)


@dataclass(frozen=True, slots=True)
class _Made:
    model: nn.Module
    notes: tuple[str, ...]


def build_sharded(
    spec: ModelSpec,
    choice: ModelChoice,
    plan: UnitPlan,
    settings: FsdpSettings,
    session: Session,
    *,
    recipe: Recipe | None,
    seed: int,
    phase: PhaseReport = no_report,
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
        phase: Called as each phase begins.
    """
    phase(WorkerPhase.BUILDING)
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
            from fsdptool.modeling.methods.lora import adapter_blueprint

            adapters = adapter_blueprint(model)
        convert_layers(model, recipe, settings, session.device)
        model.train()
    phase(WorkerPhase.SHARDING)
    store_masters(model, plan)
    checkpointing = recipe.sharding.checkpointing if recipe is not None else None
    checkpoint_units(model, plan, checkpointing, offload=settings.activation_checkpointing_offload)
    if recipe is not None and recipe.sharding.compile:
        _compile_units(model, plan)
    shard(model, plan, session)
    phase(WorkerPhase.LOADING if weights is not None else WorkerPhase.INITIALISING)
    blueprint = draw_blueprint(lambda: _build_here(spec, choice), seed=seed, library=spec.library)
    origins = Origins(blueprint, weights, adapters, seed)
    missing = materialize(model, origins, session, offload=plan.cpu_offload)
    if weights is not None:
        weights.close()
    return _Made(model, _notes(spec, choice, missing, pretrained=weights is not None))


def _notes(spec: ModelSpec, choice: ModelChoice, missing: list[str], *, pretrained: bool) -> tuple[str, ...]:
    """Say which weights start at random although a person may expect trained ones."""
    name = spec.reference.id
    if missing:
        shown = ", ".join(missing[:_SHOWN]) + (", ..." if len(missing) > _SHOWN else "")
        return (f"not among the weights of {name}, so they start at random: {shown} ({len(missing)} in all)",)
    if not pretrained and choice.weights == "auto" and spec.reference.kind in ("hub", "folder"):
        return (f"{name} has no safetensors weights on this machine: it starts at random",)
    return ()


def open_weights(spec: ModelSpec, choice: ModelChoice, model: nn.Module) -> Weights | None:
    """Open the pretrained weights a choice asks for, or return None for random ones.

    Raises:
        ConfigError: Pretrained weights are wanted and there are none.
        ModelError: The files hold no parameter of this model.
    """
    if choice.weights == "random" or (choice.weights == "auto" and not spec.weights):
        return None
    if not spec.weights:
        raise ConfigError(
            f"{spec.reference.id} has no safetensors weights on this machine",
            help="download it first, or set model.weights: random",
        )
    weights = Weights(spec.weights, model)
    if not any(name in weights for name, _ in model.named_parameters(remove_duplicate=False)):
        raise ModelError(
            f"the weights of {spec.reference.id} hold no parameter of {spec.model_class}",
            help="name another model class or other files, or set model.weights: random",
        )
    return weights


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


def _student(
    inputs: RunInputs, session: Session, objective: Objective, phase: PhaseReport
) -> tuple[Student, tuple[str, ...]]:
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
        phase=partial(phase, model="teacher"),
    )
    prove(made.model, inputs.teacher_units, session)
    student = Student(objective, made.model, settings, objective_for(inputs.recipe, inputs.teacher_spec))
    return student, tuple(f"teacher: {note}" for note in made.notes)
