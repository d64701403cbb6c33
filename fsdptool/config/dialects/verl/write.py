"""A file of verl for a run: of its SFT trainer, or of its trainer of rewards.

:mod:`fsdptool.config.dialects.verl.run` reads the keys. verl reads such a file through Hydra, over its own
defaults: ``--config-path FOLDER --config-name NAME``.
"""

from __future__ import annotations

from fsdptool.config.dialects.run_writer import RunWriter
from fsdptool.config.dialects.verl.run_keys import ENGINE, RL

_DTYPES = {"bf16": "bf16", "fp32": "fp32", "checkpoint": "bf16"}
_ESTIMATORS = {"ppo": "gae", "grpo": "grpo"}
_ACTOR, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"


def write(to: RunWriter) -> None:
    """Set the keys of a verl file."""
    run = to.run
    to.need_objective("sft", "pretrain", *_ESTIMATORS)
    rewarded = run.objective in _ESTIMATORS
    if run.objective == "pretrain":
        to.lose("verl trains samples", "objective")
    to.put("hydra.searchpath", ["pkg://verl.trainer.config"])
    to.put("defaults", ["ppo_trainer" if rewarded else "sft_trainer_engine", "_self_"])
    model, engine = (_MODEL, f"{_ACTOR}.fsdp_config") if rewarded else ("model", "engine")
    to.put("data.train_files", to.dataset())
    if run.program != to.program:
        to.lose("verl reads parquet files with columns of its own", "learning.dataset")
    to.put(f"{model}.path", to.model())
    _method(to, model)
    to.put(f"{model}.enable_gradient_checkpointing", run.gradient_checkpointing not in (None, "none"))
    to.lose("verl recomputes whole layers", "gradient_checkpointing")
    to.lose("verl keeps activations on the device", "activation_offloading")
    (_rewarded if rewarded else _tuned)(to)
    _sharding(to, f"{_ACTOR}.strategy" if rewarded else "engine.strategy", engine)
    stored = run.stored_dtype if run.method in (None, "full") else run.base_dtype
    to.put(f"{engine}.model_dtype", _DTYPES.get(stored or ""))
    to.lose("verl holds what trains in fp32 or bf16 (model_dtype)", "stored_dtype", "base_dtype")
    to.lose("verl holds what trains in fp32 or bf16 (model_dtype)", "optimizer_state_bits")
    to.lose("verl computes in bf16 and reduces in fp32", "compute_dtype", "reduce_dtype")
    to.lose("verl pads no samples and packs none", "packing", "documents_joined")
    to.lose("verl runs AdamW", "optimizer", "optimizer_state_bits")
    to.lose("verl runs flash_attention_2", "attention")
    to.lose("verl compiles nothing in this plan", "compile")
    to.put("trainer.total_training_steps", run.steps)
    to.put("trainer.total_epochs", run.epochs if run.epochs is None else max(1, round(run.epochs)))
    to.lose("verl counts whole passes", "epochs")
    to.put_learning(
        (RL if rewarded else ENGINE).learning, "dataset", "adam_beta1", "adam_beta2", "max_grad_norm"
    )
    to.put_clipping(f"{_ACTOR}.grad_clip" if rewarded else "optim.clip_grad")
    betas = [run.learning.get("adam_beta1", 0.9), run.learning.get("adam_beta2", 0.999)]
    to.put(f"{_ACTOR}.optim.betas" if rewarded else "optim.betas", betas)


def _method(to: RunWriter, model: str) -> None:
    run = to.run
    adapters = run.method in ("lora", "qlora", "lora8bit")
    if adapters:
        to.put(f"{model}.lora_rank", run.lora_rank)
        to.put(f"{model}.target_modules", to.targets())
    to.lose("verl trains every parameter, or adapters over an unquantised base", "method", "quantisation")
    to.lose("verl's adapters drop nothing", "lora_dropout")
    to.lose("verl has no modules that train beside the adapters", "lora_modules_to_save")


