"""axolotl's YAML: the keys of its FSDP settings."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fsdptool.config.canonical import (
    ACCELERATE_ONLY,
    LAUNCH,
    MESH,
    WRITTEN,
    check_expressible,
    values_written,
)
from fsdptool.config.dialects.protocol import Dialect
from fsdptool.config.edits import block_lines
from fsdptool.errors import ConfigError
from fsdptool.records.mesh import ParallelDims

if TYPE_CHECKING:
    from fsdptool.config.context import LintContext
    from fsdptool.config.fsdp1 import Rewriter, Target
    from fsdptool.files.tree import Node
    from fsdptool.records.sharding import FsdpSettings


NAME = "axolotl"

KEYS = {
    "reshard_after_forward": "reshard_after_forward",
    "auto_wrap_policy": "wrap_policy",
    "transformer_layer_cls_to_wrap": "wrap_classes",
    "min_num_params": "min_num_params",
    "state_dict_type": "state_dict_type",
    "offload_params": "cpu_offload",
    "cpu_ram_efficient_loading": "cpu_ram_efficient_loading",
    "activation_checkpointing": "activation_checkpointing",
}
OTHER = frozenset(
    {"cpu_offload_pin_memory", "final_state_dict_type", "mixed_precision_policy", "version", "fsdp_version"}
)
FSDP1_KEYS = (
    "sharding_strategy", "backward_prefetch", "backward_prefetch_policy", "forward_prefetch",
    "use_orig_params", "sync_module_states", "limit_all_gathers",
)  # fmt: skip
CHOICES = {
    "wrap_policy": {"TRANSFORMER_BASED_WRAP": "transformer", "SIZE_BASED_WRAP": "size"},
    "state_dict_type": {
        "FULL_STATE_DICT": "full",
        "SHARDED_STATE_DICT": "sharded",
        "LOCAL_STATE_DICT": "local",
    },
}
"""The texts that axolotl's schema accepts, with what they mean; the first is its default."""

SIZES = {
    "dp_replicate_size": "dp_replicate",
    "dp_shard_size": "dp_shard",
    "tensor_parallel_size": "tp",
    "context_parallel_size": "cp",
}
CANNOT = (
    *ACCELERATE_ONLY, "cp_comm_strategy", *(name for name in MESH if name not in SIZES.values()), *LAUNCH,
)  # fmt: skip


class Axolotl(Dialect):
    """axolotl's YAML."""

    name = "axolotl"
    consumers = ("axolotl",)
    cannot = CANNOT

    def matches(self, root: Node) -> float:
        """Return how surely the mapping is axolotl's."""
        keys = {str(entry.key) for entry in root.entries}
        if "base_model" in keys and keys & {
            "datasets",
            "micro_batch_size",
            "sequence_len",
            "adapter",
            "fsdp_config",
            "output_dir",
            "fsdp_version",
            "chat_template",
        }:
            return 1.0
        if {"fsdp_version", "fsdp_config"} <= keys and "fsdp" not in keys:
            return 0.96
        own = keys & {
            "sequence_len",
            "sample_packing",
            "micro_batch_size",
            "dp_shard_size",
            "tensor_parallel_size",
        }
        return 0.95 if len(own) >= 2 or (own and "fsdp_config" in keys) else 0.0

    def read(self, lint: LintContext) -> None:
        """Read the keys into facts."""
        from fsdptool.config.dialects.axolotl.reader import read

        read(lint)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return the FSDP part of an axolotl file.

        Raises:
            ConfigError: axolotl cannot express a setting.
        """
        check_expressible(settings, NAME, CANNOT)
        if settings.wrap_policy == "none":
            raise ConfigError("axolotl cannot express wrap_policy = 'none'", help="wrap by class")
        mesh = settings.mesh
        if mesh.dp_shard == 1:
            raise ConfigError("axolotl cannot express dp_shard = 1", help="leave dp_shard open")
        top: dict[str, Any] = {"fsdp_version": 2}
        for key, name in SIZES.items():
            if getattr(mesh, name) != getattr(ParallelDims(), name):
                top[key] = getattr(mesh, name)
        top["fsdp_config"] = values_written(settings, KEYS)
        top["bf16"] = settings.mixed_precision == "bf16"
        top["fp16"] = settings.mixed_precision == "fp16"
        if settings.mixed_precision == "fp8":
            top["fp8"] = True
        return "\n".join([*(f"# {line}" if line else "#" for line in header), *block_lines(top)]) + "\n"

    def migrate(self, steps: Rewriter, lint: LintContext, target: Target) -> dict[str, Any]:
        """Turn FSDP1 settings into FSDP2, in place; return what else changes."""
        block = "fsdp_config"
        entry = steps.root.get(block)
        if entry is None or entry.node.kind != "map":
            values_ = {"reshard_after_forward": target.reshard}
            edits = (
                steps.editor.add(entry.node, entry, values_)
                if entry is not None
                else steps.editor.add(steps.root, None, {block: values_})
            )
            steps.apply(edits, block)
        for key in (*KEYS, *FSDP1_KEYS):
            parent, _ = steps.block(block)
            if parent.get(key) is not None:
                steps.drop(block, f"fsdp_{key}")
            steps.rename(block, f"fsdp_{key}", key)
        steps.put(block, "reshard_after_forward", target.reshard, synonyms=("sharding_strategy",))
        steps.put(block, "state_dict_type", WRITTEN["state_dict_type"][target.state_dict])
        steps.drop(block, *FSDP1_KEYS, "fsdp_version", "version")
        steps.drop(None, "fsdp")
        for name, size in target.mesh.items():
            steps.put(None, f"{name}_size", size)
        steps.put(None, "fsdp_version", 2)
        if lint.load_in_4bit and lint.get("cpu_ram_efficient_loading"):
            # axolotl 0.19 refuses the pair under FSDP2: the quantised load on rank 0 deadlocks the scatter.
            steps.put(block, "cpu_ram_efficient_loading", False)
            return {"cpu_ram_efficient_loading": False}
        return {}
