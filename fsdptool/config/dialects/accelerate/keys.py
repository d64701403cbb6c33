"""The keys of accelerate 1.15's files: what each sets, and what became of others."""

from __future__ import annotations

from fsdptool.config.canonical import LEGACY_DEFAULTS

TOP_LEVEL = frozenset([
    "compute_environment", "distributed_type", "mixed_precision", "use_cpu", "debug", "num_processes",
    "machine_rank", "num_machines", "gpu_ids", "main_process_ip", "main_process_port", "rdzv_backend",
    "same_network", "main_training_function", "enable_cpu_affinity", "fp8_config", "deepspeed_config",
    "fsdp_config", "parallelism_config", "megatron_lm_config", "mpirun_config", "downcast_bf16", "tpu_name",
    "tpu_zone", "tpu_use_cluster", "tpu_use_sudo", "command_file", "commands", "tpu_vm", "tpu_env",
    "dynamo_config",
])  # fmt: skip
WHOLE_NUMBERS = ("num_processes", "num_machines", "machine_rank", "main_process_port")
CONVERTED = frozenset({"fp16", "dynamo_backend"})
"""Old top-level keys the loader still converts."""

INERT = {
    "rdzv_backend": "static",
    "same_network": False,
    "enable_cpu_affinity": False,
    "downcast_bf16": False,
    "main_training_function": "main",
}
"""Keys whose value in the file never takes effect, with a value that is harmless."""

FSDP_KEYS = {
    "fsdp_version": "fsdp_version",
    "fsdp_reshard_after_forward": "reshard_after_forward",
    "fsdp_auto_wrap_policy": "wrap_policy",
    "fsdp_transformer_layer_cls_to_wrap": "wrap_classes",
    "fsdp_min_num_params": "min_num_params",
    "fsdp_state_dict_type": "state_dict_type",
    "fsdp_offload_params": "cpu_offload",
    "fsdp_cpu_ram_efficient_loading": "cpu_ram_efficient_loading",
    "fsdp_activation_checkpointing": "activation_checkpointing",
    "fsdp_activation_checkpointing_offload": "activation_checkpointing_offload",
    "fsdp_ignored_modules": "ignored_modules",
    **{f"fsdp_{name}": name for name in LEGACY_DEFAULTS},
}
PARALLELISM_KEYS = {
    "parallelism_config_dp_replicate_size": "dp_replicate",
    "parallelism_config_dp_shard_size": "dp_shard",
    "parallelism_config_tp_size": "tp",
    "parallelism_config_cp_size": "cp",
    "parallelism_config_cp_comm_strategy": "cp_comm_strategy",
    "parallelism_config_sp_size": "sp",
}
DETAILS = {
    "parallelism_config_cp_backend": "cp_backend",
    "parallelism_config_sp_backend": "sp_backend",
    "parallelism_config_sp_seq_length": "sp_seq_length",
    "parallelism_config_sp_seq_length_is_variable": "sp_seq_length_is_variable",
    "parallelism_config_sp_attn_implementation": "sp_attn_implementation",
}
"""What else accelerate 1.15's launcher passes on to ``ParallelismConfig``."""
DEAD = {
    "fsdp_backward_prefetch_policy": None,
    "fsdp_limit_all_gathers": None,
    "fsdp_flatten_parameters": None,
    "fsdp": None,
    "fsdp_transformer_cls_names_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_transformer_cls_to_wrap": "fsdp_transformer_layer_cls_to_wrap",
    "fsdp_cpu_offload": "fsdp_offload_params",
    "fsdp_offload": "fsdp_offload_params",
    "fsdp_cpu_offload_usage": None,
    "fsdp_activation_cpu_offload": "fsdp_activation_checkpointing_offload",
    "fsdp_mixed_precision": None,
    "fsdp_mixed_precision_policy": None,
}
"""Keys that look right and are not read, with the one that was meant."""

_POLICY = (
    "accelerate's files have one dtype, mixed_precision; a policy exists only in Python:"
    " FullyShardedDataParallelPlugin(mixed_precision_policy=...)"
)
IN_PYTHON = {
    "fsdp_mixed_precision": _POLICY,
    "fsdp_mixed_precision_policy": _POLICY,
}
"""What to do instead, for keys whose setting no file can express."""

LEGACY_KEYS = tuple(f"fsdp_{name}" for name in LEGACY_DEFAULTS)
"""Keys of FSDP1 that FSDP2 has no use for."""

NAMES = {canonical: key for key, canonical in (*FSDP_KEYS.items(), *PARALLELISM_KEYS.items())}
