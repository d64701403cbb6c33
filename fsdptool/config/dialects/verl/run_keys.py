"""The keys of verl's trainers, by what they change, with the defaults of those that decide a run.

Source: verl b178a3cd (0.8.0.dev) ``verl/trainer/config`` (sft_trainer.yaml, sft_trainer_engine.yaml,
ppo_trainer.yaml and the files that they include).
"""

from __future__ import annotations

from fsdptool.config.dialects.run_reader import Learned, RunKeys, names, sides

_CONFIG = "verl/trainer/config"
_NO_EFFECT = names("""
    config_path config_name data.* trainer.* algorithm.* optim.* checkpoint.* hydra hydra.* defaults
    custom_reward_function.* reward_manager.* global_profiler.* ray_kwargs.* transfer_queue.*
    profiler.* model.trust_remote_code model.external_lib model.use_shm model.tokenizer_path
    model.lora_alpha model.override_config.* model.fsdp_config.wrap_policy.* engine.wrap_policy.*
    engine.optimizer_offload engine.param_offload engine.forward_prefetch engine.seed
    model.fsdp_config.forward_prefetch
""")


def _learning(optimizer: str, model: str, rate: float, clip: str) -> dict[str, Learned]:
    return {
        "learning_rate": Learned(f"{optimizer}.lr", rate),
        "weight_decay": Learned(f"{optimizer}.weight_decay", 0.01),
        "adam_beta1": Learned(f"{optimizer}.betas.0", 0.9),
        "adam_beta2": Learned(f"{optimizer}.betas.1", 0.999),
        "max_grad_norm": Learned(clip, 1.0),
        "scheduler": Learned(
            f"{optimizer}.lr_scheduler_type",
            "constant",
            (f"{optimizer}.lr_scheduler", f"{optimizer}.warmup_style"),
            words={"constant": "constant", "cosine": "cosine"},
        ),
        "warmup_steps": Learned(f"{optimizer}.lr_warmup_steps"),
        "warmup_ratio": Learned(f"{optimizer}.lr_warmup_steps_ratio", 0.0),
        "lora_alpha": Learned(f"{model}.lora_alpha", lambda run: 16 if run.lora_rank else None),
        "output": Learned("trainer.default_local_dir"),
        "dataset": Learned("data.train_files"),
        "trust_remote_code": Learned(f"{model}.trust_remote_code", False),
    }


