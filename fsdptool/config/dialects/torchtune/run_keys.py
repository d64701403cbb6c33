"""The keys of torchtune's files, by what they change, and the models that its builders make.

Source: torchtune 0.6.1 ``recipes/*.py`` (keys, defaults), ``torchtune/models/*/_model_builders.py``; main
bd2a0fc.
"""

from __future__ import annotations

from fsdptool.config.dialects.run_reader import Learned, RunKeys, names, sides

KEYS = RunKeys(
    program="torchtune",
    version="0.6.1",
    defaults={
        "gradient_accumulation_steps": (1, "recipes/full_finetune_distributed.py"),
        "enable_activation_checkpointing": (False, "recipes/full_finetune_distributed.py"),
        "enable_activation_offloading": (False, "recipes/full_finetune_distributed.py"),
        "fsdp_cpu_offload": (False, "recipes/full_finetune_distributed.py:138"),
        "fsdp_reshard_after_forward": (True, "recipes/full_finetune_distributed.py:299"),
        "compile": (False, "recipes/full_finetune_distributed.py"),
        "tensor_parallel_dim": (1, "recipes/full_finetune_distributed.py"),
        "optimizer_in_bwd": (False, "recipes/full_finetune_distributed.py"),
    },
    memory=sides(
        less="optimizer_in_bwd memory_efficient_fsdp_wrap",
        more="model.use_dora collate_fn teacher_model dataset_val run_val_every_n_steps"
        " reward_and_value_model reward_and_value_model.* forward_batch_size max_generated_tokens"
        " enable_kv_cache",
        either="quantizer fake_quant_after_n_steps parallelize_plan enable_fp8_training fp8_recipe_name",
    ),
    time=names("optimizer.fused enable_async_checkpointing float8_recipe_name"),
    numbers=names("kd_ratio kd_loss lr_scheduler loss.ignore_index kl_coeff gamma lmbda whiten_rewards"),
    no_effect=names("""
    output_dir tokenizer tokenizer.* dataset dataset.* seed shuffle batch_size_val checkpointer
    checkpointer.* ref_checkpointer ref_checkpointer.* teacher_checkpointer resume_from_checkpoint
    save_adapter_weights_only optimizer.* lr_scheduler.* clip_grad_norm metric_logger
    metric_logger.* log_every_n_steps log_peak_memory_stats log_level profiler profiler.* device
    cudnn_deterministic_mode low_cpu_ram fsdp fsdp.* model.lora_alpha
    loss.* save_steps profile_memory keep_last_n_checkpoints dataset_val.*
    run_val_every_n_steps.* model.image_size tensor_parallel_plan tensor_parallel_plan.*
    _non_blocking_checkpoint
    ref_policy_checkpointer ref_policy_checkpointer.* value_checkpointer value_checkpointer.*
    reward_checkpointer reward_checkpointer.* num_steps ppo_epochs temperature top_k min_response_length
    penalise_no_eos reward_penalty stop_token_ids save_every_n_epochs reward_functions reward_functions.*
    gradient_accumulation_steps ac_mode ac_option nnodes rdzv_* node_rank master_* standalone max_restarts
    local_addr monitor_interval start_method role log_dir redirects tee run_path no_python
    """),
    unknown="dropped",
    learning={
        "learning_rate": Learned("optimizer.lr", 1e-3),
        "weight_decay": Learned("optimizer.weight_decay", 0.01),
        "adam_beta1": Learned("optimizer.betas.0", 0.9),
        "adam_beta2": Learned("optimizer.betas.1", 0.999),
        "adam_epsilon": Learned("optimizer.eps", 1e-8),
        "max_grad_norm": Learned("clip_grad_norm", 0.0),
        "scheduler": Learned(
            "lr_scheduler._component_",
            "constant",
            words={"cosine": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup"},
        ),
        "warmup_steps": Learned("lr_scheduler.num_warmup_steps", 0),
        "seed": Learned("seed"),
        "output": Learned("output_dir"),
        "lora_alpha": Learned("model.lora_alpha"),
        "dataset": Learned("dataset.source"),
    },
)

MODELS = {
    "code_llama2_7b": "codellama:7b", "code_llama2_13b": "codellama:13b", "code_llama2_34b": "codellama:34b",
    "llama3_2_vision_11b": "mllama:11b-vision-instruct",
    "llama3_2_vision_90b": "mllama:90b-vision-instruct", "mistral_7b": "mistral:7b-v0.1",
    "phi3_mini": "phi3:mini-4k", "deepseek_v3": "deepseek-v3:671b",
}  # fmt: skip
"""Builder and size of the catalogue, where the builder is not named after it."""