def _tuned(to: RunWriter) -> None:
    run = to.run
    to.put("data.train_batch_size", to.total_batch())
    to.put("data.use_dynamic_bsz", False)
    to.put("data.micro_batch_size_per_gpu", run.micro_batch)
    if run.micro_batch is None:
        to.lose("left open by the source: verl takes 4", "micro_batch")
    to.put("data.max_length", run.sequence_length)
    if run.sequence_length is None:
        to.lose("left open by the source: verl takes 1024", "sequence_length")
    to.lose("follows from the ranks, which are given at the launch", "accumulation", "processes")
    to.lose("verl's SFT trainer keeps whole logits", "fused_loss")


def _rewarded(to: RunWriter) -> None:
    run, learning = to.run, to.run.learning
    to.put("algorithm.adv_estimator", _ESTIMATORS[run.objective or ""])
    answers = int(learning.get("completions", 1))
    total = to.total_batch()
    prompts = max(1, (total or answers) // answers)
    if total is not None and prompts * answers != total:
        to.lose(f"verl counts prompts of {answers} answers", "global_batch")
    to.put("data.train_batch_size", prompts)
    to.put(f"{_ACTOR}.ppo_mini_batch_size", prompts)
    to.put(f"{_ACTOR}.ppo_micro_batch_size_per_gpu", run.micro_batch or 1)
    if run.micro_batch is None:
        to.lose("verl needs one: 1 is written", "micro_batch")
    prompt, answer = learning.get("prompt_length"), learning.get("completion_length")
    if prompt is None and answer is not None and run.sequence_length is not None:
        to.put("data.max_prompt_length", run.sequence_length - int(answer))
    elif answer is None and run.sequence_length is not None:
        to.put("data.max_prompt_length", run.sequence_length // 2)
        to.put("data.max_response_length", run.sequence_length - run.sequence_length // 2)
    if run.sequence_length is None:
        to.lose("verl limits prompts as well: at 512 tokens", "sequence_length")
    to.put(f"{_MODEL}.use_fused_kernels", run.fused_loss in ("cce", "liger", "chunked"))
    to.lose("verl fuses the loss by its own kernels", "fused_loss")
    if run.processes is not None:
        nodes = run.nodes if run.nodes and run.processes % run.nodes == 0 else None
        if nodes is None:
            nodes = 1 if run.processes % 8 or run.processes < 16 else run.processes // 8
        to.put("trainer.n_gpus_per_node", run.processes // nodes)
        to.put("trainer.nnodes", nodes)
    to.lose("follows from the number of ranks (trainer.n_gpus_per_node)", "accumulation", "global_batch")


def _sharding(to: RunWriter, strategy: str, engine: str) -> None:
    run, mesh = to.run, to.run.mesh
    to.put(strategy, "fsdp2")
    to.lose("verl shards with FSDP2", "fsdp", "mesh.dp_shard", "mesh.dp_replicate")
    to.put(f"{engine}.reshard_after_forward", run.reshard if isinstance(run.reshard, bool) else None)
    to.lose("only true and false can be said", "reshard")
    to.put(f"{engine}.offload_policy", bool(run.cpu_offload))
    named = mesh.dp_shard is not None and mesh.dp_shard > 0 and run.fsdp != "none"
    # Ranks that share a sequence hold shards of their own.
    to.put(f"{engine}.fsdp_size", (mesh.dp_shard or 1) * (mesh.cp or 1) if named else -1)
    ulysses = f"{_ACTOR}.ulysses_sequence_parallel_size"
    to.put("engine.ulysses_sequence_parallel_size" if engine == "engine" else ulysses, mesh.cp or 1)
    to.lose("verl divides sequences alone", "mesh.tp", "mesh.ep", "mesh.pp")
    to.lose("verl wraps the layers of the model", "wrap_classes")
