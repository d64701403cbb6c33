"""The unit plan of a run, adapters included, and which settings its groups of ranks support."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fsdptool.cache import Store, source_digest
from fsdptool.errors import ConfigError
from fsdptool.inspection.api import cache_parts, decode, encode, resized
from fsdptool.layout import group
from fsdptool.modeling.methods import method_of
from fsdptool.modeling.objective import objective_for
from fsdptool.modeling.optimizer_costs import optimizer_spec
from fsdptool.records.checkpointing import Checkpointing
from fsdptool.records.codec import to_json
from fsdptool.records.recipe import ModelChoice, Recipe
from fsdptool.source import adapted
from fsdptool.tensor.division import localise, plan_expert_parallel, plan_tensor_parallel
from fsdptool.tensor.placements import merged, placements, published
from fsdptool.tensor.refusals import EXPERT, TENSOR, refuse_indivisible

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import nn

    from fsdptool.inspection.api import Inspection
    from fsdptool.records.anatomy import Anatomy
    from fsdptool.records.recipe import Lora
    from fsdptool.records.resolved_run import ResolvedRun
    from fsdptool.records.sharding import UnitPlan
    from fsdptool.records.tensor_plan import Placement, TensorPlan


def check_tensor_parallel(run: ResolvedRun) -> None:
    """Refuse what cannot be trained over a tensor-parallel group, before anything is written.

    Raises:
        ConfigError: Names the setting.
    """
    recipe = run.recipe
    spec = optimizer_spec(recipe.optimizer)
    reason = None
    if not spec.elementwise:
        reason = f"optimizer {spec.name} needs whole matrices, or states that cannot be resharded"
    elif recipe.method.lora is not None and (why := _undivided(recipe.method.lora)):
        reason = why
    elif run.settings.mixed_precision == "fp8":
        reason = "mixed_precision fp8 scales whole layers"
    if reason is not None:
        raise ConfigError(f"tp_size is not supported: {reason}", help="set tp_size to 1, or change it")
    if recipe.sharding.sequence_parallel:
        _refuse_uneven(run)


def _undivided(lora: Lora) -> str | None:
    """Return why the ranks of a group cannot divide a model with such adapters, or None."""
    if lora.base != "unchanged":
        return f"a base stored as {lora.base} cannot be divided"
    names = ("modules_to_save", "trainable_token_indices", "use_dora", "lora_bias")
    used = [name for name in names if getattr(lora, name)] + ["bias"] * (lora.bias != "none")
    return f"method.lora.{used[0]} is trained on whole layers" if used else None


def check_expert_parallel(run: ResolvedRun) -> None:
    """Refuse what cannot be trained over an expert-parallel group, before anything is written.

    Raises:
        ConfigError: Names the setting.
    """
    recipe, sharding, spec = run.recipe, run.sharding, optimizer_spec(run.recipe.optimizer)
    reason = None
    if sharding.layout != "native":
        reason = f"the {sharding.layout} layout has no units of experts"
    elif not isinstance(sharding.reshard_after_forward, bool):
        reason = "experts are sharded over fewer ranks than sharding.reshard_after_forward assumes"
    elif recipe.sharding.compile:
        reason = "compiled blocks cannot exchange tokens in numbers that change with each batch"
    elif sharding.ignored_modules is not None:
        reason = "ignored_modules may leave experts out of sharding"
    elif not spec.elementwise:
        reason = f"optimizer {spec.name} needs whole matrices, or states that cannot be resharded"
    elif recipe.method.lora is not None and (why := _undivided(recipe.method.lora)):
        reason = why
    if reason is not None:
        name = EXPERT.removesuffix(":")
        raise ConfigError(
            f"{EXPERT} {run.mesh.ep} is not supported: {reason}", help=f"set {name} to 1, or change it"
        )


def _refuse_uneven(run: ResolvedRun) -> None:
    """Refuse sequences that the ranks of a group cannot divide evenly.

    Raises:
        ConfigError: Names the length.
    """
    length, mesh = run.recipe.batch.sequence_length, run.mesh
    if run.recipe.data.padded == "longest":
        raise ConfigError(
            "sharding.sequence_parallel needs sequences of one length",
            help="pack them, or set data.padding: length",
        )
    if length is not None and mesh.cp > 1:
        # Context parallelism fills sequences up to two chunks for each rank.
        length = -(-length // (2 * mesh.cp)) * 2
    if length is not None and length % mesh.tp:
        each = " of each context-parallel rank" if mesh.cp > 1 else ""
        raise ConfigError(
            f"sharding.sequence_parallel: {mesh.tp} ranks cannot divide the {length} positions{each}",
            help=f"set batch.sequence_length to a multiple of {mesh.tp * mesh.cp}",
        )


KIND = "trained"
_WALKED = ("parameters", "buffers", "modules", "input_embedding", "output_embedding", "final_norm")
"""What a method changes of an anatomy; the wrap choice and the findings stay those made before."""


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model as it will be trained: what its method makes of the published one.

    Attributes:
        anatomy: Parameters that the method adds included.
        replicated: Names of parameters the method keeps whole on every rank.
        published: The anatomy before the method changed it; None where it is the same.
    """

    anatomy: Anatomy
    replicated: tuple[str, ...] = ()
    published: Anatomy | None = None


