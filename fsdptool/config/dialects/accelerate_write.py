"""Writing accelerate's YAML, and turning an FSDP1 file into FSDP2 in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdptool.config.dialects.accelerate_keys import DEAD, FSDP_KEYS, LEGACY_KEYS, NAME
from fsdptool.config.draft import Draft
from fsdptool.config.edits import block_lines
from fsdptool.config.expressible import check_expressible
from fsdptool.config.facts import WRITTEN
from fsdptool.errors import ConfigError
from fsdptool.records.settings import FsdpSettings, Mesh

if TYPE_CHECKING:
    from fsdptool.config.migrate import Rewriter, Target


def write(settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
    """Return the settings as accelerate YAML. Every default that any consumer reads differently is written.

    Raises:
        ConfigError: A class name or ``min_num_params`` cannot be written under the wrap policy.
    """
    lines = block_lines(mapping(settings))
    return "\n".join([*(f"# {line}" if line else "#" for line in header), *lines]) + "\n"


def mapping(settings: FsdpSettings) -> dict[str, Any]:
    """Return the settings as the mapping an accelerate file holds, in the order it is written.

    Raises:
        ConfigError: As :func:`write`.
    """
    check_expressible(settings, NAME)
    top: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": settings.debug,
        "distributed_type": "FSDP",
        "fsdp_config": _fsdp_mapping(settings),
        "machine_rank": settings.machine_rank,
    }
    for key in ("main_process_ip", "main_process_port", "gpu_ids"):
        if getattr(settings, key) is not None:
            top[key] = getattr(settings, key)
    top["mixed_precision"] = settings.mixed_precision
    top["num_machines"] = settings.num_machines
    if settings.num_processes is not None:
        top["num_processes"] = settings.num_processes
    mesh = mesh_block(settings)
    if mesh:
        top["parallelism_config"] = mesh
    top["rdzv_backend"] = settings.rdzv_backend
    top["use_cpu"] = settings.use_cpu
    return top


def _fsdp_mapping(settings: FsdpSettings) -> dict[str, Any]:
    block: dict[str, Any] = {
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": settings.reshard_after_forward,
        "fsdp_auto_wrap_policy": WRITTEN["wrap_policy"][settings.wrap_policy],
    }
    if settings.wrap_classes:
        block["fsdp_transformer_layer_cls_to_wrap"] = ",".join(settings.wrap_classes)
    if settings.min_num_params is not None:
        block["fsdp_min_num_params"] = settings.min_num_params
    block["fsdp_state_dict_type"] = WRITTEN["state_dict_type"][settings.state_dict_type]
    block["fsdp_offload_params"] = settings.cpu_offload
    block["fsdp_cpu_ram_efficient_loading"] = settings.cpu_ram_efficient_loading
    block["fsdp_activation_checkpointing"] = settings.activation_checkpointing
    if settings.activation_checkpointing_offload:
        block["fsdp_activation_checkpointing_offload"] = True
    if settings.ignored_modules is not None:
        block["fsdp_ignored_modules"] = settings.ignored_modules
    return block


def mesh_block(settings: FsdpSettings) -> dict[str, Any]:
    """Return the ``parallelism_config`` block, empty when the mesh is plain sharding over the world.

    accelerate fills nothing in: an unwritten size is 1.

    Raises:
        ConfigError: ``dp_shard`` is open, and the process count that would decide it too.
    """
    mesh = settings.mesh
    if mesh == Mesh() and settings.cp_comm_strategy == "allgather":
        return {}
    if mesh.dp_shard is None:
        raise ConfigError(
            "accelerate cannot express an open dp_shard next to other mesh sizes",
            help="resolve the mesh for the process count first",
        )
    sizes = {
        "dp_replicate_size": mesh.dp_replicate,
        "dp_shard_size": mesh.dp_shard,
        "tp_size": mesh.tp,
        "cp_size": mesh.cp,
    }
    if mesh.cp > 1 or settings.cp_comm_strategy != "allgather":
        sizes["cp_comm_strategy"] = settings.cp_comm_strategy  # type: ignore[assignment]
    if mesh.sp > 1:
        sizes["sp_size"] = mesh.sp
    return {f"parallelism_config_{key}": value for key, value in sizes.items()}


def migrate(steps: Rewriter, draft: Draft, target: Target) -> None:
    """Turn an FSDP1 file into FSDP2, one edit at a time; every default that flips is written out."""
    block = "fsdp_config"
    if draft.root.get(block) is None:
        steps.apply(steps.editor.add(steps.root, None, {block: {"fsdp_version": 2}}), block)
    for key in FSDP_KEYS:
        bare = key.removeprefix("fsdp_")
        parent, _ = steps.block(block)
        if parent.kind == "map" and parent.get(key) is not None:
            steps.drop(block, bare)
        steps.rename(block, bare, key)
    strategy = "fsdp_sharding_strategy"
    parent, _ = steps.block(block)
    if parent.kind == "map" and parent.get("fsdp_reshard_after_forward") is not None:
        steps.drop(block, strategy)
    steps.put(block, "fsdp_reshard_after_forward", target.reshard, synonyms=(strategy,))
    steps.put(block, "fsdp_version", 2)
    steps.put(block, "fsdp_state_dict_type", WRITTEN["state_dict_type"][target.state_dict])
    dead = [key for key, meant in DEAD.items() if meant is None]
    steps.drop(
        block,
        *LEGACY_KEYS,
        *dead,
        *(key.removeprefix("fsdp_") for key in (*LEGACY_KEYS, *dead) if key != "fsdp"),
    )
    if draft.get("wrap_policy") != "size":
        steps.drop(block, "fsdp_min_num_params")
    if target.mesh and draft.root.get("parallelism_config") is None:
        sizes = {f"parallelism_config_{key}_size": size for key, size in target.mesh.items()}
        steps.apply(steps.editor.add(steps.root, None, {"parallelism_config": sizes}), "parallelism_config")
