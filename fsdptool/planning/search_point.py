"""Search points: read from recipe and settings, and written back to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fsdptool.errors import PlanError
from fsdptool.records.checkpointing import format_policy, read_policy
from fsdptool.records.cluster import Cluster
from fsdptool.records.mesh import GROUPS, PLANNED, TRAINED, ParallelDims
from fsdptool.records.plan import SearchPoint
from fsdptool.records.recipe import Recipe
from fsdptool.records.sharding import FsdpSettings


def read_search_point(
    recipe: Recipe, settings: FsdpSettings, cluster: Cluster, index: int = 0
) -> SearchPoint:
    """Return where recipe and settings stand, with mesh and accumulation worked out for a cluster.

    Raises:
        PlanError: The mesh does not multiply to the ranks there are, the micro-batch does not divide
            the global batch, or an integer reshard does not divide the ranks that share a copy.
    """
    batch, sharding = recipe.batch, recipe.sharding
    mesh = resolve_dims(settings.mesh, cluster.world_size, sharding.expert_parallel)
    _check_resharding(sharding.reshard_after_forward, mesh)
    sizes: dict[str, Any] = {item.name: mesh.size(item.name) for item in PLANNED}
    return SearchPoint(
        cluster=index,
        layout=sharding.layout,
        wrap_policy=settings.wrap_policy,
        wrap_classes=settings.wrap_classes,
        micro_batch=batch.micro_batch,
        accumulation=resolve_accumulation(recipe, mesh),
        checkpointing=_checkpointing(recipe, settings),
        reshard_after_forward=sharding.reshard_after_forward or settings.reshard_after_forward,
        cpu_offload=settings.cpu_offload,
        optimizer_implementation=recipe.optimizer.implementation,
        prefetch=sharding.units_ahead,
        reduce_dtype=sharding.reduce_dtype,
        gradients=sharding.accumulation,
        **sizes,
        # Of a group of one rank there is nothing to divide.
        sequence_parallel=sharding.sequence_parallel and mesh.tp > 1,
    )


def _check_resharding(ranks: int | None, mesh: ParallelDims) -> None:
    violation = mesh.reshard_violation(ranks) if ranks is not None else None
    if violation is not None:
        raise PlanError(f"reshard_after_forward: {violation}", help="use such a divisor, or true or false")


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


def apply_search_point(
    point: SearchPoint, recipe: Recipe, settings: FsdpSettings, cluster: Cluster
) -> tuple[Recipe, FsdpSettings]:
    """Return recipe and settings as a search point sets them, ready to be written and run."""
    policy = read_policy(point.checkpointing)
    integer = not isinstance(point.reshard_after_forward, bool)
    sharding = replace(
        recipe.sharding,
        layout=point.layout,
        checkpointing=None if policy.mode in ("none", "full") else policy,
        reshard_after_forward=point.reshard_after_forward if integer else None,
        prefetch=point.prefetch,
        reduce_dtype=point.reduce_dtype,  # type: ignore[arg-type]  # one of the record's literals
        accumulation=point.gradients,
        sequence_parallel=point.sequence_parallel,
        expert_parallel=point.ep,
    )
    batch = replace(
        recipe.batch, micro_batch=point.micro_batch, accumulation=point.accumulation, global_batch=None
    )
    optimizer = replace(recipe.optimizer, implementation=point.optimizer_implementation)
    turned = replace(
        settings,
        wrap_policy=point.wrap_policy,
        wrap_classes=point.wrap_classes,
        reshard_after_forward=bool(point.reshard_after_forward),
        activation_checkpointing=policy.mode != "none",
        cpu_offload=point.cpu_offload,
        mesh=replace(settings.mesh, **{name: getattr(point, name) for name in TRAINED}),
        num_processes=cluster.world_size,
        num_machines=cluster.nodes,
        use_cpu=cluster.gpu is None,
    )
    return replace(recipe, batch=batch, sharding=sharding, optimizer=optimizer), turned


def resolve_dims(mesh: ParallelDims, world_size: int, experts: int = 1) -> ParallelDims:
    """Return the mesh with every size known, ``experts`` ranks of it sharing out the experts.

    Raises:
        ConfigError: The mesh does not suit the experts' ranks.
        PlanError: A size is not positive, cannot be planned, or they do not multiply to the world size.
    """
    for name, size, reason in mesh.unsupported():
        raise PlanError(f"mesh size {name} {size} is not supported: {reason}", help="leave it at 1")
    try:
        resolved = mesh.resolve(world_size)
    except ValueError as error:
        raise PlanError(str(error), help="make the sizes multiply to GPUs x nodes") from error
    return resolved.with_experts(experts)


def resolve_accumulation(recipe: Recipe, mesh: ParallelDims) -> int:
    """Return forwards per optimizer step, from ``accumulation`` or from ``global_batch``.

    Raises:
        PlanError: A size is not positive, or the micro-batch does not divide the global batch.
    """
    batch = recipe.batch
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


def _checkpointing(recipe: Recipe, settings: FsdpSettings) -> str:
    chosen = recipe.sharding.checkpointing
    if not settings.activation_checkpointing or (chosen is not None and chosen.mode == "none"):
        return "none"
    return format_policy(chosen)
