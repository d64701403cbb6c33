"""The keys of NeMo AutoModel's files, by what they change, with the defaults of those that decide a run.

Source: NeMo AutoModel 36044ad3 (after 0.5.0) ``nemo_automodel``.
"""

from __future__ import annotations

from fsdptool.config.dialects.run_reader import Learned, RunKeys, names, sides

_CONFIG = "components/distributed/config.py"

KEYS = RunKeys(
    program="automodel",
    version="0.5.0",
    defaults={
        "step_scheduler.global_batch_size": (32, "components/training/step_scheduler.py:379"),
        "step_scheduler.local_batch_size": (1, "recipes/llm/train_ft.py:544"),
        "step_scheduler.num_epochs": (10, "components/training/step_scheduler.py:380"),
        "distributed.strategy": ("fsdp2", "recipes/_dist_utils.py:92"),
        "distributed.activation_checkpointing": (False, "recipes/_dist_utils.py:107"),
        "fsdp.activation_checkpointing": (True, "recipes/diffusion/train.py:207"),
        "distributed.defer_fsdp_grad_sync": (True, f"{_CONFIG}:318"),
        "packed_sequence.packed_sequence_size": (0, "recipes/_typed_config.py:215"),
        "compile.enabled": (False, "components/utils/compile_utils.py:31"),
        "model.torch_dtype": ("auto", "_transformers/auto_model.py:651: as the checkpoint, bf16 here"),
    },
    memory=sides(
        less="""
        model.use_liger_kernel peft.use_triton freeze_config.freeze_embeddings
        freeze_config.freeze_vision_tower freeze_config.freeze_language_model
        fp8.enable_fsdp_float8_all_gather fp8.enabled model.transformer_engine_fp8
        distributed.pipeline.pp_microbatch_size
        """,
        more="""
        fsdp.enable_fsdp2_prefetch distributed.enable_fsdp2_prefetch
        fsdp.fsdp2_backward_prefetch_depth fsdp.fsdp2_forward_prefetch_depth
        optimizer.master_weights optimizer.store_param_remainders
        optimizer.master_weight_bits teacher_model kd_ratio qat ema
        train_n_passages dataloader.dataset.train_n_passages dataloader.dataset.n_passages
        """,
        either="""
        model.backend.linear model.backend.rms_norm model.backend.experts model.backend.dispatcher
        model.config.num_hidden_layers model.text_config.* quantization.load_in_8bit
        peft.moe_rank_scaling distributed.defer_fsdp_grad_sync fsdp.defer_fsdp_grad_sync
        distributed.moe.wrap_outer_model data.dataloader.dynamic_batch_size
        data.dataloader.base_resolution recipe_args.*
        """,
    ),
    time=names("""
    compile.mode compile.fullgraph compile.dynamic compile.backend
    distributed.enable_async_tensor_parallel model.use_sdpa_patching
    distributed.patch_is_packed_sequence optimizer.foreach optimizer.fused model.backend.rope_fusion
    step_scheduler.gc_every_steps
    """),
    numbers=names("lr_scheduler.* flow_matching.* model.backend.fake_balanced_gate"),
    no_effect=names("""
    recipe.* seed dist_env dist_env.* rng rng.* wandb wandb.* mlflow mlflow.* ci ci.* benchmark
    benchmark.* mfu mfu.* nvtx checkpoint checkpoint.* validation_dataset validation_dataset.*
    validation_dataloader validation_dataloader.* step_scheduler.* dataset dataset.* dataloader
    dataloader.* optimizer.* clip_grad_norm clip_grad_norm.* loss_fn loss_fn.* peft._target_
    peft.alpha peft.* model._target_ model.trust_remote_code model.output_hidden_states model.mode
    model.cache_dir model.model_type model.config._target_ model.config.name_or_path
    model.config.language_model_only model.backend.* model.config.trust_remote_code
    model.load_base_model quantization.* packed_sequence.packing_strategy packed_sequence.*
    distributed.* fsdp.* ddp.* data.* freeze_config.* fp8.* compile.* logging logging.*
    autopipeline autopipeline.* parallelizer parallelizer.* distributed_config distributed_config.*
    autocast autocast.* model.force_hf optim optim.* eval_negative_size temperature model.share_encoder
    model.add_linear_pooler model.out_dimension model.pooling model.l2_normalize model.num_labels
    model.temperature tokenizer tokenizer.*
    model.text_config model.text_config.use_cache processor processor.*
    flow_matching launcher slurm slurm.* k8s k8s.* model.is_meta_device model.name_or_path
    """),
    unknown="dropped",
    learning={
        "learning_rate": Learned("optimizer.lr", 1e-3),
        "weight_decay": Learned("optimizer.weight_decay", 0.01),
        "adam_beta1": Learned("optimizer.betas.0", 0.9),
        "adam_beta2": Learned("optimizer.betas.1", 0.999),
        "adam_epsilon": Learned("optimizer.eps", 1e-8),
        "max_grad_norm": Learned("clip_grad_norm.max_norm", 1.0),
        "scheduler": Learned("lr_scheduler.lr_decay_style", "constant"),
        "warmup_steps": Learned("lr_scheduler.lr_warmup_steps", 0),
        "seed": Learned("rng.seed", 42),
        "output": Learned("checkpoint.checkpoint_dir"),
        "lora_alpha": Learned("peft.alpha"),
        "dataset": Learned(
            "dataset.path_or_dataset_id", also=("dataset.dataset_name", "dataset.path_or_dataset")
        ),
        "trust_remote_code": Learned("model.trust_remote_code", False),
    },
)
