"""TrainingArguments (transformers 5.23) and the file that their ``fsdp_config`` names: the keys."""

from __future__ import annotations

import json
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
from fsdptool.errors import ConfigError
from fsdptool.files.tree import to_python

if TYPE_CHECKING:
    from fsdptool.config.context import LintContext
    from fsdptool.config.fsdp1 import Rewriter, Target
    from fsdptool.files.tree import Node
    from fsdptool.records.sharding import FsdpSettings


NAME = "trainer"

KEYS = {
    "version": "fsdp_version",
    "reshard_after_forward": "reshard_after_forward",
    "auto_wrap_policy": "wrap_policy",
    "transformer_layer_cls_to_wrap": "wrap_classes",
    "min_num_params": "min_num_params",
    "state_dict_type": "state_dict_type",
    "cpu_offload": "cpu_offload",
    "cpu_ram_efficient_loading": "cpu_ram_efficient_loading",
    "activation_checkpointing": "activation_checkpointing",
}
FSDP1_KEYS = (
    "forward_prefetch",
    "backward_prefetch",
    "use_orig_params",
    "sync_module_states",
    "limit_all_gathers",
)
_COMMON_WORDS = frozenset({"version", "offload"})
XLA_KEYS = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")
ELSEWHERE = {
    "offload_params": "cpu_offload",
    "offload": "cpu_offload",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    "transformer_cls_to_wrap": "transformer_layer_cls_to_wrap",
    "fsdp_version": "version",
}
"""Other programs' words for keys read here."""

ARGUMENTS = frozenset([
    "output_dir", "per_device_train_batch_size", "num_train_epochs", "learning_rate",
    "gradient_accumulation_steps", "lr_scheduler_type", "save_strategy", "logging_steps", "report_to",
    "bf16", "fp16", "gradient_checkpointing", "max_steps", "save_only_model", "deepspeed", "optim",
    "activation_checkpointing",
])  # fmt: skip
CANNOT = (*ACCELERATE_ONLY, *MESH, "cp_comm_strategy", *LAUNCH)


def mapping(settings: FsdpSettings, name: str = NAME, cannot: tuple[str, ...] = CANNOT) -> dict[str, Any]:
    """Return ``fsdp``, precision and ``fsdp_config`` as TrainingArguments hold them.

    Args:
        settings: What is to be written.
        name: Name of the dialect, for the message.
        cannot: Canonical settings that the dialect cannot express.

    Raises:
        ConfigError: The dialect cannot express a setting.
    """
    check_expressible(settings, name, cannot)
    config = values_written(settings, KEYS)
    if settings.wrap_classes:
        config["transformer_layer_cls_to_wrap"] = list(settings.wrap_classes)
    precision = settings.mixed_precision
    if precision == "fp8":
        raise ConfigError(f"{name} cannot express mixed_precision = 'fp8'", help="write accelerate instead")
    return {"fsdp": True, "bf16": precision == "bf16", "fp16": precision == "fp16", "fsdp_config": config}


class Trainer(Dialect):
    """transformers' TrainingArguments, or the file that their ``fsdp_config`` names."""

    name = "trainer"
    consumers: tuple[str, ...] = ("trainer", "llamafactory")
    cannot: tuple[str, ...] = CANNOT

    def matches(self, root: Node) -> float:
        """Return how surely the mapping is TrainingArguments' or their ``fsdp_config``."""
        keys = {str(entry.key) for entry in root.entries}
        switch = root.get("fsdp")
        if switch is not None and switch.node.kind == "map":
            return 0.0
        if keys & {"fsdp", "fsdp_config"} and not keys & {"base_model", "stage", "model_family"}:
            alone = {key for key in keys if not key.startswith("_")} <= {"fsdp", "fsdp_config"}
            return 0.95 if alone or keys & ARGUMENTS else 0.5
        bare = {key.removeprefix("fsdp_") for key in keys}
        known = bare & (set(KEYS) | set(FSDP1_KEYS) | set(ELSEWHERE) | {"sharding_strategy"} | set(XLA_KEYS))
        if not known - _COMMON_WORDS and known != bare:  # files of all kinds have a version
            return 0.0
        if len(known) * 2 >= len(bare - {"xla_fsdp_settings"}):
            return 0.85
        return 0.3 if len(keys) < 12 else 0.0

    def read(self, lint: LintContext) -> None:
        """Read the keys into facts."""
        from fsdptool.config.dialects.trainer.reader import read

        read(lint)

    def write(self, settings: FsdpSettings, header: tuple[str, ...] = ()) -> str:
        """Return TrainingArguments as JSON (``HfArgumentParser.parse_json_file`` reads them).

        Raises:
            ConfigError: As :func:`mapping`.
        """
        return json.dumps(mapping(settings), indent=2) + "\n"

    def migrate(self, steps: Rewriter, lint: LintContext, target: Target) -> dict[str, Any]:
        """Turn FSDP1 settings into FSDP2, in place."""
        block = None if lint.root.get("fsdp_config") is None else "fsdp_config"
        if lint.fsdp_entry is not None and block is None:
            steps.apply(steps.editor.add(steps.root, None, {"fsdp_config": {"version": 2}}), "fsdp_config")
            block = "fsdp_config"
        for key in (*KEYS, "sharding_strategy", *FSDP1_KEYS):
            parent, _ = steps.block(block)
            if parent.kind == "map" and parent.get(f"fsdp_{key}") is not None:
                steps.drop(block, key)
        steps.drop(
            block,
            *FSDP1_KEYS,
            "sharding_strategy",
            *(f"fsdp_{key}" for key in (*FSDP1_KEYS, "sharding_strategy")),
        )
        steps.put(block, "reshard_after_forward", target.reshard, synonyms=("fsdp_reshard_after_forward",))
        steps.put(
            block,
            "state_dict_type",
            WRITTEN["state_dict_type"][target.state_dict],
            synonyms=("fsdp_state_dict_type",),
        )
        steps.put(block, "version", 2, synonyms=("fsdp_version",))
        switch = steps.root.get("fsdp") if block is not None else None
        if switch is not None and to_python(switch.node) is not True:
            value = to_python(switch.node)
            offload = "offload" in (value if isinstance(value, list) else str(value).split())
            if (offload and lint.facts["cpu_offload"].entry is switch) or lint.get("cpu_offload"):
                steps.put(block, "cpu_offload", True, synonyms=("fsdp_cpu_offload",))
            switch = steps.root.get("fsdp")
            assert switch is not None
            steps.apply(steps.editor.replace_entry(switch, True), "fsdp")
        return {}
