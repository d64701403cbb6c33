"""The keys of SimpleTuner's flags."""

from __future__ import annotations

from typing import Any

from fsdptool import spelling
from fsdptool.config.facts import LAUNCH

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
CANNOT = (
    "activation_checkpointing_offload",
    "ignored_modules",
    "tp",
    "sp",
    "min_num_params",
    *(name for name in LAUNCH if name != "num_processes"),
)

_TABLES = {
    "state_dict_type": spelling.STATE_DICT_TYPES,
    "wrap_policy": spelling.WRAP_POLICIES,
    "cp_comm_strategy": spelling.ROTATIONS,
    "mixed_precision": spelling.PRECISIONS,
}


_TEXTS = ("main_process_ip", "gpu_ids", "rdzv_backend", "ignored_modules")
