"""The keys of axolotl's files, by what they change, with the defaults of those that decide a run.

Source: axolotl 0.19.0 (src/axolotl).
"""

from __future__ import annotations

from fsdptool.config.dialects.run_reader import Learned, RunKeys, names, sides

_LESS = """
    dpo_padding_free dpo_use_liger_kernel dpo_use_logits_to_keep flash_attn_cross_entropy
    flash_attn_fuse_mlp fp8_enable_fsdp_float8_all_gather freeze_mm_modules fused_attn_kernel gptq
    layer_offloading liger_cross_entropy liger_glu_activation liger_layer_norm liger_rms_norm
    liger_rms_norm_gated liger_rope liger_swiglu lisa_n_layers lora_embedding_kernel lora_mlp_kernel
    lora_o_kernel lora_on_cpu lora_qkv_kernel nonexpert_quantization optim_target_modules
    peft_layers_to_transform ple_cpu_offload quantize_moe_experts spectrum_top_fraction tiled_mlp
    unfrozen_parameters use_onebitllms
"""
_MORE = """
    trl.use_vllm do_causal_lm_eval ebft fp32_norms generate_samples gkd_teacher kd_trainer llmcompressor
    lora_target_parameters peft_ensure_weight_tying peft_layer_replication
    peft_trainable_token_indices peft_use_dora processor_type qat resize_token_embeddings_to_32x
    reward_num_workers tokens
"""
_EITHER = """
    accelerator_config auto_find_batch_size batch_flattening bnb_config_kwargs deepcompile deepspeed
    device_map diffusion expert_backend experts_implementation flash_attn_d512 flex_attn_compile_kwargs
    gemma4_fp8_nonexpert gemma4_nf4_nonexpert moe_bnb_fast moe_dequant_chunk_size
    gemma4_hybrid_attn_impl gpu_memory_limit heads_k_stride image_size large_head_attention
    lora_rank_pattern max_memory model_quantization_config mora multipack_real_batches
    overrides_of_model_config overrides_of_model_kwargs quantization relora rl_adapter_ref_model
    s2_attention sdpa_varlen use_mora use_scattermoe use_sonicmoe vllm
"""
_TIME = """
    dataloader_num_workers dataloader_prefetch_factor ddp_bucket_cap_mb dense_mixer flash_optimum
    gc_collect_steps gc_steps qlora_sharded_model_loading ring_attn_func torch_compile_backend
    torch_compile_mode torch_compile_options torch_empty_cache_steps
"""
_NUMBERS = """
    curriculum_sampling embeddings_skip_upcast grokfast_alpha grokfast_lamb group_by_length
    loftq_config lora_alpha_pattern loraplus_lr_embedding loraplus_lr_ratio neftune_noise_alpha
    noisy_embedding_alpha peft peft.* peft_init_lora_weights peft_use_rslora reinit_weights rope_scaling
    scaling_softmax scaling_softmax_bias scaling_softmax_factor use_eaft use_pose
"""
_NO_EFFECT = """
    batch_size
    lora_r lora_target_linear lora_target_modules lora_modules_to_save bf16 bfloat16 float16 float32
    kd_* gkd_* ebft_* launcher machine_rank main_process_* master_* nnodes node_rank nproc_per_node
    num_machines num_processes rdzv_* mora_type nvfp4_merge_aware_start_step
    trl trl.* nemo_gym_* hatchery gptq_groupsize gptq_model_v1 nvfp4_merge_aware use_dsv4_kernels
    dsv4_* use_glm_dsa_kernels expert_parallel_* model_config torch_dtype
    experimental_skip_move_to_device fp16 debug adam_beta1 adam_beta2 adam_beta3
    adam_epsilon adam_epsilon2 added_tokens_overrides additional_special_tokens
    auto_resume_from_checkpoints axolotl_config_path base_model_config bench_dataset bench_split
    bos_token capabilities center_rewards_coefficient chat_template chat_template_jinja
    chat_template_kwargs chunked_cross_entropy_num_chunks cls_model_config comet_* comet_api_key
    comet_experiment_config comet_experiment_key comet_mode comet_online comet_project_name
    comet_workspace cosine_constant_lr_ratio cosine_min_lr_ratio cpo_alpha dataloader_drop_last
    dataloader_pin_memory dataset_exact_deduplication dataset_keep_in_memory dataset_num_proc
    dataset_prepared_path dataset_processes dataset_shard_idx dataset_shard_num datasets ddp
    ddp_broadcast_buffers ddp_find_unused_parameters ddp_timeout default_system_message device
    dion_lr dion_momentum dion_rank_fraction dion_rank_multiple_of do_bench_eval dpo_beta
    dpo_generate_during_eval dpo_label_smoothing dpo_loss_type dpo_loss_weights dpo_norm_loss
    dpo_use_weighting dynamic_checkpoint eaft_alpha eaft_k early_stopping_patience embedding_lr
    embedding_lr_scale env_capabilities eos_token eot_tokens eval_batch_size eval_causal_lm_metrics
    eval_max_new_tokens eval_sample_packing eval_sequence_len eval_steps eval_strategy
    eval_table_size evals_per_epoch evaluation_strategy excess_length_strategy
    expert_parallel_backend fix_untrained_tokens flash_attn_rms_norm fp32_norm_classes fp8_config
    fsdp_final_state_dict_type generation_do_sample generation_max_new_tokens
    generation_prompt_ratio generation_temperature generation_top_k generation_top_p
    gradient_checkpointing_kwargs gradio_max_new_tokens gradio_server_name gradio_server_port
    gradio_share gradio_temperature gradio_title greater_is_better hf_mlflow_log_artifacts
    hf_use_auth_token hub_model_id hub_private_repo hub_revision hub_strategy image_resize_algorithm
    include_tkps include_tokens_per_second is_falcon_derived_model is_llama_derived_model
    is_mistral_derived_model is_preprocess is_qwen_derived_model jagged_restart_anneal_steps
    jagged_restart_steps jagged_restart_warmup_steps kto_desirable_weight kto_undesirable_weight
    learning_rate liger_kernel_impl liger_use_token_scaling lisa_layers_attribute lisa_step_interval
    llama4_linearized_experts lm_eval_* load_best_model_at_end local_rank logging_steps
    fsdp_version lora_dropout peft_autocast_adapter_dtype
    lora_fan_in_fan_out lora_model_dir loss_watchdog_patience loss_watchdog_threshold
    low_cpu_mem_usage lr_div_factor lr_groups lr_quadratic_warmup lr_scheduler lr_scheduler_kwargs
    max_grad_norm max_packed_sequence_len max_prompt_len mean_resizing_embeddings merge_lora
    merge_method metric_for_best_model min_sample_len mlflow_* mlflow_experiment_name
    mlflow_run_name mlflow_tracking_uri model_config_type model_quantization_config_kwargs
    model_type moe_grouped_backend num_dataset_shards_to_save num_generation_samples num_labels
    offload optim_args orpo_alpha otel_metrics_host otel_metrics_port output_dir pad_to_multiple_of
    pad_token peft_layers_pattern pose_max_context_len pose_num_chunks pose_split_on_token_ids
    precompute_ref_log_probs preprocess_iterable pretrain_multipack_attn
    pretrain_multipack_buffer_size pretraining_sample_concatenation processor_kwargs profiler_steps
    profiler_steps_start push_dataset_to_hub qgalore_cos_threshold qgalore_gamma_proj
    qgalore_proj_bits qgalore_proj_group_size qgalore_proj_quant qgalore_proj_type
    qgalore_queue_size qgalore_rank qgalore_scale qgalore_update_proj_gap ray_num_workers
    ray_run_name recompute_layer_types relora_cpu_offload relora_prune_method relora_prune_ratio
    remove_unused_columns resources_per_worker resume_from_checkpoint revision_of_model rl_beta
    role_boundaries rpo_alpha sample_packing_bin_size sample_packing_eff_est
    sample_packing_group_size sample_packing_mp_start_method sample_packing_sequentially save
    save_first_step save_only_model save_safetensors save_sliding_window save_steps save_strategy
    save_total_limit saves_per_epoch seed selective_checkpointing_kwargs shrink_embeddings
    shuffle_before_merging_datasets shuffle_merged_datasets simpo_gamma skip_prepare_dataset
    special_tokens spectrum_model_name streaming streaming_multipack_buffer_size strict swanlab_*
    test_datasets tf32 tiled_mlp_num_shards tiled_mlp_use_original_mlp tokenizer_config
    tokenizer_legacy tokenizer_save_jinja_files tokenizer_type tokenizer_use_fast
    tokenizer_use_mistral_common torchdistx_path total_num_tokens total_supervised_tokens trackio_*
    trackio_project_name trackio_run_name trackio_space_id train_on_inputs trainer_cls
    trust_remote_code type_of_model unk_token use_comet use_kernels use_mlflow use_otel_metrics
    use_ray use_swanlab use_tensorboard use_trackio use_wandb val_set_size vllm_* wandb_*
    wandb_entity wandb_log_model wandb_mode wandb_name wandb_project wandb_run_id wandb_watch
    warmup_ratio warmup_steps weight_decay world_size
"""

