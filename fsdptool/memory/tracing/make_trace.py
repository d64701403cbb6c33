"""Builds what is traced: the model as it will be trained, at reduced depth where blocks repeat."""

from __future__ import annotations

import math
import traceback
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from fsdptool.errors import ConfigError, FsdptoolError, InputsError
from fsdptool.families.objectives.language import CausalLM
from fsdptool.families.protocol import TensorSpec
from fsdptool.families.registry import family_of
from fsdptool.garbage import without_gc
from fsdptool.inspection import inspect
from fsdptool.memory.tracing.compiled_blocks import BlockCompiler, trace_compiled
from fsdptool.memory.tracing.early_cut import Cut, Described, Make, recomputed
from fsdptool.memory.tracing.fake_tensors import BY_VALUE, FollowedValues, MicroBatchConditions
from fsdptool.memory.tracing.kernels import fuse_attention
from fsdptool.memory.tracing.named_losses import NAMED_LOSSES, titan_loss
from fsdptool.memory.tracing.operators import MixedDtypesError
from fsdptool.memory.tracing.reduced_depth import trace_at_depth
from fsdptool.memory.tracing.tiled_loss import TiledLoss, loss_of_chunks
from fsdptool.modeling import build_model
from fsdptool.modeling.context_parallel import check_context
from fsdptool.modeling.fused_loss import fuse_head
from fsdptool.modeling.methods import method_of
from fsdptool.modeling.methods.float8 import PLANNED as FLOAT8_NOTE
from fsdptool.modeling.methods.quantised_layers import describe_base
from fsdptool.modeling.objective import MicroLoss, ModelLoss, Task, objective_for
from fsdptool.modeling.prepare import Change, prepare_model, to_dtype
from fsdptool.modeling.tensor_group import ALONE, TensorGroup
from fsdptool.modeling.units import TrainedModel, as_trained, compiled_modules, plan_teacher, plan_units
from fsdptool.records.anatomy import Anatomy, ModelSpec, Parameter
from fsdptool.records.diagnostic import library_versions
from fsdptool.records.plan import OWN_LOOP
from fsdptool.records.recipe import FUSED_ATTENTION, ModelChoice, Recipe
from fsdptool.records.resolved_run import ResolvedRun
from fsdptool.records.run import RunPhase
from fsdptool.records.sharding import UnitPlan
from fsdptool.records.trace import Profile, Trace

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import FrameType

    from fsdptool.families.protocol import Objective


_DRAWN = (
    "the model decides shapes by values that depend on its weights, for example by how many tokens each"
    " expert receives: the figures are those of random values, which spread tokens about evenly over experts"
)


_MASK = "attention_mask"
_PADDED = (
    "a mask hides the padding of rows; each layer that attends with SDPA keeps a copy of it (samples x tokens"
    " x tokens{kernel}); if all rows have one length, say so with --lengths"
)
_NO_FLASH = ", for the memory-efficient kernel of SDPA: its flash kernel takes no mask"


