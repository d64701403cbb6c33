"""The keys of ms-swift beside TrainingArguments, by what they change.

Source: ms-swift 4.6.0 ``swift/arguments`` (sft, pt, rlhf) and ``swift/trainers/arguments.py``.
"""

from __future__ import annotations

from dataclasses import replace

from fsdptool.config.dialects.run_reader import Learned, RunKeys, names, sides
from fsdptool.config.dialects.trainer.run_keys import DEFAULTS, LEARNING, MEMORY, NO_EFFECT, NUMBERS, TIME

KEYS = RunKeys(
    program="ms-swift",
    version="4.6.0",
    defaults={
        **DEFAULTS,
        "tuner_type": ("lora", "swift/arguments/base_args/base_args.py:121"),
        "lora_rank": (8, "swift/arguments/tuner_args.py:130"),
        "lora_dropout": (0.05, "swift/arguments/tuner_args.py:135"),
        "target_modules": ("all-linear", "swift/arguments/tuner_args.py:126"),
        "per_device_train_batch_size": (1, "swift/trainers/arguments.py:130"),
        "gradient_checkpointing": (True, "swift/trainers/arguments.py:135"),
        "packing": (False, "swift/arguments/base_args/base_args.py"),
        "sequence_parallel_size": (1, "swift/arguments/base_args/template_args.py"),
        "max_completion_length": (512, "swift/arguments/rlhf_args.py"),
        "num_generations": (8, "swift/arguments/rlhf_args.py"),
        "quant_method": (None, "swift/arguments/base_args/quant_args.py:45: nothing is quantised"),
        "torch_dtype": (None, "swift/arguments/base_args/model_args.py: that of config.json"),
    },
    memory=MEMORY
    | sides(
        less="""
        padding_free freeze_parameters freeze_parameters_ratio freeze_parameters_regex freeze_llm
        lisa_activated_layers use_galore use_logits_to_keep galore_rank galore_target_modules
        llamapro_num_groups celoss_parallel_size offload_teacher_model gkd_logits_topk
        """,
        more="""
        use_dora modules_to_save target_parameters trainable_parameters trainable_parameters_regex
        reward_model ref_model teacher_model teacher_adapters new_special_tokens max_pixels use_vllm
        chord_sft_per_device_train_batch_size sync_ref_model
        vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_max_model_len
        llamapro_num_new_blocks
        """,
        either="""
        rope_scaling model_kwargs max_memory device_map init_strategy offload_model
        offload_optimizer sleep_level move_model_batches experts_impl external_plugins
        custom_register_path tuner_backend galore_quantization optimizer use_swift_lora
        adalora_* adapter_act adapter_length boft_* fourier_* reft_* vera_* use_ray device_groups
        """,
    ),
    time=TIME | names("vllm_mode acc_strategy use_flash_ckpt multi_turn_scheduler"),
    numbers=NUMBERS
    | names("""
    use_rslora lorap_lr_ratio router_aux_loss_coef enable_dft_loss enable_channel_loss loss_scale
    aligner_lr vit_lr init_weights
    """),
    no_effect=NO_EFFECT
    | names("""
    lora_rank lora_dropout lora_dtype target_modules target_regex bnb_4bit_use_double_quant
    bnb_4bit_quant_storage max_length
    model_type model_revision task_type use_hf hub_token dataset val_dataset cached_dataset
    cached_val_dataset split_dataset_ratio dataset_num_proc load_from_cache_file dataset_shuffle
    val_dataset_shuffle train_dataloader_shuffle streaming interleave_prob stopping_strategy
    shuffle_buffer_size download_mode columns strict disable_auto_column_mapping model_name
    model_author custom_dataset_info template system truncation_strategy agent_template norm_bbox
    use_chat_template padding_side is_binary_loss_scale template_backend response_prefix
    enable_thinking preserve_thinking add_non_thinking_prefix disable_ignore_empty_think lora_alpha
    lora_bias adapters load_args load_data_args packing_num_proc packing_strategy
    lazy_tokenize ignore_args_error add_version create_checkpoint_symlink swanlab_* warmup_ratio
    safe_serialization max_shard_size check_model eval_metric callbacks early_stop_interval
    resume_only_model max_epochs temperature top_p top_k repetition_penalty num_beams stream
    stop_words max_new_tokens structured_outputs_regex freeze_vit freeze_aligner
    bnb_4bit_compute_dtype bnb_4bit_quant_type hqq_axis ref_adapters reward_adapters reward_funcs
    reward_weights reward_model_plugin reward_model_type reward_template log_completions
    num_iterations beta label_smoothing rpo_alpha ld_alpha discopop_tau loss_type loss_weights
    cpo_alpha simpo_gamma desirable_weight undesirable_weight center_rewards_coefficient sft_alpha
    lmbda seq_kd vllm_server_* vllm_* lora_ga_* enable_npu_model_patch local_repo_path num_labels
    problem_type galore_* lisa_step_interval ENV env deepspeed_autotp_size zero_hpz_partition_size
    report_to async_generate dynamic_sample epsilon epsilon_high overlong_filter scale_rewards
    importance_sampling_level stop_words max_turns completion_length_limit_scope
    vit_gradient_checkpointing_kwargs advantage_estimator advantage_reweight chat_template_kwargs chord_*
    cliprange cliprange_value cosine_* decision_* delta ds3_gather_for_generation extra_eval_args fipo_*
    gamma gym_env use_gym_env kl_coef kl_in_reward lam local_rollout_forward_batch_size log_entropy
    log_rollout_offpolicy_metrics logprobs max_model_len max_resample_times missing_eos_penalty mrl_dims
    num_generations_eval num_mini_batches num_ppo_epochs num_sample_generations
    off_policy_sequence_mask_delta ray_exp_name real_tau ref_model_mixup_alpha ref_model_revision
    ref_model_sync_steps ref_model_type repetition_* response_length reward_model_revision rlsd_*
    rollout_importance_sampling_* sdar_* soft_cache_length soft_max_length tau_neg tau_pos
    teacher_deepspeed teacher_kl_coef teacher_model_revision teacher_model_server teacher_model_type
    generation_batch_size steps_per_generation generation_kwargs min_p mask_truncated_completions
    disable_dropout num_completions_to_print wandb_log_unique_prompts shuffle_dataset
    teacher_model_group top_entropy_quantile top_logprobs use_mopd vf_coef whiten_rewards
    """),
    unknown="refused",
    learning={
        **LEARNING,
        "learning_rate": Learned("learning_rate", lambda run: 1e-5 if run.method == "full" else 1e-4),
        "weight_decay": Learned("weight_decay", 0.1),
        "adam_beta2": Learned("adam_beta2", 0.95),
        "scheduler": Learned("lr_scheduler_type", "cosine"),
        "lora_alpha": Learned("lora_alpha", lambda run: 32 if run.lora_rank else None),
        "preference_beta": Learned("beta"),
        "completions": Learned("num_generations", lambda run: 8 if run.objective == "grpo" else None),
        "completion_length": Learned(
            "max_completion_length", lambda run: 512 if run.objective == "grpo" else None
        ),
        "dataset": Learned("dataset"),
    },
)

