"""The canonical settings all dialects share, and the way to and from :class:`FsdpSettings`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fsdptool.errors import ConfigError
from fsdptool.records.mesh import DIMENSIONS, ParallelDims
from fsdptool.records.sharding import FsdpSettings

LAUNCH = (
    "num_processes", "num_machines", "machine_rank", "main_process_ip", "main_process_port", "rdzv_backend",
    "use_cpu", "gpu_ids", "debug",
)  # fmt: skip
"""Settings of the launch rather than of sharding."""

OF_FSDP = (
    "fsdp_version", "reshard_after_forward", "wrap_policy", "wrap_classes", "min_num_params",
    "state_dict_type", "cpu_offload", "cpu_ram_efficient_loading", "activation_checkpointing",
    "activation_checkpointing_offload", "ignored_modules",
)  # fmt: skip
"""Settings that FSDP alone has."""

_SIZES = tuple(
    name for size in DIMENSIONS for name in ((size, "cp_comm_strategy") if size == "cp" else (size,))
)

COMMON = (
    *OF_FSDP, "mixed_precision", *_SIZES, *LAUNCH,
)  # fmt: skip
"""Settings of FSDP2, in the order they are shown and written."""

ACCELERATE_ONLY = ("activation_checkpointing_offload", "ignored_modules")
"""Settings that only accelerate's own formats can express: those of other programs refuse them."""

LEGACY = (
    "sharding_strategy", "backward_prefetch", "forward_prefetch", "use_orig_params", "sync_module_states",
    "limit_all_gathers",
)  # fmt: skip
"""Settings that exist under version 1 only."""

LEGACY_DEFAULTS: dict[str, Any] = {
    "sharding_strategy": "full_shard",
    "backward_prefetch": None,
    "forward_prefetch": False,
    "use_orig_params": True,
    "sync_module_states": True,
}
"""Those that accelerate 1.15's plugin takes, with what its launcher exports where nothing is written."""

DETAILS = ("sp_seq_length", "sp_seq_length_is_variable", "sp_attn_implementation")
"""Read with ``sp`` above 1 only, which does nothing under FSDP2 (FSD312): shown, never carried over."""

MESH = DIMENSIONS
BOOLEANS = frozenset({
    "reshard_after_forward", "cpu_offload", "cpu_ram_efficient_loading", "activation_checkpointing",
    "activation_checkpointing_offload", "forward_prefetch", "use_orig_params", "sync_module_states",
    "limit_all_gathers", "use_cpu", "debug",
})  # fmt: skip

WRITTEN = {
    "wrap_policy": {"transformer": "TRANSFORMER_BASED_WRAP", "size": "SIZE_BASED_WRAP", "none": "NO_WRAP"},
    "state_dict_type": {
        "sharded": "SHARDED_STATE_DICT",
        "full": "FULL_STATE_DICT",
        "local": "LOCAL_STATE_DICT",
    },
}
"""How accelerate and TrainingArguments write the canonical values."""


def begins(name: str, value: Any) -> dict[str, Any]:
    """Return what changes when a setting begins to count, with what begins and ends to count with it."""
    if name == "wrap_policy":
        return {name: value, "*": name}
    if name != "fsdp_version":
        return {name: value}
    return {name: value, "*": name, "reshard_after_forward": None, **dict.fromkeys(LEGACY)}


STRATEGY_NAMES = {
    name.upper(): name
    for name in ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")
}
STRATEGIES = {
    **STRATEGY_NAMES,
    **{str(number): name for number, name in enumerate(STRATEGY_NAMES.values(), 1)},
    "_HYBRID_SHARD_ZERO2": "hybrid_shard_zero2",
}
"""FSDP1's strategies by the names (in upper case) and numbers of torch's enumeration."""

RESHARD_OF_STRATEGY = {
    "full_shard": True,
    "hybrid_shard": True,
    "shard_grad_op": False,
    "hybrid_shard_zero2": False,
}
"""FSDP1 strategy to FSDP2 ``reshard_after_forward``; ``no_shard`` has no equivalent."""


