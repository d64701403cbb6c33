"""The keys of torchtitan's TOML that decide a run, with their defaults, and the models of its registry.

Source: torchtitan 0.2.2 (73a0e697) ``torchtitan/config/job_config.py``, ``torchtitan/models/*/__init__.py``.
"""

from __future__ import annotations

from fsdptool.config.dialects.run_reader import Learned, RunKeys, names, sides

_CONFIG = "torchtitan/config/job_config.py"

KEYS = RunKeys(
    program="torchtitan",
    version="0.2.2",
    defaults={
        "optimizer.name": ("AdamW", f"{_CONFIG}:145"),
        "training.local_batch_size": (8, f"{_CONFIG}:253"),
        "training.global_batch_size": (-1, f"{_CONFIG}:256"),
        "training.seq_len": (2048, f"{_CONFIG}:261"),
        "training.steps": (10000, f"{_CONFIG}:267"),
        "training.dtype": ("float32", f"{_CONFIG}:275"),
        "training.mixed_precision_param": ("bfloat16", f"{_CONFIG}:282"),
        "training.mixed_precision_reduce": ("float32", f"{_CONFIG}:290"),
        "training.enable_cpu_offload": (False, f"{_CONFIG}:270"),
        "parallelism.data_parallel_replicate_degree": (1, f"{_CONFIG}:313"),
        "parallelism.data_parallel_shard_degree": (-1, f"{_CONFIG}:324"),
        "parallelism.fsdp_reshard_after_forward": ("default", f"{_CONFIG}:336"),
        "parallelism.tensor_parallel_degree": (1, f"{_CONFIG}:351"),
        "parallelism.pipeline_parallel_degree": (1, f"{_CONFIG}:360"),
        "parallelism.context_parallel_degree": (1, f"{_CONFIG}:428"),
        "parallelism.expert_parallel_degree": (1, f"{_CONFIG}:454"),
        "activation_checkpoint.mode": ("selective", f"{_CONFIG}:652"),
        "activation_checkpoint.selective_ac_option": ("2", f"{_CONFIG}:655"),
        "compile.enable": (False, f"{_CONFIG}:722"),
    },
    memory=sides(
        less="""
        float8.enable_float8_linear model.converters quantize.linear.float8.enable_fsdp_float8_all_gather
        optimizer.early_step_in_backward activation_checkpoint.memory_budget
        """,
        more="validation.enable parallelism.disable_loss_parallel profiling.enable_memory_snapshot",
        either="""
        parallelism.pipeline_parallel_microbatch_size parallelism.pipeline_parallel_layers_per_stage
        parallelism.pipeline_parallel_first_stage_less_layers
        parallelism.pipeline_parallel_last_stage_less_layers
        parallelism.pipeline_parallel_split_points parallelism.module_fqns_per_model_part
        parallelism.pipeline_parallel_schedule_csv optimizer.state_dtype
        activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns
        training.aggressive_memory_mode training.clear_cache_between_steps job.custom_config_module
        experimental.custom_args_module fault_tolerance.enable grpo simko model.norm_type
        """,
    ),
    time=names("""
    parallelism.enable_async_tensor_parallel parallelism.context_parallel_rotate_method
    parallelism.expert_parallel_comm_backend parallelism.context_parallel_load_balancer
    parallelism.enable_compiled_autograd parallelism.pipeline_parallel_expert_parallel_overlap
    optimizer.implementation compile.backend training.gc_freq training.gc_debug
    debug.moe_force_load_balance training.debug_moe_force_load_balance debug.deterministic
    training.deterministic activation_checkpoint.preserve_rng_state
    """),
    no_effect=names("""
    job.* profiling.* metrics.* lr_scheduler.* checkpoint.* comm.* validation.* memory_estimation.*
    fault_tolerance.* experimental.* optimizer.lr optimizer.beta1 optimizer.beta2 optimizer.eps
    optimizer.weight_decay optimizer.fused training.dataset training.dataset_path training.max_norm
    training.seed training.dataloader.* training.warmup_steps model.hf_assets_path
    model.tokenizer_path model.print_after_conversion quantize.* float8.* mx.* debug.*
    activation_checkpoint.early_stop activation_checkpoint.visualize_memory_budget_pareto
    activation_checkpoint.determinism_check activation_checkpoint.debug
    parallelism.pipeline_parallel_schedule parallelism.expert_tensor_parallel_degree grpo.* simko.*
    encoder.* dataloader.* training.classifier_free_guidance_prob training.skip_optimizer_step
    training.aggressive_memory_verbose
    """),
    unknown="refused",
    learning={
        "learning_rate": Learned("optimizer.lr", 8e-4),
        "weight_decay": Learned("optimizer.weight_decay", 0.1),
        "adam_beta1": Learned("optimizer.beta1", 0.9),
        "adam_beta2": Learned("optimizer.beta2", 0.95),
        "adam_epsilon": Learned("optimizer.eps", 1e-8),
        "max_grad_norm": Learned("training.max_norm", 1.0),
        "scheduler": Learned(
            "lr_scheduler.decay_type",
            "linear",
            words={"linear": "linear", "cosine": "cosine", "sqrt": "sqrt"},
        ),
        "warmup_steps": Learned("lr_scheduler.warmup_steps", 200),
        "seed": Learned("debug.seed", also=("training.seed",)),
        "output": Learned("job.dump_folder"),
        "dataset": Learned("training.dataset"),
    },
)

