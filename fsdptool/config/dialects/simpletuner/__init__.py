"""SimpleTuner's ``config.json``: the keys of its flags."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from fsdptool import spelling
from fsdptool.config.canonical import (
    ACCELERATE_ONLY,
    LAUNCH,
    MESH,
    WRITTEN,
    check_expressible,
    values_written,
)
from fsdptool.config.dialects.protocol import Dialect
from fsdptool.errors import ConfigError

if TYPE_CHECKING:
    from fsdptool.config.context import LintContext
    from fsdptool.config.fsdp1 import Rewriter, Target
    from fsdptool.files.text import SourceText
    from fsdptool.files.tree import Document, Node
    from fsdptool.records.sharding import FsdpSettings


NAME = "simpletuner"

KEYS = {
    "fsdp_enable": "enable",
    "fsdp_version": "fsdp_version",
    "fsdp_reshard_after_forward": "reshard_after_forward",
    "fsdp_state_dict_type": "state_dict_type",
    "fsdp_cpu_ram_efficient_loading": "cpu_ram_efficient_loading",
    "fsdp_cpu_offload": "cpu_offload",
    "fsdp_activation_checkpointing": "activation_checkpointing",
    "fsdp_limit_all_gathers": "limit_all_gathers",
    "fsdp_auto_wrap_policy": "wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap": "wrap_classes",
    "context_parallel_size": "cp",
    "context_parallel_comm_strategy": "cp_comm_strategy",
    "num_processes": "num_processes",
    "num_machines": "num_machines",
    "mixed_precision": "mixed_precision",
}
OWN_FLAGS = frozenset([
    "fsdp_enable", "context_parallel_size", "context_parallel_comm_strategy", "fsdp_cpu_offload",
    "model_family",
])  # fmt: skip
"""Flags that no other program has."""
DEFAULTS: dict[str, Any] = {
    "fsdp_version": 2,
    "reshard_after_forward": True,
    "state_dict_type": "sharded",
    "cpu_ram_efficient_loading": False,
    "cpu_offload": False,
    "activation_checkpointing": False,
    "wrap_policy": "transformer",
    "wrap_classes": (),
    "cp": 1,
    "cp_comm_strategy": "allgather",
    "num_processes": None,
    "num_machines": 1,
    "mixed_precision": "bf16",
}
WITHOUT = tuple(name for name in MESH if name not in ("dp_replicate", "dp_shard", "cp"))
"""Dimensions that SimpleTuner does not have."""
CANNOT = (
    *ACCELERATE_ONLY, "dp_replicate", *WITHOUT, "min_num_params",
    *(name for name in LAUNCH if name != "num_processes"),
)  # fmt: skip

SPELLINGS = {
    "state_dict_type": spelling.STATE_DICT_TYPES,
    "wrap_policy": spelling.WRAP_POLICIES,
    "cp_comm_strategy": spelling.ROTATIONS,
    "mixed_precision": spelling.PRECISIONS,
}
"""Settings with choices, and what people write for each."""


def mapping(settings: FsdpSettings) -> dict[str, Any]:
    """Return the settings as SimpleTuner's flags.

    Raises:
        ConfigError: SimpleTuner has no flag for a setting.
    """
    check_expressible(settings, NAME, CANNOT)
    mesh = settings.mesh
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
    written = {key: name for key, name in KEYS.items() if name != "num_machines"}
    return {"fsdp_enable": True, **values_written(settings, written)}


class SimpleTuner(Dialect):
    """SimpleTuner's ``config.json``."""

    name = "simpletuner"
    consumers = ("simpletuner",)
    cannot = CANNOT

    def parse(self, source: SourceText) -> Document | None:
        """Read JSON whatever the file is called."""
        from fsdptool.files.json_tree import parse_json_source

        return parse_json_source(source) if source.text.lstrip()[:1] == "{" else None

    def matches(self, root: Node) -> float:
        """Return how surely the mapping is SimpleTuner's."""
        keys = {str(entry.key).lstrip("-").replace("-", "_").lower() for entry in root.entries}
        own = {"model_flavour", "data_backend_config", "model_type", "lora_rank"}
        if "model_family" in keys and keys & own:
            return 1.0
        return 0.95 if keys & {"fsdp_enable", "context_parallel_comm_strategy"} else 0.0

    def read(self, lint: LintContext) -> None:
        """Read the keys into facts."""
        from fsdptool.config.dialects.simpletuner.reader import read

        read(lint)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return the FSDP part of SimpleTuner's ``config.json``.

        Raises:
            ConfigError: As :func:`mapping`.
        """
        return json.dumps(mapping(settings), indent=2) + "\n"

    def migrate(self, steps: Rewriter, lint: LintContext, target: Target) -> dict[str, Any]:
        """Write version 2 and what version 1 meant."""
        for key, value in (
            ("fsdp_version", 2),
            ("fsdp_reshard_after_forward", target.reshard),
            ("fsdp_state_dict_type", WRITTEN["state_dict_type"][target.state_dict]),
        ):
            dashed = f"--{key}" if steps.root.get(f"--{key}") is not None else key
            steps.put(None, dashed, value)
        return {}
