"""The keys of transformers' TrainingArguments, which Trainer, TRL, LLaMA-Factory and ms-swift share.

Source: transformers 5.24.0 ``training_args.py`` (fields, defaults), and the fields of 4.x that files still
hold.
"""

from __future__ import annotations

from collections.abc import Mapping

from fsdptool.config.dialects.run_reader import Learned, RunKeys, names, sides

DEFAULTS = {
    "per_device_train_batch_size": (8, "transformers training_args.py:777"),
    "gradient_accumulation_steps": (1, "transformers training_args.py:849"),
    "optim": ("adamw_torch_fused", "transformers training_args.py:806 (with torch 2.8 and newer)"),
    "gradient_checkpointing": (False, "transformers training_args.py:1544"),
    "num_train_epochs": (3.0, "transformers training_args.py"),
    "max_steps": (-1, "transformers training_args.py"),
    "bf16": (False, "transformers training_args.py:874"),
    "fp16": (False, "transformers training_args.py:880"),
    "torch_compile": (False, "transformers training_args.py"),
    "use_liger_kernel": (False, "transformers training_args.py"),
}

LEARNING: Mapping[str, Learned] = {
    "learning_rate": Learned("learning_rate", 5e-5),
    "weight_decay": Learned("weight_decay", 0.0),
    "adam_beta1": Learned("adam_beta1", 0.9),
    "adam_beta2": Learned("adam_beta2", 0.999),
    "adam_epsilon": Learned("adam_epsilon", 1e-8),
    "max_grad_norm": Learned("max_grad_norm", 1.0),
    "scheduler": Learned("lr_scheduler_type", "linear"),
    "warmup_steps": Learned("warmup_steps", 0),
    "warmup_ratio": Learned("warmup_ratio"),
    "seed": Learned("seed", 42),
    "neftune_noise_alpha": Learned("neftune_noise_alpha"),
    "output": Learned("output_dir"),
}
"""What TrainingArguments say of the learning (transformers 5.24 ``training_args.py``)."""

MEMORY = sides(
    less="optim_target_modules liger_kernel_config",
    more="batch_eval_metrics",
    either="""
    deepspeed parallelism_config auto_find_batch_size accelerator_config optim_args sharded_ddp use_cpu
""",
)
TIME = names("""
    torch_compile_backend torch_compile_mode torch_empty_cache_steps ddp_bucket_cap_mb ddp_static_graph
    dataloader_num_workers dataloader_prefetch_factor dataloader_persistent_workers
    dataloader_pin_memory ddp_backend full_determinism
""")
NUMBERS = frozenset(["neftune_noise_alpha", "label_smoothing_factor"])
NO_EFFECT = names("""
    output_dir learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps warmup_ratio
    weight_decay adam_beta1 adam_beta2 adam_epsilon average_tokens_across_devices max_grad_norm
    bf16_full_eval fp16_full_eval tf32 activation_checkpointing_kwargs gradient_checkpointing_kwargs
    use_cache logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter
    include_num_input_tokens_seen log_level log_level_replica disable_tqdm report_to run_name project
    trackio_* eval_* evaluation_strategy per_device_eval_batch_size prediction_loss_only
    include_for_metrics include_inputs_for_metrics save_* enable_jit_checkpoint push_to_hub* hub_*
    load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip
    restore_callback_states_from_checkpoint seed data_seed dataloader_drop_last
    dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names
    train_sampling_strategy group_by_length length_column_name ddp_find_unused_parameters
    ddp_broadcast_buffers ddp_timeout debug skip_memory_metrics do_train do_eval do_predict
    resume_from_checkpoint local_rank overwrite_output_dir logging_dir wandb_* no_cuda use_mps_device
    past_index torchdynamo ray_scope jit_mode_eval use_ipex tpu_* half_precision_backend fp16_opt_level
    fp16_backend split_batches dispatch_batches use_legacy_prediction_loop mp_parameters
    per_gpu_train_batch_size include_tokens_per_second torch_compile_options fsdp_config.state_dict_type
    fsdp_config.auto_wrap_policy fsdp_config.cpu_ram_efficient_loading fsdp_config.sync_module_states
    fsdp_config.use_orig_params fsdp_config.backward_prefetch fsdp_config.forward_prefetch
    fsdp_config.limit_all_gathers fsdp_config.fsdp_state_dict_type fsdp_config.fsdp_auto_wrap_policy
    fsdp_config.fsdp_sync_module_states fsdp_config.fsdp_use_orig_params
    fsdp_config.fsdp_cpu_ram_efficient_loading fsdp_config.fsdp_backward_prefetch
    fsdp_config.fsdp_forward_prefetch fsdp_config.min_num_params fsdp_min_num_params
""")

KEYS = RunKeys(
    program="trainer",
    version="5.24.0",
    defaults=DEFAULTS,
    memory=MEMORY,
    time=TIME,
    numbers=NUMBERS,
    no_effect=NO_EFFECT
    | names("""
    dataset_name dataset_config_name train_file validation_file validation_split_percentage
    max_train_samples max_eval_samples max_predict_samples tokenizer_name config_name
    cache_dir use_fast_tokenizer model_revision token
    trust_remote_code streaming overwrite_cache preprocessing_num_workers keep_linebreaks data_path
    eval_data_path train_dataset eval_dataset lazy_preprocess low_cpu_mem_usage use_auth_token
"""),
    unknown="script",
    learning={**LEARNING, "dataset": Learned("dataset_name")},
)
OLD = "4.x"
"""Version of transformers to judge for where a file holds words that 5.x no longer has."""