def as_trained(anatomy: Anatomy, recipe: Recipe, *, use_cache: bool = True) -> TrainedModel:
    """Return the anatomy of the model as the recipe trains it.

    Only methods that change models need torch, and only where the cache has no answer.

    Args:
        anatomy: Of the model as published (``inspection.inspect``).
        recipe: Method and dtype; ``auto`` is decided (:func:`fsdptool.modeling.resolve.resolve_run`).
        use_cache: Whether to read and keep cached answers.

    Raises:
        ConfigError: The method does not suit the model.
    """
    method = method_of(recipe)
    if not method.changes_model:
        return TrainedModel(_as_built(anatomy, recipe.model))
    store = Store()
    key = store.key(
        {
            "model": cache_parts(anatomy.spec),
            "method": to_json(recipe.method),
            "dtype": recipe.model.dtype,
            "code": source_digest(__name__),
        }
    )
    kept, findings = store.get(KIND, key) if use_cache else (None, ())
    if kept is not None and (cached := _restored(kept, anatomy)) is not None:
        return cached
    from fsdptool.families.registry import family_of
    from fsdptool.inspection.build import build

    model = build(anatomy.spec, dtype=recipe.model.dtype, initialise=False)
    method.prepare(model, recipe, family_of(anatomy.spec), anatomy.spec.config)
    trained = TrainedModel(_anatomy_of_live(model, anatomy), method.replicated(model, recipe), anatomy)
    if use_cache and not findings:
        about = f"{recipe.method.name} of {anatomy.spec.model_class} of {anatomy.spec.reference.id}"
        value = {"anatomy": encode(trained.anatomy), "replicated": list(trained.replicated)}
        store.put(KIND, key, value, about=about)
    return trained


def with_adapter(anatomy: Anatomy, *, use_cache: bool = True) -> TrainedModel:
    """Return the model that a reference names, with the adapter that it is, in the dtype it was inspected in.

    Args:
        anatomy: Of the base.
        use_cache: Whether to read and keep cached answers.

    Raises:
        ConfigError: The adapter does not suit its base.
    """
    choice = ModelChoice(anatomy.spec.reference.id, dtype="float32")
    trained = as_trained(anatomy, adapted(Recipe(choice), anatomy.spec), use_cache=use_cache)
    return dataclasses.replace(trained, anatomy=resized(trained.anatomy))


def detected(inspection: Inspection, *, use_cache: bool = True) -> tuple[Inspection, Anatomy | None]:
    """Return an inspection with the adapter that its reference is, and the anatomy without it (or None).

    Raises:
        ConfigError: The adapter does not suit its base.
    """
    published = inspection.anatomy
    if published.spec.adapter is None:
        return inspection, None
    adapted_one = with_adapter(published, use_cache=use_cache).anatomy
    return dataclasses.replace(inspection, anatomy=adapted_one), published


