"""The keys of TRL's files beside TrainingArguments, by what they change.

Source: TRL 1.16.0 ``trl/trainer/*_config.py``, ``trainer/model_config.py``, ``scripts/utils.py``; 0.18.0.
"""

from __future__ import annotations

from fsdptool.config.dialects.run_reader import Learned, RunKeys, names, sides
from fsdptool.config.dialects.trainer.run_keys import DEFAULTS, LEARNING, MEMORY, NO_EFFECT, NUMBERS, TIME

_OWN = """
    model_revision lora_alpha lora_task_type dataset_name dataset_config dataset_train_split
    dataset_test_split dataset_streaming datasets dataset_mixture dataset_text_field dataset_kwargs
    dataset_num_proc dataset_batch_size streaming test_split_size chat_template chat_template_path eos_token
    pad_token truncation_mode shuffle_dataset eval_packing completion_only_loss assistant_only_loss
    trust_remote_code ignore_bias_buffers env machine_rank main_process_ip main_process_port
    temperature top_p top_k min_p repetition_penalty generation_kwargs chat_template_kwargs epsilon
    epsilon_high delta num_iterations reward_weights scale_rewards log_completions log_multimodal
    num_completions_to_print log_unique_prompts log_completions_hub_repo mask_truncated_completions
    vllm_server_* vllm_group_port vllm_structured_outputs_regex vllm_model_impl vllm_guided_decoding_regex
    reward_funcs num_generations_eval label_smoothing desirable_weight undesirable_weight max_prompt_length
    ld_alpha f_divergence_type f_alpha_divergence_coef discopop_tau loss_weights use_weighting
    multi_objective_aggregation system_prompt dataset_prompt_column include_tokens_per_second benchmarks
    sapo_* vespo_* importance_sampling_level vllm_importance_sampling_* off_policy_mask_threshold
    use_bias_correction_kl entropy_* normalize_advantages reward_clip_range max_tool_calling_iterations
    sync_ref_model ref_model_mixup_alpha ref_model_sync_steps center_rewards_coefficient disable_dropout
    bnb_4bit_quant_type bnb_4bit_quant_storage ds3_gather_for_generation callbacks top_entropy_quantile
    use_adaptive_entropy use_bnb_nested_quant lora_r lora_dropout lora_target_modules padding_value
    is_encoder_decoder generate_during_eval cpo_alpha simpo_gamma alpha lmbda seq_kd max_new_tokens
    missing_eos_penalty teacher_model_revision teacher_model_server_url teacher_tokenizer_name_or_path uld_*
    use_uld_loss distillation_* log_completions_steps tpo_* response_length kl_coef num_ppo_epochs
    whiten_rewards cliprange cliprange_value vf_coef gamma lam stop_token num_mini_batches
    local_rollout_forward_batch_size num_sample_generations exp_name total_episodes label_pad_token_id
    dataset_mixer dataset_splits dataset_configs preprocessing_num_workers auto_insert_empty_system_msg
    truncation_side code_language cosine_* repetition_n_grams repetition_max_penalty hub_model_revision
    overwrite_hub_revision push_to_hub_revision wandb_* e2b_router_url morph_router_url use_slow_tokenizer
    vllm_device vllm_dtype
"""
_RATES = {"sft": 2e-5, "reward": 1e-4}
"""Learning rates of ``trainer/*_config.py``; other trainers have 1e-6."""
KEYS = RunKeys(
    program="trl",
    version="1.16.0",
    defaults={
        **DEFAULTS,
        "gradient_checkpointing": (True, "trl/trainer/base_config.py:62"),
        "bf16": (True, "trl/trainer/base_config.py:108: unless fp16"),
        "dtype": ("float32", "trl/trainer/model_config.py:89"),
        "max_length": (1024, "trl/trainer/sft_config.py"),
        "packing": (False, "trl/trainer/sft_config.py"),
        "packing_strategy": ("bfd", "trl/trainer/sft_config.py"),
        "lora_r": (16, "trl/trainer/model_config.py:103"),
        "lora_dropout": (0.05, "trl/trainer/model_config.py:115"),
        "num_generations": (8, "trl/trainer/grpo_config.py"),
        "max_completion_length": (512, "trl/trainer/grpo_config.py"),
        "activation_offloading": (False, "trl/trainer/sft_config.py"),
    },
    memory=MEMORY
    | sides(
        less="padding_free lora_target_parameters use_logits_to_keep precompute_ref_log_probs",
        more="""
    use_vllm vllm_gpu_memory_utilization vllm_enable_sleep_mode vllm_tensor_parallel_size
    vllm_max_model_length use_dora cast_lm_head_to_fp32 use_transformers_continuous_batching
    use_transformers_paged reward_model_path reward_model_name_or_path teacher_model_name_or_path
""",
        either="""
    model_init_kwargs pad_to_multiple_of generation_batch_size steps_per_generation cache_implementation
    transformers_continuous_batching_config liger_loss use_liger_loss teacher_model_init_kwargs
""",
    ),
    time=TIME | frozenset({"vllm_mode", "precompute_ref_batch_size"}),
    numbers=NUMBERS | frozenset({"use_rslora", "router_aux_loss_coef"}),
    no_effect=NO_EFFECT | names(_OWN),
    unknown="refused",
    learning={
        **LEARNING,
        "learning_rate": Learned("learning_rate", lambda run: _RATES.get(run.objective or "", 1e-6)),
        "warmup_steps": Learned("warmup_steps", 0),
        "warmup_ratio": Learned("warmup_steps", also=("warmup_ratio",)),
        "lora_alpha": Learned("lora_alpha", lambda run: 32 if run.lora_rank else None),
        "preference_beta": Learned("beta", lambda run: 0.1 if run.objective in ("dpo", "kto") else None),
        "completions": Learned("num_generations", lambda run: 8 if run.objective == "grpo" else None),
        "completion_length": Learned(
            "max_completion_length", lambda run: 512 if run.objective == "grpo" else None
        ),
        "prompt_length": Learned("", also=("max_prompt_length",)),
        "dataset": Learned("dataset_name"),
        "trust_remote_code": Learned("trust_remote_code", False),
    },
)
OLD = "0.18.0"
OLD_DEFAULTS = {
    "gradient_checkpointing": (False, "transformers training_args.py (trl 0.18.0 adds none)"),
    "bf16": (False, "transformers training_args.py (trl 0.18.0 adds none)"),
    "dtype": ("float32", "modeling_utils.py: float32 before transformers 5"),
    "max_prompt_length": (512, "trl 0.18.0 trl/trainer/grpo_config.py"),
    "max_completion_length": (256, "trl 0.18.0 trl/trainer/grpo_config.py"),
}
"""What differs in the version that most files on the hub were written for."""

WITHOUT_DROPOUT = ("dpo", "kto", "orpo", "cpo", "reward")
"""Trainers that switch dropout off (``disable_dropout`` of ``trainer/*_config.py``)."""