@contextmanager
def _usual_torch() -> Iterator[None]:
    """Trace alike whatever the caller has set: a notebook's default dtype, or ``torch.no_grad``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.enable_grad():
            yield
    finally:
        torch.set_default_dtype(before)


@_usual_torch()
@without_gc()
def make_trace(
    spec: ModelSpec,
    run: ResolvedRun,
    profile: Profile,
    trained: TrainedModel | None = None,
    teacher: Anatomy | None = None,
    *,
    worst_routing: bool = False,
    alike: str = "",
) -> Trace:
    """Trace without the cache. See :func:`fsdptool.memory.trace`; ``alike`` is ``Conditions.recipe``."""
    recipe = run.recipe
    method = method_of(recipe)
    method.check(recipe, run.settings)
    check_context(spec, run)
    if trained is None:
        trained = as_trained(inspect(spec), recipe)
    anatomy = trained.published or trained.anatomy
    plan = plan_units(trained, run)
    objective = objective_for(recipe, spec)
    try:
        given = family_of(spec).batch_spec(spec.config, recipe)
    except InputsError as error:
        return without_activations(anatomy, recipe, profile, f"{error.message}: {error.help}")
    specs = with_padding_mask(given, run, objective)
    padded = len(specs) > len(given)
    teacher_trace = _trace_teacher(teacher, run, profile, specs, alike) if teacher is not None else None

    base_notes: list[str | None] = []
    whole = None
    if method.changes_model and method.unquantised(recipe) is recipe:
        base_notes.append(None)
        whole = {p.fqn: (p.shape, _stored(p, plan), p.trainable) for p in trained.anatomy.parameters}

    def make(cut: Cut | None = None, compiler: BlockCompiler | None = None) -> nn.Module:
        # What is said of the base and what is compiled refers to the full depth.
        early = cut if base_notes and compiler is None else None
        blocks = partial(compiler.compile_modules, paths=compiled_modules(plan)) if compiler else None
        model = trained_model(spec, run, plan, early, worst_routing=worst_routing, compile=blocks)
        if not base_notes:
            base_notes.append(describe_base(model))
        return model

    conditions = MicroBatchConditions(
        profile=profile,
        compute=to_dtype(plan.param_dtype),
        output=to_dtype(plan.output_dtype),
        inputs=to_dtype(plan.input_dtype),
        exact=plan.exact_inputs,
        uncast=frozenset(p.fqn for p in plan.ignored) | _uncalled(plan),
        sharing=run.mesh.cp,
        ring=run.settings.cp_comm_strategy == "alltoall",
        flash=run.flash,
        recipe=alike,
    )
    if run.loop.program != OWN_LOOP.program and _autocasts(plan, trained.anatomy):
        conditions = replace(conditions, autocast=conditions.compute, compute=None, output=None, inputs=None)
    micro_loss = ModelLoss(objective) if run.loop.own_loss else method.micro_loss(recipe, objective)
    traced = _trace_or_explain(make, micro_loss, specs, conditions, anatomy, recipe, whole=whole)
    if not traced.known:
        return traced
    if recipe.sharding.compile:

        def trace_with(compiler: BlockCompiler) -> Trace:
            return trace_at_depth(
                partial(make, compiler=compiler), micro_loss, specs, conditions, values=FollowedValues.NONE
            )

        traced = trace_compiled(traced, trace_with, reason=_uncompilable(plan, run))
    evaluation, sampling = (
        _trace_off_step(phase, spec, recipe, conditions, make, anatomy)
        for phase in (RunPhase.EVALUATION, RunPhase.SAMPLING)
    )
    off_step = [part for part in (evaluation, sampling) if part is not None]
    return replace(
        traced,
        evaluation=evaluation,
        sampling=sampling,
        buffers=anatomy.buffers + (teacher_trace.buffers if teacher_trace is not None else ()),
        samples=recipe.batch.micro_batch,
        tokens=_tokens(recipe),
        teacher=teacher_trace,
        model=spec.model_class,
        unknowns=traced.unknowns
        + (teacher_trace.unknowns if teacher_trace is not None else ())
        + tuple(why for part in off_step for why in part.unknowns),
        notes=traced.notes
        + tuple(note for note in base_notes if note is not None)
        + (_told_padding(recipe, profile) if padded else ())
        + ((FLOAT8_NOTE,) if run.settings.mixed_precision == "fp8" else ()),
    )


def with_padding_mask(
    specs: tuple[TensorSpec, ...], run: ResolvedRun, objective: Objective
) -> tuple[TensorSpec, ...]:
    """Return a micro-batch with the mask that a loop gives a decoder whose rows have several lengths.

    Encoders always have one. Ranks that share sequences take none, and flash kernels need none.
    """
    tokens = next((item for item in specs if item.name == "input_ids"), None)
    rows = math.prod(tokens.shape[:-1]) if tokens is not None else 0
    plain = run.mesh.cp == 1 and run.recipe.model.attention not in FUSED_ATTENTION
    least = run.loop.masked_from_rows
    if tokens is None or not plain or not 0 < least <= rows or not isinstance(objective, CausalLM):
        return specs
    if any(item.name == _MASK for item in specs):
        return specs
    return (*specs, TensorSpec(_MASK, tokens.shape, "int64", "mask"))


def _told_padding(recipe: Recipe, profile: Profile) -> tuple[str, ...]:
    if recipe.model.attention == "eager":  # it makes a mask for rows of one length, too
        return ()
    return (_PADDED.format(kernel=_NO_FLASH if profile == "cuda" else ""),)


def _autocasts(plan: UnitPlan, anatomy: Anatomy) -> bool:
    """Whether autocast narrows weights where they are used: nothing is gathered, and some are in fp32."""
    whole = {parameter.fqn for parameter in plan.ignored}
    wide = any(_stored(p, plan) == "float32" for p in anatomy.parameters if p.numel)
    narrow = plan.param_dtype in ("bfloat16", "float16")
    return narrow and wide and all(p.fqn in whole for p in anatomy.parameters)


def _uncalled(plan: UnitPlan) -> frozenset[str]:
    return frozenset(p.fqn for unit in plan.units if not unit.called for p in unit.parameters)


def _uncompilable(plan: UnitPlan, run: ResolvedRun) -> str | None:
    """Return why no block of a plan can be compiled on fake tensors, or None."""
    if run.sharding.recomputes and run.settings.activation_checkpointing_offload:
        return "checkpointing moves their inputs to the host"
    blocks = tuple(f"{path}." for path in compiled_modules(plan))
    if any(path.startswith(blocks) for unit in plan.units for path in unit.modules):
        return "FSDP units inside them divide their graphs"
    return None


def _trace_off_step(
    phase: RunPhase,
    spec: ModelSpec,
    recipe: Recipe,
    conditions: MicroBatchConditions,
    make: Make,
    anatomy: Anatomy,
) -> Trace | None:
    """Return a forward of validation or of sampling, or None if the recipe wants none."""
    if not (recipe.evaluation.wanted if phase is RunPhase.EVALUATION else recipe.evaluation.sampled):
        return None
    own = recipe if phase is RunPhase.EVALUATION else sampled_recipe(recipe)
    specs = family_of(spec).batch_spec(spec.config, own)
    loss = Task(objective_for(recipe, spec))
    return _trace_or_explain(
        lambda cut: make(cut).eval(),
        loss,
        specs,
        replace(conditions, off_step=phase),
        anatomy,
        own,
        what=phase,
    )


def sampled_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe with the batch of one forward of sampling (``training/sampling.py``).

    One sample: a window of text as long as the prompt and what is to follow (a prompt that is given
    counts as 32 tokens), or one picture.
    """
    batch, data = replace(recipe.batch, micro_batch=1), recipe.data
    if batch.sequence_length is not None:
        prompt = 32 if data.options.get("prompts") else max(min(32, batch.sequence_length // 4), 1)
        window = prompt + data.options.get("sample_tokens", 32)
        batch = replace(batch, sequence_length=max(min(window, batch.sequence_length), 2))
    return replace(recipe, batch=batch, data=replace(data, packing=False))


def trained_model(
    spec: ModelSpec,
    run: ResolvedRun,
    plan: UnitPlan,
    cut: Cut | None = None,
    *,
    worst_routing: bool = False,
    compile: Change | None = None,
) -> nn.Module:
    """Return a model on meta as the trainer has it before it is sharded: with method, loss and checkpointing.

    ``cut`` changes the checkpointed model before the method does, if the method changes models; ``compile``
    compiles its blocks.
    """
    recipe = run.recipe
    # A tensor-parallel plan lists the modules of every block.
    early = cut is not None and method_of(recipe).changes_model and not (plan.tensor or plan.experts)
    before: list[str] = []
    after: list[str] = []

    def shorten(model: nn.Module) -> None:
        assert cut is not None
        cut(model)
        before.extend(recomputed(model))

    # Every rank of the group has tensors of the same sizes; experts, where the router is balanced.
    sizes = [part.size if part is not None else 1 for part in (plan.tensor, plan.experts)]
    layers, experts = (TensorGroup(size) for size in sizes)
    model = _built(spec, recipe.model, run)
    prepare_model(
        model,
        spec,
        recipe,
        run.settings,
        plan,
        replace(layers, experts=replace(experts, worst_routing=worst_routing)),
        float8_device=None,
        after_method=lambda model: after.extend(recomputed(model)),
        head=partial(_fuse_head, spec=spec, run=run, plan=plan) if recipe.objective.fused else None,
        compile=compile,
        shorten=shorten if early else None,
    )
    # A checkpointed module that the method wrapped: it has to be wrapped first.
    if early and before != after:
        return trained_model(spec, run, plan, worst_routing=worst_routing)
    return model


def _built(spec: ModelSpec, choice: ModelChoice, run: ResolvedRun) -> nn.Module:
    """Build a model on meta, with attention whose package need not be here.

    Other programs have kernels of their own where transformers has none: they keep the usual attention.

    Raises:
        ConfigError: transformers has no such attention for this model.
    """
    attention = choice.attention
    if attention not in FUSED_ATTENTION or run.settings.use_cpu:
        return build_model(spec, choice, cp=run.mesh.cp, initialise=False)
    model = build_model(spec, replace(choice, attention="sdpa"), cp=run.mesh.cp, initialise=False)
    if not fuse_attention(model, attention) and run.loop.program == OWN_LOOP.program:
        raise ConfigError(
            f"transformers has no {attention} for {spec.model_class}", help="set model.attention: sdpa"
        )
    return model


def _fuse_head(model: nn.Module, spec: ModelSpec, run: ResolvedRun, plan: UnitPlan) -> None:
    """Let the head compute the loss as the program does whose loop the run follows."""
    tiles, chunks = run.loop.tiles, run.loop.head_chunks
    if run.loop.head_loss == "torchtitan":
        fuse_head(model, partial(titan_loss, compiled=bool(run.recipe.sharding.compile)))
    elif run.loop.head_loss is not None:
        fuse_head(model, NAMED_LOSSES[run.loop.head_loss])
    elif tiles is not None:
        summed = not objective_for(run.recipe, spec).scores_tokens
        triton, gathers = not run.settings.use_cpu, bool(_uncalled(plan))
        fuse_head(model, TiledLoss(tiles, triton=triton, summed=summed, gathers=gathers))
    else:
        fuse_head(model, partial(loss_of_chunks, chunks) if chunks else None)


def _trace_teacher(
    anatomy: Anatomy,
    run: ResolvedRun,
    profile: Profile,
    specs: Sequence[TensorSpec],
    alike: str,
) -> Trace:
    spec, recipe = anatomy.spec, run.recipe
    choice = method_of(recipe).teacher_choice(recipe)
    assert choice is not None
    check_context(spec, run)
    plan = plan_teacher(anatomy, run)
    objective = objective_for(recipe, spec)

    def make(_cut: Cut | None = None) -> nn.Module:
        model = _built(spec, choice, run)
        head = partial(_fuse_head, spec=spec, run=run, plan=plan) if recipe.objective.fused else None
        prepare_model(model, spec, None, run.settings, plan, ALONE, float8_device=None, head=head)
        return model

    conditions = MicroBatchConditions(
        profile,
        to_dtype(plan.param_dtype),
        to_dtype(plan.output_dtype),
        to_dtype(plan.input_dtype),
        plan.exact_inputs,
        teacher=True,
        sharing=run.mesh.cp,
        ring=run.settings.cp_comm_strategy == "alltoall",
        flash=run.flash,
        recipe=alike,
    )
    traced = _trace_or_explain(make, Task(objective), specs, conditions, anatomy, recipe)
    if not traced.known:
        return traced
    return replace(traced, buffers=anatomy.buffers, model=spec.model_class)


def _trace_or_explain(
    make: Make,
    micro_loss: MicroLoss,
    specs: Sequence[TensorSpec],
    conditions: MicroBatchConditions,
    anatomy: Anatomy,
    recipe: Recipe,
    *,
    what: str = "activations",
    whole: Mapping[str, Described] | None = None,
) -> Trace:
    """Trace; if a model's code fails on fake tensors, states stay exact and the rest is unknown."""
    try:
        return _trace(partial(trace_at_depth, make, micro_loss, specs, conditions, whole=whole))
    except FsdptoolError:
        raise
    except Exception as error:
        return without_activations(
            anatomy, recipe, conditions.profile, explain_failure(error, anatomy.spec), what=what
        )


def _trace(trace: Callable[..., Trace]) -> Trace:
    """Trace without values; if the model decides shapes by value, with as many values as that takes."""
    try:
        return trace(values=FollowedValues.NONE)
    except BY_VALUE:
        pass
    try:
        return trace(values=FollowedValues.FIXED)
    except BY_VALUE:
        drawn = trace(values=FollowedValues.DRAWN)
    return replace(drawn, notes=(*drawn.notes, _DRAWN))


def _stored(parameter: Parameter, plan: UnitPlan) -> str:
    """Return the dtype that a parameter of the model at full depth is stored in."""
    return plan.master_dtype or parameter.dtype if parameter.trainable else parameter.dtype


def _tokens(recipe: Recipe) -> int | None:
    length = recipe.batch.sequence_length
    return recipe.batch.micro_batch * length if length is not None else None


def without_activations(
    anatomy: Anatomy, recipe: Recipe, profile: Profile, why: str, *, what: str = "activations"
) -> Trace:
    """Return a trace that only knows the states; ``why`` says why ``what`` is unknown."""
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
        unknowns=(f"{what}: {why}",),
    )


_LIBRARIES = ("torch", "fsdptool")
_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})
_LONGEST = 200