def _restored(data: Any, published: Anatomy) -> TrainedModel | None:
    try:
        walked = decode(data["anatomy"], published.spec)
        replicated = tuple(data["replicated"])
    except (ConfigError, KeyError, TypeError, ValueError):
        # Valid JSON of another shape: a record changed without its digest.
        return None
    changes = {name: getattr(walked, name) for name in _WALKED}
    return TrainedModel(dataclasses.replace(published, **changes), replicated, published)


@dataclass(frozen=True, slots=True)
class DividedModel:
    """What the tensor- and expert-parallel groups of a run leave to one rank.

    Attributes:
        anatomy: The local model of a rank; the whole one where no group divides it.
        tensor: How a tensor-parallel group divides it, or None.
        experts: How an expert-parallel group shares out its experts, or None.
        placements: Of every parameter, in the order of the anatomy; empty where nothing is divided.
    """

    anatomy: Anatomy
    tensor: TensorPlan | None
    experts: TensorPlan | None
    placements: tuple[Placement, ...]


Groups = tuple[int, int, bool]
"""What a division of one model under one method depends on: ``tp``, ``ep`` and ``sequence_parallel``."""


def _divide(trained: TrainedModel, run: ResolvedRun) -> DividedModel:
    """Return what one rank holds of a model.

    Raises:
        ConfigError: The model cannot be divided so.
    """
    experts = _expert_division(trained, run.mesh.ep)
    tensor = _tensor_division(trained, run, _spread(experts))
    anatomy, placed = trained.anatomy, None
    for plan in (tensor, experts):
        if plan is not None:
            own = placements(trained.anatomy.parameters, plan)
            anatomy, placed = localise(anatomy, plan), own if placed is None else merged(placed, own)
    return DividedModel(anatomy, tensor, experts, placed or ())


def _spread(experts: TensorPlan | None) -> list[str]:
    """Return the modules whose experts a group shares out."""
    return [module.path for module in experts.modules] if experts is not None else []


def plan_units(
    anatomy: Anatomy | TrainedModel,
    run: ResolvedRun,
    *,
    divisions: dict[Groups, DividedModel] | None = None,
) -> UnitPlan:
    """Return the units of a run.

    Args:
        anatomy: Of the model as published, or what :func:`as_trained` made of it.
        run: Method, dtypes, sharding and mesh.
        divisions: Divisions of this model that earlier calls found; a new one is added.

    Raises:
        ConfigError: The settings or the method do not suit the model.
    """
    if run.mesh.ep > 1:
        check_expert_parallel(run)
    if run.mesh.tp > 1:
        check_tensor_parallel(run)
    trained = anatomy if isinstance(anatomy, TrainedModel) else as_trained(anatomy, run.recipe)
    groups = (run.mesh.tp, run.mesh.ep, run.recipe.sharding.sequence_parallel)
    divided = divisions.get(groups) if divisions is not None else None
    if divided is None:
        divided = _divide(trained, run)
        if divisions is not None:
            divisions[groups] = divided
    local = divided.anatomy
    wrapped = run.loop.wraps_adapters and trained.published is not None
    if wrapped and run.sharding.layout == "accelerate":
        local = dataclasses.replace(local, final_norm=None)
    units = group(local, run.sharding, replicated=trained.replicated, experts=_spread(divided.experts))
    if run.loop.tiles is not None and run.recipe.objective.fused:
        units = _with_head_not_called(units, local)
    return dataclasses.replace(
        units, tensor=divided.tensor, experts=divided.experts, placements=divided.placements
    )


def _with_head_not_called(units: UnitPlan, anatomy: Anatomy) -> UnitPlan:
    """Return the units of a loop whose loss reads the head's weight and does not call the head.

    A unit of the head alone then stays sharded, and the loss gathers the weight (TRL 1.16.0
    ``trainer/utils.py:add_fused_lm_head``). In a unit with others, their forward gathers it.
    """
    head = (anatomy.output_embedding,)
    return dataclasses.replace(
        units, units=tuple(dataclasses.replace(unit, called=unit.modules != head) for unit in units.units)
    )


