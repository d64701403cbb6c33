"""Search points: what a search varies of a run, and the run at such a point."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdptool.layout import compute_dtype
from fsdptool.modeling.resolve import size_mesh
from fsdptool.records.checkpointing import format_policy, read_policy
from fsdptool.records.cluster import Cluster
from fsdptool.records.mesh import GROUPS, PLANNED, TRAINED, ParallelDims
from fsdptool.records.plan import SearchPoint
from fsdptool.records.recipe import Recipe
from fsdptool.records.resolved_run import ResolvedRun
from fsdptool.records.sharding import ALL_MODULES, FsdpSettings


def point_of(run: ResolvedRun, cluster: int = 0) -> SearchPoint:
    """Return where a run stands in the search space; ``cluster`` is the index of its cluster."""
    recipe, sharding, mesh = run.recipe, run.sharding, run.mesh
    sizes: dict[str, Any] = {item.name: mesh.size(item.name) for item in PLANNED}
    return SearchPoint(
        cluster=cluster,
        layout=sharding.layout,
        wrap_policy=sharding.wrap_policy,
        wrap_classes=sharding.wrap_classes,
        micro_batch=recipe.batch.micro_batch,
        accumulation=recipe.batch.accumulation,
        checkpointing=format_policy(sharding.checkpointing),
        reshard_after_forward=sharding.reshard_after_forward,
        cpu_offload=sharding.cpu_offload,
        optimizer_implementation=recipe.optimizer.implementation,
        prefetch=sharding.prefetch,
        reduce_dtype=sharding.reduce_dtype,
        gradients=recipe.sharding.accumulation,
        **sizes,
        # Of a group of one rank there is nothing to divide.
        sequence_parallel=recipe.sharding.sequence_parallel and mesh.tp > 1,
    )


def at_point(run: ResolvedRun, point: SearchPoint, cluster: Cluster) -> ResolvedRun:
    """Return a run with a search point's fields in it, on a cluster.

    Raises:
        ConfigError, PlanError: The point's mesh does not suit the cluster.
    """
    recipe = run.recipe
    mesh = ParallelDims(**{name: getattr(point, name) for name in TRAINED})
    own = replace(recipe.sharding, accumulation=point.gradients, sequence_parallel=point.sequence_parallel)
    # Where every rank holds a copy (DDP), FSDP ignores all modules. Ranks that share one are FSDP's.
    copies = run.sharding.ignored_modules == ALL_MODULES and point.dp_shard > 1
    return replace(
        run,
        recipe=replace(
            recipe,
            batch=replace(recipe.batch, micro_batch=point.micro_batch, accumulation=point.accumulation),
            optimizer=replace(recipe.optimizer, implementation=point.optimizer_implementation),
            sharding=own,
        ),
        settings=replace(
            run.settings,
            num_processes=cluster.world_size,
            num_machines=cluster.nodes,
            use_cpu=cluster.gpu is None,
        ),
        sharding=replace(
            run.sharding,
            layout=point.layout,
            wrap_policy=point.wrap_policy,
            wrap_classes=point.wrap_classes,
            ignored_modules=None if copies else run.sharding.ignored_modules,
            reshard_after_forward=point.reshard_after_forward,
            checkpointing=read_policy(point.checkpointing),
            compute_dtype=compute_dtype(run.settings, own, point.layout),
            reduce_dtype=point.reduce_dtype,
            cpu_offload=point.cpu_offload,
            prefetch=point.prefetch,
        ),
        mesh=size_mesh(mesh, cluster.world_size, point.ep),
        # NVIDIA's generations that compute in bfloat16 are those that torch's flash kernel supports.
        flash=cluster.gpu is None or cluster.gpu.native_bf16,
    )


def changed_settings(start: SearchPoint, point: SearchPoint) -> dict[str, Any]:
    """Return what a point changes of another one, the cluster aside: field to new value."""
    pairs = ((name, getattr(start, name), getattr(point, name)) for name in SearchPoint.__dataclass_fields__)
    return {name: after for name, before, after in pairs if before != after and name != "cluster"}


def point_flags(point: SearchPoint) -> dict[str, tuple[str, ...]]:
    """Return the options of ``fsdptool plan`` that say what a point says: option name to flag and value."""
    reshard = point.reshard_after_forward
    flags: dict[str, tuple[str, ...]] = {
        "layout": ("--layout", point.layout),
        "micro_batch": ("--micro-batch", str(point.micro_batch)),
        "accumulation": ("--accumulation", str(point.accumulation)),
        "checkpointing": ("--checkpointing", point.checkpointing),
        "reshard": ("--reshard", str(reshard).lower()),
        "hsdp": ("--hsdp", f"{point.dp_replicate}x{point.dp_shard}"),
        **{name: (f"--{name}", str(getattr(point, name))) for name in GROUPS},
        "sequence_parallel": (
            ("--sequence-parallel",) if point.sequence_parallel else ("--no-sequence-parallel",)
        ),
        "offload": ("--offload",) if point.cpu_offload else ("--no-offload",),
        "prefetch": ("--prefetch", str(point.prefetch)),
        "optimizer_implementation": ("--optimizer-implementation", point.optimizer_implementation),
        "gradients": ("--gradients", point.gradients),
    }
    if point.wrap_classes:
        flags["wrap"] = tuple(part for name in point.wrap_classes for part in ("--wrap", name))
    return flags


def files_of(run: ResolvedRun) -> tuple[Recipe, FsdpSettings]:
    """Return the recipe and the settings that a run's files say: each setting where its owner says it."""
    sharding, policy = run.sharding, run.sharding.checkpointing
    reshard = sharding.reshard_after_forward
    recipe = replace(
        run.recipe,
        sharding=replace(
            run.recipe.sharding,
            layout=sharding.layout,
            checkpointing=None if policy.mode in ("none", "full") else policy,
            reshard_after_forward=None if isinstance(reshard, bool) else reshard,
            prefetch=sharding.prefetch,
            reduce_dtype=sharding.reduce_dtype,  # type: ignore[arg-type]  # one of the record's literals
            expert_parallel=run.mesh.ep,
        ),
    )
    settings = replace(
        run.settings,
        wrap_policy=sharding.wrap_policy,
        wrap_classes=sharding.wrap_classes,
        reshard_after_forward=bool(reshard),
        activation_checkpointing=sharding.recomputes,
        cpu_offload=sharding.cpu_offload,
        mesh=replace(run.settings.mesh, **{name: run.mesh.size(name) for name in TRAINED}),
    )
    return recipe, settings