def explain_failure(error: Exception, spec: ModelSpec) -> str:
    """Return in one sentence which module of a model fails, on which line, why, and what helps."""
    text = " ".join(str(error).split())[:_LONGEST]
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    place = ", ".join(filter(None, (_module(frames), _line(error))))
    where = f" in {place}" if place else ""
    said = f"{spec.model_class} cannot be traced on fake tensors{where}"
    if isinstance(error, MixedDtypesError):
        return (
            f"{said} ({text}); cast the input, as in `x.to(w.dtype)` with the weight w of this {error.what},"
            " or use --precision no"
        )
    return f"{said} ({type(error).__name__}: {text})"


def _module(frames: Sequence[FrameType]) -> str | None:
    """Return the innermost module that runs, by its path from the model's class: ``Net.blocks.0``."""
    running = [own for frame in frames if isinstance(own := frame.f_locals.get("self"), nn.Module)]
    if not running:
        return None
    model, failed = running[0], running[-1]
    path = next((name for name, module in model.named_modules() if module is failed), type(failed).__name__)
    parts = (part for part in path.split(".") if part and part not in _WRAPPERS)
    return ".".join((type(model).__name__, *parts))


def _line(error: Exception) -> str | None:
    """Return the innermost line of the model's own code: its module and its number there.

    Paths depend on the machine, and traces are kept.
    """
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _LIBRARIES and not name.startswith("fsdptool_"):
            # A module of a package is known by its name, one that lies alone by its file.
            return f"line {number} of {name if '.' in name else Path(frame.f_code.co_filename).name}"
    return None