def _expert_division(trained: TrainedModel, ranks: int) -> TensorPlan | None:
    """Return how a group of ranks shares out the experts of the published model, or None."""
    if ranks == 1:
        return None
    plan = plan_expert_parallel(trained.published or trained.anatomy, ranks)
    refuse_indivisible(plan, EXPERT)
    return plan


def _tensor_division(trained: TrainedModel, run: ResolvedRun, spread: Sequence[str]) -> TensorPlan | None:
    """Return how a group divides the layers of the published model, but for the experts shared out."""
    if run.mesh.tp == 1:
        if run.recipe.sharding.sequence_parallel:
            raise ConfigError(
                "sharding.sequence_parallel needs a tensor-parallel group",
                help="set tp_size above 1 in the accelerate file, or leave sharding.sequence_parallel out",
            )
        return None
    plan = plan_tensor_parallel(
        trained.published or trained.anatomy,
        run.mesh.tp,
        vocabulary=_divides_vocabulary(trained, run.recipe),
        sequence=run.recipe.sharding.sequence_parallel,
        without=spread,
    )
    refuse_indivisible(plan, TENSOR)
    return plan


def _divides_vocabulary(trained: TrainedModel, recipe: Recipe) -> bool:
    """Whether the ranks of a group may divide the vocabulary: the loss is computed from parts of the logits,
    and no adapter changes the table or the head."""
    anatomy = trained.published or trained.anatomy
    if recipe.method.distillation is not None or not objective_for(recipe, anatomy.spec).divides_vocabulary:
        return False
    ends = {anatomy.input_embedding, anatomy.output_embedding}
    changed = (published(name) for p in trained.anatomy.parameters for name in p.names)
    return not any(adapter and name.rpartition(".")[0] in ends for name, adapter in changed)


def plan_teacher(anatomy: Anatomy, run: ResolvedRun) -> UnitPlan:
    """Return the units of a method's teacher: frozen, never recomputed, resharded after forward.

    Every unit is resharded, whatever the settings say of the student's: a teacher has no backward that
    would use it again, and is freed after each forward anyway (``shard.reshard_all``).

    Raises:
        ConfigError: The settings do not suit the teacher.
    """
    if anatomy.spec.adapter is not None:
        raise ConfigError(
            f"the teacher {anatomy.spec.reference.id} is a LoRA adapter, and teachers are whole models",
            help="merge it into its base, and name that",
        )
    choice = method_of(run.recipe).teacher_choice(run.recipe)
    assert choice is not None
    frozen = dataclasses.replace(
        _as_built(anatomy, choice),
        parameters=tuple(
            dataclasses.replace(p, trainable=False, dtype=choice.dtype) for p in anatomy.parameters
        ),
    )
    # The wrap classes of the file are the student's; a teacher of another architecture has its own.
    live = {module.class_name for module in anatomy.modules}
    classes = tuple(name for name in run.sharding.wrap_classes if name in live) or anatomy.wrap.classes
    own = dataclasses.replace(run.sharding, wrap_classes=classes, checkpointing=Checkpointing("none"))
    plan = group(frozen, own)
    units = tuple(dataclasses.replace(unit, reshard_after_forward=True) for unit in plan.units)
    return dataclasses.replace(plan, units=units)


def _anatomy_of_live(model: nn.Module, published: Anatomy) -> Anatomy:
    """Return the anatomy of a changed model: its structure, and the wrap choice made before."""
    from fsdptool.inspection.walk import walk

    walked = walk(model)
    return dataclasses.replace(published, **{name: getattr(walked, name) for name in _WALKED})


def _as_built(anatomy: Anatomy, choice: ModelChoice) -> Anatomy:
    """Give floating parameters the dtype the run builds them in (anatomies are taken in fp32)."""
    if choice.dtype == "float32":
        return anatomy
    return dataclasses.replace(
        anatomy,
        parameters=tuple(
            dataclasses.replace(p, dtype=choice.dtype) if p.dtype == "float32" else p
            for p in anatomy.parameters
        ),
    )


def compiled_modules(plan: UnitPlan) -> tuple[str, ...]:
    """Return the modules that ``sharding.compile`` compiles, each by itself: the plan's blocks."""
    return tuple(path for unit in plan.units if unit.kind == "block" for path in unit.modules)
