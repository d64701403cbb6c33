"""Writing SimpleTuner's flags, and turning FSDP1 settings into FSDP2 in place."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fsdptool.config.dialects.simpletuner_keys import CANNOT, NAME
from fsdptool.config.draft import Draft
from fsdptool.config.expressible import check_expressible
from fsdptool.config.facts import WRITTEN
from fsdptool.errors import ConfigError
from fsdptool.records.settings import FsdpSettings, Mesh

if TYPE_CHECKING:
    from fsdptool.config.migrate import Rewriter, Target


def mapping(settings: FsdpSettings) -> dict[str, Any]:
    """Return the settings as SimpleTuner's flags.

    Raises:
        ConfigError: SimpleTuner has no flag for a setting.
    """
    check_expressible(settings, NAME, CANNOT)
    mesh = settings.mesh
    if mesh.dp_replicate != 1:
        raise ConfigError(f"{NAME} cannot express dp_replicate = {mesh.dp_replicate}")
    if mesh != Mesh(cp=mesh.cp, dp_shard=mesh.dp_shard):
        raise ConfigError(f"{NAME} cannot express the mesh")
    if mesh.cp > 1 and (settings.num_processes is None) != (mesh.dp_shard is None):
        raise ConfigError(f"{NAME} cannot express dp_shard = {mesh.dp_shard} without num_processes")
    if (
        mesh.cp > 1
        and settings.num_processes is not None
        and mesh.cp * (mesh.dp_shard or 1) != settings.num_processes
    ):
        raise ConfigError(f"{NAME} cannot express dp_shard = {mesh.dp_shard}: it is what cp leaves")
    if mesh.cp == 1 and mesh.dp_shard is not None:
        raise ConfigError(f"{NAME} cannot express dp_shard = {mesh.dp_shard}: all processes shard")
    flags: dict[str, Any] = {
        "fsdp_enable": True,
        "fsdp_version": 2,
        "fsdp_reshard_after_forward": settings.reshard_after_forward,
        "fsdp_state_dict_type": WRITTEN["state_dict_type"][settings.state_dict_type],
        "fsdp_cpu_ram_efficient_loading": settings.cpu_ram_efficient_loading,
        "fsdp_cpu_offload": settings.cpu_offload,
        "fsdp_activation_checkpointing": settings.activation_checkpointing,
        "fsdp_auto_wrap_policy": WRITTEN["wrap_policy"][settings.wrap_policy],
    }
    if settings.wrap_classes:
        flags["fsdp_transformer_layer_cls_to_wrap"] = ",".join(settings.wrap_classes)
    flags["context_parallel_size"] = mesh.cp
    flags["context_parallel_comm_strategy"] = settings.cp_comm_strategy
    if settings.num_processes is not None:
        flags["num_processes"] = settings.num_processes
    flags["mixed_precision"] = settings.mixed_precision
    return flags


def write(settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
    """Return the FSDP part of SimpleTuner's ``config.json``.

    Raises:
        ConfigError: As :func:`mapping`.
    """
    return json.dumps(mapping(settings), indent=2) + "\n"


def migrate(steps: Rewriter, draft: Draft, target: Target) -> None:
    """Write version 2 and what version 1 meant."""
    for key, value in (
        ("fsdp_version", 2),
        ("fsdp_reshard_after_forward", target.reshard),
        ("fsdp_state_dict_type", WRITTEN["state_dict_type"][target.state_dict]),
    ):
        dashed = f"--{key}" if steps.root.get(f"--{key}") is not None else key
        steps.put(None, dashed, value)