def settings_from(facts: Mapping[str, Any]) -> FsdpSettings:
    """Build the canonical record from canonical values; FSDP1 values are carried over to FSDP2.

    Args:
        facts: Values by the names of :data:`COMMON` and :data:`LEGACY`; absent ones take the
            record's defaults.
    """
    values: dict[str, Any] = {}
    for name in FsdpSettings.__dataclass_fields__:
        if name not in ("mesh", "wrap_classes") and facts.get(name) is not None:
            values[name] = facts[name]
    values["wrap_classes"] = tuple(facts.get("wrap_classes") or ())
    if values.get("state_dict_type") == "local":
        values["state_dict_type"] = "sharded"
    if not isinstance(values.get("num_processes"), int):
        values.pop("num_processes", None)
    strategy = facts.get("sharding_strategy")
    mesh = {name: facts[name] for name in MESH if facts.get(name) is not None}
    if strategy is not None:
        values["reshard_after_forward"] = RESHARD_OF_STRATEGY.get(strategy, True)
        if strategy.startswith("hybrid") and ParallelDims(**mesh) == ParallelDims():
            mesh = hybrid_mesh(facts.get("num_processes"), facts.get("num_machines"))
    if values.get("wrap_policy") != "size":
        values.pop("min_num_params", None)
    if values.get("wrap_policy") != "transformer":
        values["wrap_classes"] = ()
    return FsdpSettings(mesh=ParallelDims(**mesh), **values)


def hybrid_mesh(processes: Any, machines: Any) -> dict[str, int]:
    """Return the mesh HYBRID_SHARD stands for: replicate over machines, shard within one.

    ``{}`` when the process count is unknown, or on one machine, where torch's HYBRID_SHARD
    replicates nothing (torch 2.13 ``_init_intra_and_inter_node_groups``: one node, one group).
    """
    if not isinstance(processes, int) or not isinstance(machines, int) or machines < 2:
        return {}
    if processes % machines or processes // machines < 2:
        return {}
    return {"dp_replicate": machines, "dp_shard": processes // machines}


def facts_from(settings: FsdpSettings) -> dict[str, Any]:
    """Return the canonical values of a record, by the names of :data:`COMMON`."""
    facts: dict[str, Any] = {"fsdp_version": 2}
    for name in FsdpSettings.__dataclass_fields__:
        if name != "mesh":
            facts[name] = getattr(settings, name)
    for name in MESH:
        facts[name] = getattr(settings.mesh, name)
    return {name: facts[name] for name in COMMON}


def values_written(settings: FsdpSettings, keys: Mapping[str, str]) -> dict[str, Any]:
    """Return settings as accelerate and TrainingArguments write them; what is unset is left out.

    Args:
        settings: What is to be written.
        keys: A dialect's keys with their canonical names; those of version 1 are skipped.
    """
    facts = facts_from(settings)
    values = {}
    for key, name in keys.items():
        value = facts.get(name)
        if value is not None and value != ():
            text = ",".join(value) if isinstance(value, tuple) else value
            values[key] = WRITTEN.get(name, {}).get(text, text)
    return values


_DEFAULT = facts_from(FsdpSettings())


def check_expressible(settings: FsdpSettings, dialect: str, cannot: Iterable[str] = ()) -> None:
    """Refuse settings that contradict each other or that a dialect cannot express.

    Args:
        settings: What is to be written.
        dialect: Name of the dialect, for the message.
        cannot: Canonical settings that the dialect cannot express: only their defaults can be "written".

    Raises:
        ConfigError: Naming the first setting that cannot be expressed, and its value.
    """
    facts = facts_from(settings)
    for name in cannot:
        if facts[name] != _DEFAULT[name]:
            raise ConfigError(
                f"{dialect} cannot express {name} = {_shown(facts[name])}",
                help="leave it at its default, or write another dialect (accelerate has every setting)",
            )
    if settings.wrap_classes and settings.wrap_policy != "transformer":
        raise ConfigError(f"wrap_classes cannot be combined with the wrap policy {settings.wrap_policy!r}")
    if settings.min_num_params is not None and settings.wrap_policy != "size":
        raise ConfigError(f"min_num_params cannot be combined with the wrap policy {settings.wrap_policy!r}")
    if settings.wrap_policy == "size" and settings.min_num_params is None:
        raise ConfigError(f"{dialect} requires min_num_params with the wrap policy 'size'")
    for name in settings.wrap_classes:
        if not name.isidentifier():
            raise ConfigError(f"{dialect} cannot express the wrap class {name!r}: not a class name")
    if settings.activation_checkpointing_offload and not settings.activation_checkpointing:
        raise ConfigError("activation_checkpointing_offload requires activation_checkpointing")


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else repr(value)