_BLOCK = tuple(
    f"fsdp_config.{prefix}{name}"
    for prefix in ("", "fsdp_")
    for name in (
        "auto_wrap_policy", "state_dict_type", "final_state_dict_type", "cpu_ram_efficient_loading",
        "sync_module_states", "use_orig_params", "min_num_params", "mixed_precision_policy", "version",
        "cpu_offload_pin_memory",
    )
)  # fmt: skip
"""Keys of ``fsdp_config`` that change no fact of the run (utils/schemas/fsdp.py)."""

KEYS = RunKeys(
    program="axolotl",
    version="0.19.0",
    defaults={
        "adapter": (None, "utils/schemas/peft.py:41: all parameters train"),
        "sequence_len": (512, "utils/schemas/config.py:671"),
        "sample_packing": (False, "utils/schemas/config.py:694"),
        "micro_batch_size": (1, "utils/schemas/training.py:77"),
        "gradient_accumulation_steps": (1, "utils/schemas/training.py:71"),
        "optimizer": ("adamw_torch_fused", "utils/schemas/training.py:122"),
        "bf16": ("auto", "utils/schemas/config.py:561: bf16 where the GPU has it"),
        "gradient_checkpointing": (False, "utils/schemas/config.py:606"),
        "activation_offloading": (False, "utils/schemas/config.py:606"),
        "num_epochs": (1.0, "utils/schemas/training.py:267"),
        "torch_compile": (False, "utils/schemas/config.py:1167"),
        "chunked_cross_entropy": (False, "utils/schemas/config.py:997"),
        "tensor_parallel_size": (1, "utils/schemas/config.py"),
        "context_parallel_size": (1, "utils/schemas/config.py"),
        "expert_parallel_size": (1, "integrations/expert_parallel/args.py"),
    },
    memory=sides(less=_LESS, more=_MORE, either=_EITHER),
    time=names(_TIME),
    numbers=names(_NUMBERS),
    no_effect=frozenset((*_NO_EFFECT.split(), *_BLOCK)),
    unknown="dropped",
    learning={
        "learning_rate": Learned("learning_rate"),
        "weight_decay": Learned("weight_decay", 0.0),
        "adam_beta1": Learned("adam_beta1", 0.9),
        "adam_beta2": Learned("adam_beta2", 0.999),
        "adam_epsilon": Learned("adam_epsilon", 1e-8),
        "max_grad_norm": Learned("max_grad_norm", 1.0),
        "scheduler": Learned("lr_scheduler", "cosine"),
        "warmup_steps": Learned("warmup_steps"),
        "warmup_ratio": Learned("warmup_ratio", 0.03),  # core/builders/base.py:248
        "seed": Learned("seed", 42),
        "neftune_noise_alpha": Learned("neftune_noise_alpha"),
        "output": Learned("output_dir"),
        "lora_alpha": Learned("lora_alpha"),
        "preference_beta": Learned("rl_beta", also=("dpo_beta",)),
        "completions": Learned("trl.num_generations"),
        "completion_length": Learned("trl.max_completion_length"),
        "dataset": Learned("datasets.0.path", also=("pretraining_dataset.0.path",)),
        "trust_remote_code": Learned("trust_remote_code", False),
    },
)
