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
        more="collate_fn teacher_model dataset_val run_val_every_n_steps",
        either="quantizer fake_quant_after_n_steps parallelize_plan enable_fp8_training fp8_recipe_name",
    ),
    time=names("optimizer.fused enable_async_checkpointing float8_recipe_name"),
    numbers=names("kd_ratio kd_loss lr_scheduler loss.ignore_index"),
    no_effect=names("""
    output_dir tokenizer tokenizer.* dataset dataset.* seed shuffle batch_size_val checkpointer
    checkpointer.* ref_checkpointer ref_checkpointer.* teacher_checkpointer resume_from_checkpoint
    save_adapter_weights_only optimizer.* lr_scheduler.* clip_grad_norm metric_logger
    metric_logger.* log_every_n_steps log_peak_memory_stats log_level profiler profiler.* device
    cudnn_deterministic_mode low_cpu_ram fsdp fsdp.* model.lora_alpha
    model.use_dora loss.* save_steps profile_memory keep_last_n_checkpoints dataset_val.*
    run_val_every_n_steps.* model.decoder_trainable model.encoder_trainable model.fusion_trainable
    model.image_size tensor_parallel_plan tensor_parallel_plan.* _non_blocking_checkpoint
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
    "code_llama2_34b": "codellama:34b", "gemma_2b": "gemma:2b", "gemma_7b": "gemma:7b",
    "gemma2_2b": "gemma2:2b", "gemma2_9b": "gemma2:9b", "llama2_7b": "llama2:7b",
    "llama2_13b": "llama2:13b", "llama2_70b": "llama2:70b", "llama3_8b": "llama3:8b",
    "llama3_70b": "llama3:70b", "llama3_1_8b": "llama3.1:8b", "llama3_1_70b": "llama3.1:70b",
    "llama3_1_405b": "llama3.1:405b", "llama3_2_1b": "llama3.2:1b", "llama3_3_70b": "llama3.3:70b",
    "llama3_2_vision_11b": "mllama:11b-vision-instruct", "llama3_2_vision_90b": "mllama:90b-vision-instruct",
    "llama4_scout_17b_16e": "llama4:scout-17b-16e", "mistral_7b": "mistral:7b-v0.1",
    "phi3_mini": "phi3:mini-4k", "phi4_14b": "phi4:14b", "qwen2_7b": "qwen2:7b",
    "qwen2_0_5b": "qwen2:0.5b", "qwen2_5_0_5b": "qwen2.5:0.5b", "qwen2_5_1_5b": "qwen2.5:1.5b",
    "qwen2_5_3b": "qwen2.5:3b", "qwen2_5_7b": "qwen2.5:7b", "qwen2_5_32b": "qwen2.5:32b",
    "qwen2_5_72b": "qwen2.5:72b", "qwen3_0_6b": "qwen3:0.6b", "qwen3_1_7b": "qwen3:1.7b",
    "qwen3_4b": "qwen3:4b", "qwen3_8b": "qwen3:8b", "qwen3_14b": "qwen3:14b", "qwen3_32b": "qwen3:32b",
}  # fmt: skip
"""Builder, without ``lora_``, ``qlora_``, ``_base`` and ``_instruct``, and the size of the catalogue."""
