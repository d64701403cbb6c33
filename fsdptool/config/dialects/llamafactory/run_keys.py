"""The keys of LLaMA-Factory's two formats beside TrainingArguments, by what they change.

Source: LLaMA-Factory 0.9.5 ``hparams/*_args.py`` (v0) and ``v1/config/*_args.py`` (v1).
"""

from __future__ import annotations

from fsdptool.config.dialects.run_reader import Learned, RunKeys, names, sides
from fsdptool.config.dialects.trainer.run_keys import DEFAULTS, LEARNING, MEMORY, NO_EFFECT, NUMBERS, TIME

_OWN = """
    template dataset eval_dataset dataset_dir media_dir train_on_prompt mask_history streaming
    buffer_size mix_strategy interleave_probs overwrite_cache preprocessing_batch_size
    preprocessing_num_workers max_samples eval_num_beams ignore_pad_token_for_loss val_size
    tool_format default_system enable_thinking preserve_thinking tokenized_path
    data_shared_file_system lora_alpha create_new_adapter pref_beta pref_ftx
    pref_bco_weight dpo_label_smoothing kto_chosen_weight kto_rejected_weight simpo_gamma ppo_*
    ld_alpha galore_scale galore_update_interval galore_proj_type apollo_scale
    apollo_update_interval apollo_proj apollo_proj_type apollo_scale_type apollo_scale_front
    badam_switch_mode badam_switch_interval badam_start_block badam_update_ratio badam_mask_mode
    badam_verbose use_swanlab swanlab_* compute_accuracy disable_shuffling early_stopping_steps
    plot_loss include_effective_tokens_per_second adapter_name_or_path adapter_folder cache_dir
    use_fast_tokenizer split_special_tokens add_special_tokens new_special_tokens_config
    init_special_tokens model_revision low_cpu_mem_usage infer_backend offload_folder use_kv_cache
    infer_dtype hf_hub_token ms_hub_token om_hub_token print_param_status trust_remote_code
    quantization_type quantization_device_map export_* vllm_* sglang_* do_sample temperature top_p
    top_k num_beams max_length max_new_tokens repetition_penalty length_penalty skip_special_tokens
    ray_* master_addr master_port enable_torch_profiler profiler_* profile_modules fp8_backend
    use_reentrant_gc module_dropout oft_block_size oft_rank oft_target reward_model_type
    pissa_convert pissa_iter video_fps video_maxlen use_audio_in_video audio_sampling_rate
    image_min_pixels video_min_pixels image_do_pan_and_scan crop_to_patches mixture_of_depths
    lora_rank lora_target lora_dropout pref_loss double_quantization
    predict_with_generate sortish_sampler generation_max_length generation_num_beams generation_config
    use_ray placement_strategy resources_per_worker
"""
_MEGATRON = """
    sequence_parallel virtual_pipeline_model_parallel_size expert_tensor_parallel_size recompute_* moe_*
    bias_activation_fusion apply_rope_fusion use_distributed_optimizer overlap_* swiglu variable_seq_lengths
    account_for_* additional_configs transformer_impl use_cpu_initialization
    context_parallel_size cross_entropy_* gradient_accumulation_fusion
    distributed_*
"""
"""Keys that mcore_adapter adds (its ``training_args.py``), which are told by one of them."""
_PREFERENCES = ("dpo", "kto", "orpo", "simpo")
KEYS = RunKeys(
    program="llamafactory",
    version="0.9.5",
    defaults={
        **DEFAULTS,
        "finetuning_type": ("lora", "hparams/finetuning_args.py:464"),
        "stage": ("sft", "hparams/finetuning_args.py"),
        "lora_rank": (8, "hparams/finetuning_args.py:77"),
        "lora_target": ("all", "hparams/finetuning_args.py:81"),
        "cutoff_len": (2048, "hparams/data_args.py:46"),
        "disable_gradient_checkpointing": (False, "hparams/model_args.py:145"),
        "flash_attn": ("auto", "hparams/model_args.py:117"),
        "enable_liger_kernel": (False, "hparams/model_args.py"),
        "pure_bf16": (False, "hparams/finetuning_args.py:456"),
    },
    memory=MEMORY
    | sides(
        less="""
    galore_layerwise galore_rank galore_target apollo_rank apollo_target apollo_layerwise use_badam
    badam_mode use_adam_mini freeze_language_model use_unsloth use_unsloth_gc shift_attn fp8
    fp8_enable_fsdp_float8_all_gather use_v1_kernels freeze_trainable_layers freeze_trainable_modules
""",
        more="""
    use_dora additional_target image_max_pixels video_max_pixels ref_model ref_model_adapters
    reward_model reward_model_adapters add_tokens resize_vocab upcast_layernorm upcast_lmhead_output
    use_llama_pro freeze_extra_modules
""",
        either="""
    use_mca use_hyper_parallel hyper_parallel_args use_kt kt_weight_path kt_expert_checkpoint_path
    ref_model_quantization_bit reward_model_quantization_bit train_from_scratch device_map kernel_config
    init_config quantization_method
""",
    ),
    time=TIME,
    numbers=NUMBERS
    | names("""
    use_dft_loss use_asft_loss asft_alpha use_eaft_loss eaft_alpha loraplus_lr_ratio
    loraplus_lr_embedding use_rslora pissa_init moe_aux_loss_coef rope_scaling
"""),
    no_effect=NO_EFFECT | names(_OWN) | names(_MEGATRON),
    unknown="refused",
    learning={
        **LEARNING,
        "lora_alpha": Learned("lora_alpha", lambda run: 2 * run.lora_rank if run.lora_rank else None),
        "dataset": Learned("dataset"),
        "preference_beta": Learned("pref_beta", lambda run: 0.1 if run.objective in _PREFERENCES else None),
        "trust_remote_code": Learned("trust_remote_code", False),
    },
)

V1 = RunKeys(
    program="llamafactory",
    version="0.9.5",
    defaults={
        "micro_batch_size": (1, "v1/config/training_args.py:28"),
        "global_batch_size": (None, "v1/config/training_args.py:32: micro_batch_size x data-parallel ranks"),
        "cutoff_len": (2048, "v1/config/training_args.py:36"),
        "num_train_epochs": (3, "v1/config/training_args.py:44"),
        "max_steps": (None, "v1/config/training_args.py:48"),
        "bf16": (True, "v1/config/training_args.py:56"),
        "batching_strategy": ("normal", "v1/config/training_args.py:60"),
        "enable_activation_checkpointing": (True, "v1/config/training_args.py"),
        "flash_attn": ("sdpa", "v1/config/model_args.py"),
        "optim_config": (None, "v1/core/base_trainer.py: torch.optim.AdamW"),
    },
    memory=sides(more="mtp_config", either="kernel_config init_config optim_config"),
    no_effect=names("""
    model_class template trust_remote_code train_dataset eval_dataset output_dir learning_rate
    max_grad_norm batching_workers lr_scheduler_config seed full_determinism resume_from_checkpoint
    dist_config.config_file dist_config.ep_* dist_config.param_dtype dist_config.reduce_dtype
    save_* logging_steps sample_backend max_new_tokens dist_config.dcp_path dist_config.name
"""),
    unknown="refused",
    learning={
        "learning_rate": Learned("learning_rate", 1e-4),
        "max_grad_norm": Learned("max_grad_norm", 1.0),
        "seed": Learned("seed", 42),
        "output": Learned("output_dir"),
        "lora_alpha": Learned("peft_config.lora_alpha"),
    },
)