SFT = RunKeys(
    program="verl",
    version="0.8.0.dev",
    defaults={
        "data.max_length": (1024, f"{_CONFIG}/sft_trainer.yaml:24"),
        "data.micro_batch_size_per_gpu": (4, f"{_CONFIG}/sft_trainer.yaml:8"),
        "data.train_batch_size": (256, f"{_CONFIG}/sft_trainer.yaml:6"),
        "model.fsdp_config.model_dtype": ("fp32", f"{_CONFIG}/sft_trainer.yaml:37"),
        "model.enable_gradient_checkpointing": (True, f"{_CONFIG}/sft_trainer.yaml:43"),
        "model.strategy": ("fsdp2", f"{_CONFIG}/sft_trainer.yaml:49"),
        "model.lora_rank": (0, f"{_CONFIG}/sft_trainer.yaml"),
        "ulysses_sequence_parallel_size": (1, f"{_CONFIG}/sft_trainer.yaml"),
        "trainer.total_epochs": (4, f"{_CONFIG}/sft_trainer.yaml:64"),
        "optim.optimizer": ("AdamW", f"{_CONFIG}/optim/fsdp.yaml:5"),
    },
    memory=sides(less="model.use_liger model.exclude_modules", either="engine.* model.fsdp_config.*"),
    numbers=names("data.balance_dp_token"),
    no_effect=_NO_EFFECT,
    unknown="refused",
    learning={**_learning("optim", "model", 1e-5, "optim.clip_grad"), "seed": Learned("trainer.seed", 1)},
)
ENGINE = RunKeys(
    program="verl",
    version="0.8.0.dev",
    defaults={
        **SFT.defaults,
        "engine.model_dtype": ("fp32", f"{_CONFIG}/engine/fsdp.yaml:33"),
        "engine.strategy": ("fsdp", f"{_CONFIG}/engine/fsdp.yaml"),
        "engine.reshard_after_forward": (True, f"{_CONFIG}/engine/fsdp.yaml"),
        "data.use_dynamic_bsz": (True, f"{_CONFIG}/sft_trainer_engine.yaml:20"),
        "engine.ulysses_sequence_parallel_size": (1, f"{_CONFIG}/engine/fsdp.yaml"),
    },
    memory=SFT.memory,
    no_effect=_NO_EFFECT,
    unknown="refused",
    learning={**_learning("optim", "model", 1e-3, "optim.clip_grad"), "seed": Learned("trainer.seed", 1)},
)
_ACTOR = "actor_rollout_ref.actor"
RL = RunKeys(
    program="verl",
    version="0.8.0.dev",
    defaults={
        "data.max_prompt_length": (512, f"{_CONFIG}/data/legacy_data.yaml:35"),
        "data.max_response_length": (512, f"{_CONFIG}/data/legacy_data.yaml:36"),
        "algorithm.adv_estimator": ("gae", f"{_CONFIG}/ppo_trainer.yaml"),
        f"{_ACTOR}.ppo_mini_batch_size": (256, f"{_CONFIG}/actor/actor.yaml:18"),
        f"{_ACTOR}.strategy": ("fsdp", f"{_CONFIG}/actor/dp_actor.yaml:26"),
        f"{_ACTOR}.fsdp_config.model_dtype": ("fp32", f"{_CONFIG}/engine/fsdp.yaml:33"),
        f"{_ACTOR}.fsdp_config.fsdp_size": (-1, f"{_CONFIG}/engine/fsdp.yaml:26"),
        f"{_ACTOR}.fsdp_config.reshard_after_forward": (True, f"{_CONFIG}/engine/fsdp.yaml:23"),
        f"{_ACTOR}.ulysses_sequence_parallel_size": (1, f"{_CONFIG}/actor/dp_actor.yaml"),
        f"{_ACTOR}.optim.optimizer": ("AdamW", f"{_CONFIG}/optim/fsdp.yaml:5"),
        "actor_rollout_ref.rollout.n": (1, f"{_CONFIG}/rollout/rollout.yaml"),
        "actor_rollout_ref.model.enable_gradient_checkpointing": (True, f"{_CONFIG}/model/hf_model.yaml:34"),
        "actor_rollout_ref.model.lora_rank": (0, f"{_CONFIG}/model/hf_model.yaml"),
        "actor_rollout_ref.model.use_fused_kernels": (False, f"{_CONFIG}/model/hf_model.yaml"),
        "trainer.total_epochs": (30, f"{_CONFIG}/ppo_trainer.yaml:129"),
        "trainer.n_gpus_per_node": (8, f"{_CONFIG}/ppo_trainer.yaml"),
        "trainer.nnodes": (1, f"{_CONFIG}/ppo_trainer.yaml"),
    },
    memory=sides(
        less="""
        actor_rollout_ref.model.use_liger actor_rollout_ref.model.fused_kernel_options.*
        actor_rollout_ref.model.exclude_modules
        """,
        more="""
        actor_rollout_ref.rollout.gpu_memory_utilization
        actor_rollout_ref.rollout.tensor_model_parallel_size actor_rollout_ref.rollout.name
        critic.model.path critic.ppo_max_token_len_per_gpu critic.ppo_micro_batch_size_per_gpu
        critic.enable reward_model.enable reward_model.model.path
        actor_rollout_ref.actor.use_kl_loss algorithm.use_kl_in_reward
        actor_rollout_ref.actor.entropy_from_logits_with_chunking
        """,
        either="actor_rollout_ref.actor.router_replay actor_rollout_ref.actor.megatron.*",
    ),
    time=names("actor_rollout_ref.actor.use_torch_compile"),
    no_effect=_NO_EFFECT
    | names("""
    actor_rollout_ref.nccl_timeout skip rollout rollout.* sandbox_fusion sandbox_fusion.*
    distillation distillation.* async_training async_training.* actor_rollout_ref.hybrid_engine
    actor_rollout_ref.rollout.* actor_rollout_ref.ref.* actor_rollout_ref.actor.*
    actor_rollout_ref.model.* critic.* reward_model.* reward.*
    """),
    unknown="refused",
    learning={
        **_learning(f"{_ACTOR}.optim", "actor_rollout_ref.model", 1e-6, f"{_ACTOR}.grad_clip"),
        "completions": Learned("actor_rollout_ref.rollout.n", 1),
        "prompt_length": Learned("data.max_prompt_length", 512),
        "completion_length": Learned("data.max_response_length", 512),
        "preference_beta": Learned(f"{_ACTOR}.kl_loss_coef"),
        "seed": Learned(f"{_ACTOR}.fsdp_config.seed", 42),
    },
)
"""What belongs to phases between training steps (rollout, log-probabilities) changes no training peak."""
