"""The keys of axolotl's FSDP settings."""

from __future__ import annotations

from fsdptool.config.facts import LAUNCH

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
    "sharding_strategy",
    "backward_prefetch",
    "backward_prefetch_policy",
    "forward_prefetch",
    "use_orig_params",
    "sync_module_states",
    "limit_all_gathers",
)
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
CANNOT = ("activation_checkpointing_offload", "ignored_modules", "cp_comm_strategy", "sp", *LAUNCH)
