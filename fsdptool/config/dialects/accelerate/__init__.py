"""accelerate 1.15's YAML (or JSON): told from other files, read, written and migrated."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdptool.config.canonical import WRITTEN, check_expressible, values_written
from fsdptool.config.dialects.accelerate.keys import DEAD, FSDP_KEYS, LEGACY_KEYS, PARALLELISM_KEYS
from fsdptool.config.dialects.protocol import Dialect
from fsdptool.config.edits import block_lines
from fsdptool.errors import ConfigError
from fsdptool.records.mesh import TRAINED, ParallelDims

if TYPE_CHECKING:
    from fsdptool.config.context import LintContext
    from fsdptool.config.fsdp1 import Rewriter, Target
    from fsdptool.files.tree import Node
    from fsdptool.records.sharding import FsdpSettings


NAME = "accelerate"
CANNOT: tuple[str, ...] = ()
"""Settings that this dialect cannot express."""


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
    block = values_written(settings, FSDP_KEYS)
    if not settings.activation_checkpointing_offload:
        block.pop("fsdp_activation_checkpointing_offload")
    return block


def mesh_block(settings: FsdpSettings) -> dict[str, Any]:
    """Return the ``parallelism_config`` block, empty when the mesh is plain sharding over the world.

    accelerate fills nothing in: an unwritten size is 1.

    Raises:
        ConfigError: ``dp_shard`` is open, and the process count that would decide it too.
    """
    mesh = settings.mesh
    if mesh == ParallelDims() and settings.cp_comm_strategy == "allgather":
        return {}
    if mesh.dp_shard is None:
        raise ConfigError(
            "accelerate cannot express an open dp_shard next to other mesh sizes",
            help="resolve the mesh for the process count first",
        )
    block: dict[str, Any] = {}
    for key, name in PARALLELISM_KEYS.items():
        if name == "cp_comm_strategy":
            if mesh.cp > 1 or settings.cp_comm_strategy != "allgather":
                block[key] = settings.cp_comm_strategy
        elif name in TRAINED or mesh.size(name) > 1:
            block[key] = mesh.size(name)
    return block


class Accelerate(Dialect):
    """accelerate's YAML (or JSON)."""

    name = "accelerate"
    consumers = ("accelerate", "fsdptool")

    def matches(self, root: Node) -> float:
        """Return how surely the mapping is accelerate's, 0 to 1."""
        keys = {entry.key for entry in root.entries}
        if "distributed_type" in keys:
            return 1.0
        if keys & {"compute_environment", "main_training_function", "rdzv_backend", "parallelism_config"}:
            return 0.9
        block = root.get("fsdp_config")
        if block and "num_processes" in keys and "num_machines" in keys:
            return 0.8
        return 0.0

    def read(self, lint: LintContext) -> None:
        """Read the keys into facts."""
        from fsdptool.config.dialects.accelerate.reader import read

        read(lint)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return accelerate YAML; every default that any consumer reads differently is written.

        Raises:
            ConfigError: A class name or ``min_num_params`` cannot be written under the wrap policy.
        """
        lines = block_lines(mapping(settings))
        return "\n".join([*(f"# {line}" if line else "#" for line in header), *lines]) + "\n"

    def migrate(self, steps: Rewriter, lint: LintContext, target: Target) -> dict[str, Any]:
        """Turn an FSDP1 file into FSDP2, one edit at a time; every default that flips is written out."""
        block = "fsdp_config"
        if lint.root.get(block) is None:
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
        if lint.get("wrap_policy") != "size":
            steps.drop(block, "fsdp_min_num_params")
        if target.mesh and lint.root.get("parallelism_config") is None:
            sizes = {f"parallelism_config_{key}_size": size for key, size in target.mesh.items()}
            steps.apply(
                steps.editor.add(steps.root, None, {"parallelism_config": sizes}), "parallelism_config"
            )
        return {}
