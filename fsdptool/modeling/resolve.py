"""``resolve_run``: the one place where a recipe and a configuration file become a run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdptool.errors import PlanError
from fsdptool.layout import resolve_sharding
from fsdptool.modeling.methods import method_of
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.plan import OWN_LOOP, TrainingLoop
from fsdptool.records.recipe import Batch, Recipe
from fsdptool.records.resolved_run import ResolvedRun
from fsdptool.records.sharding import FsdpSettings

_FLOAT8_GATHERS = (OWN_LOOP.program, "accelerate", "trainer", "trl", "diffusers")
"""Programs that gather weights of float8 layers in float8 by default: accelerate 1.15 (``AORecipeKwargs``)
does, and those that leave it to accelerate. axolotl 0.19 and LLaMA-Factory 0.9 switch it off."""


def resolve_run(
    recipe: Recipe, settings: FsdpSettings, *, ranks: int | None = None, loop: TrainingLoop = OWN_LOOP
) -> ResolvedRun:
    """Return a run with every setting decided.

    Args:
        recipe: How the model is trained.
        settings: What the configuration file says.
        ranks: Ranks of the run; None takes the file's. Where it leaves them to the launch, an open size of
            the mesh stays open, and so does the accumulation of a global batch.
        loop: Whose training loop it is.

    Raises:
        ConfigError: The mesh does not suit the ranks that share out the experts.
        PlanError: The mesh does not multiply to the ranks, the micro-batch does not divide the global batch,
            or a number of ranks to reshard to does not divide those that share a copy.
    """
    sharding = resolve_sharding(settings, recipe.sharding)
    if loop.program not in _FLOAT8_GATHERS:
        sharding = replace(sharding, float8=False)
    if loop.adapter_dtype is not None and recipe.method.name == "lora":
        sharding = replace(sharding, trained_dtype=loop.adapter_dtype)
    recipe = with_stored_dtypes(recipe, sharding.compute_dtype)
    mesh = settings.mesh
    run = ResolvedRun(recipe, settings, sharding, mesh, loop)
    if ranks is None and settings.num_processes != -1:
        ranks = settings.num_processes
    if ranks is None and mesh.dp_shard is None:
        return replace(run, mesh=mesh.with_experts(recipe.sharding.expert_parallel))
    return on_ranks(run, recipe.batch, mesh, ranks or mesh.other_sizes * mesh.size("dp_shard"))


def on_ranks(run: ResolvedRun, batch: Batch, mesh: ParallelDims, ranks: int) -> ResolvedRun:
    """Return a run with the mesh and the batch of so many ranks.

    Args:
        run: Gives the experts' ranks and those to reshard to.
        batch: As the recipe gives it: with the accumulation, or with the global batch.
        mesh: As the file gives it; an open size takes the ranks that are left.
        ranks: Ranks of the run.

    Raises:
        ConfigError, PlanError: As :func:`resolve_run`.
    """
    sized = size_mesh(mesh, ranks, run.recipe.sharding.expert_parallel)
    reshard = run.sharding.reshard_after_forward
    violation = None if isinstance(reshard, bool) else sized.reshard_violation(reshard)
    if violation is not None:
        raise PlanError(f"reshard_after_forward: {violation}", help="use such a divisor, or true or false")
    batch = replace(batch, accumulation=_accumulation(batch, sized), global_batch=None)
    return replace(run, recipe=replace(run.recipe, batch=batch), mesh=sized)


def size_mesh(mesh: ParallelDims, ranks: int, experts: int) -> ParallelDims:
    """Return the mesh with every size known, ``experts`` ranks of it sharing out the experts.

    Raises:
        ConfigError: The mesh does not suit the experts' ranks.
        PlanError: A size is not positive, cannot be planned, or they do not multiply to the ranks.
    """
    for name, size, reason in mesh.unsupported():
        raise PlanError(f"mesh size {name} {size} is not supported: {reason}", help="leave it at 1")
    try:
        sized = mesh.resolve(ranks)
    except ValueError as error:
        raise PlanError(str(error), help="make the sizes multiply to GPUs x nodes") from error
    return sized.with_experts(experts)


def _accumulation(batch: Batch, mesh: ParallelDims) -> int:
    """Return forwards per optimizer step, from ``accumulation`` or from ``global_batch``.

    Raises:
        PlanError: A size is not positive, or the micro-batch does not divide the global batch.
    """
    if batch.micro_batch < 1:
        raise PlanError(f"the micro-batch must be at least 1, not {batch.micro_batch}")
    if batch.accumulation < 1:
        raise PlanError(f"accumulation must be at least 1, not {batch.accumulation}")
    if batch.global_batch is None:
        return batch.accumulation
    ranks = mesh.data_ranks
    each = batch.micro_batch * ranks
    if batch.global_batch < 1 or batch.global_batch % each:
        raise PlanError(
            f"micro-batch {batch.micro_batch} x {ranks} data-parallel ranks = {each} does not divide the"
            f" global batch {batch.global_batch}",
            help=f"choose a global batch that is a multiple of {each}, or another micro-batch",
        )
    return batch.global_batch // each


def with_stored_dtypes(recipe: Recipe, compute_dtype: str | None) -> Recipe:
    """Return the recipe with every ``dtype: auto`` decided.

    A trained model is stored in fp32, because its updates are smaller than what 16 bits resolve. A frozen
    one is stored in the dtype that it computes in: FSDP2 would cast each gathered parameter to it anyway
    (torch 2.13, ``FSDPParam.init_dtype_attrs``), so fp32 shards would double its memory and change no result.
    """
    frozen: Any = compute_dtype or "float32"
    method, model = recipe.method, recipe.model
    if model.dtype == "auto":
        model = replace(model, dtype=frozen if method_of(recipe).freezes_model else "float32")
    distillation = method.distillation
    if distillation is not None and distillation.teacher.dtype == "auto":
        teacher = replace(distillation.teacher, dtype=frozen)
        method = replace(method, distillation=replace(distillation, teacher=teacher))
    if model is recipe.model and method is recipe.method:
        return recipe
    return replace(recipe, model=model, method=method)