_RENAMED = {"tuner_type": "train_type", "use_liger_kernel": "use_liger"}
THIRD = replace(
    KEYS,
    version="3.x",
    no_effect=KEYS.no_effect
    | names("enable_cache multi_turn_func num_infer_workers dataset_shuffle_buffer_size"),
    earlier=_RENAMED,
)
"""What 3.x names otherwise, and the keys that 4 no longer has."""
_OF_2 = "ms-swift 2.x swift/llm/utils/argument.py: SftArguments"
SECOND = replace(
    KEYS,
    version="2.x",
    defaults={
        **KEYS.defaults,
        "max_length": (2048, _OF_2),
        "target_modules": ("DEFAULT", _OF_2),
        "num_train_epochs": (1, _OF_2),
        "optim": ("adamw_torch", _OF_2),
        "torch_dtype": (None, f"{_OF_2}: that of the model"),
    },
    no_effect=THIRD.no_effect
    | names("""
    template_type train_dataset_sample val_dataset_sample train_dataset_mix_* self_cognition_sample
    dataset_test_ratio dataset_seed check_dataset_strategy custom_train_dataset_path
    custom_val_dataset_path use_loss_scale push_hub_strategy only_save_model preprocess_num_proc
    test_oom_error check_model_is_latest add_output_dir_suffix lora_bias_trainable lora_lr_ratio
    neftune_backend model_cache_dir model_layer_cls_name predict_with_generate do_sample
    gpu_memory_fraction bnb_4bit_comp_dtype eval_batch_size lora_modules_to_save
    """),
    earlier={
        **_RENAMED,
        "tuner_type": "sft_type",
        "model": "model_id_or_path",
        "torch_dtype": "dtype",
        "per_device_train_batch_size": "batch_size",
        "quant_bits": "quantization_bit",
        "target_modules": "lora_target_modules",
        "lora_dropout": "lora_dropout_p",
        "deepspeed": "deepspeed_config_path",
    },
)

SHIPPED = {
    "fsdp_qlora/fsdp_offload.json": {"fsdp": 1, "reshard": True, "cpu_offload": True},
    "activation_cpu_offload/fsdp2.json": {
        "fsdp": 2, "reshard": True, "cpu_offload": False, "checkpoints": False, "offloads": True,
    },
    "fsdp2": {"fsdp": 2, "reshard": True, "cpu_offload": False, "checkpoints": True, "offloads": False},
}  # fmt: skip
"""What the sharding files say that ms-swift ships (its examples, and swift/config/fsdp2.json)."""