FAMILIES = {
    ("llama3", "8b"): "llama3:8b", ("llama3", "70b"): "llama3:70b", ("llama3", "405b"): "llama3.1:405b",
    ("llama3", "1b"): "llama3.2:1b",
    ("llama4", "17bx16e"): "llama4:scout-17b-16e",
    ("qwen3", "0.6b"): "qwen3:0.6b", ("qwen3", "1.7b"): "qwen3:1.7b", ("qwen3", "4b"): "qwen3:4b",
    ("qwen3", "8b"): "qwen3:8b", ("qwen3", "14b"): "qwen3:14b", ("qwen3", "32b"): "qwen3:32b",
    ("qwen3", "30b-a3b"): "qwen3-moe:30b-a3b", ("qwen3", "235b-a22b"): "qwen3-moe:235b-a22b",
    ("qwen2", "7b"): "qwen2.5:7b", ("qwen2", "0.5b"): "qwen2.5:0.5b", ("qwen2", "1.5b"): "qwen2.5:1.5b",
    ("qwen2", "3b"): "qwen2.5:3b", ("qwen2", "32b"): "qwen2.5:32b", ("qwen2", "72b"): "qwen2.5:72b",
    ("deepseek_v3", "16b"): "deepseek-v2:lite", ("deepseek_v3", "236b"): "deepseek-v2:236b",
    ("deepseek_v3", "671b"): "deepseek-v3:671b", ("deepseek_v3", "kimi_k2"): "kimi-k2:instruct",
    ("gpt_oss", "20b"): "gpt-oss:20b", ("gpt_oss", "120b"): "gpt-oss:120b",
    ("flux", "flux-dev"): "flux.1:dev", ("flux", "flux-schnell"): "flux.1:schnell",
}  # fmt: skip
"""Name and flavour of the registry, in lower case, and the size of the catalogue."""
FLAVOURS = {
    "llama3": {"8b": "8B", "70b": "70B", "405b": "405B"},
    "llama4": {"17bx16e": "17bx16e"},
    "qwen3": {
        "0.6b": "0.6B", "1.7b": "1.7B", "4b": "4B", "8b": "8B", "14b": "14B", "32b": "32B",
        "30b-a3b": "30B-A3B", "235b-a22b": "235B-A22B",
    },
    "deepseek_v3": {"671b": "671B"},
    "gpt_oss": {"20b": "20b", "120b": "120b"},
}  # fmt: skip
"""Flavours of torchtitan 0.2.2 that are sizes of the catalogue, as torchtitan spells them."""
FLEX = frozenset({"deepseek_v3", "gpt_oss"})
"""Models whose flavours use FlexAttention."""
