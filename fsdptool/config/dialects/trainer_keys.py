"""The keys of TrainingArguments' ``fsdp_config`` (transformers 5.23), and what became of others."""

from fsdptool.config.facts import LAUNCH, MESH

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
XLA_KEYS = ("xla", "xla_fsdp_v2", "xla_fsdp_grad_ckpt", "xla_fsdp_settings")
ELSEWHERE = {
    "offload_params": "cpu_offload",
    "offload": "cpu_offload",
    "transformer_cls_names_to_wrap": "transformer_layer_cls_to_wrap",
    "transformer_cls_to_wrap": "transformer_layer_cls_to_wrap",
    "fsdp_version": "version",
}
"""Other programs' words for keys read here."""

ARGUMENTS = frozenset(
    [
        "output_dir",
        "per_device_train_batch_size",
        "num_train_epochs",
        "learning_rate",
        "gradient_accumulation_steps",
        "lr_scheduler_type",
        "save_strategy",
        "logging_steps",
        "report_to",
        "bf16",
        "fp16",
        "gradient_checkpointing",
        "max_steps",
        "save_only_model",
        "deepspeed",
        "optim",
        "activation_checkpointing",
    ]
)
CANNOT = ("activation_checkpointing_offload", "ignored_modules", *MESH, "cp_comm_strategy", *LAUNCH)
