"""A recipe for a run, with its accelerate file; :mod:`fsdptool.config.dialects.own.run` reads them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast, get_args

from fsdptool.config.dialects.run_writer import RunWriter, dataset_id, optimizer_word
from fsdptool.config.recipe import dump_recipe
from fsdptool.config.writer import write_settings
from fsdptool.records.checkpointing import Checkpointing
from fsdptool.records.described_run import (
    QUANTISED_BASES,
    TOKEN_OBJECTIVES,
    TORCH_DTYPES,
    DescribedRun,
)
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import (
    Attention,
    Batch,
    Data,
    Distillation,
    Ema,
    Lora,
    Method,
    ModelChoice,
    Objective,
    Optimizer,
    OptimizerName,
    Recipe,
    Schedule,
    Sharding,
)
from fsdptool.records.sharding import FsdpSettings

_DTYPES = {**TORCH_DTYPES, "checkpoint": "bfloat16"}
_ATTENTION = {name: name for name in get_args(Attention)}
_OPTIMIZERS = get_args(OptimizerName)
_FROM_CONFIG = ("torchtitan", "automodel", "fsdptool")
"""Programs whose pretraining starts from random weights."""
_TRAINED = ("sft", "pretrain", "dpo", "orpo", "simpo", "classification", "diffusion")


def write(to: RunWriter) -> None:
    """Set the text of a recipe, and of the accelerate file beside it."""
    run = to.run
    to.need_objective(*_TRAINED)
    choice = _model(to)
    recipe = Recipe(
        choice,
        method=_method(to, choice),
        objective=_objective(to),
        data=_data(to),
        batch=_batch(to),
        optimizer=_optimizer(to),
        schedule=_schedule(to),
        sharding=_sharding(to),
        ema=Ema(0.999) if run.ema else Ema(),
        seed=int(run.learning.get("seed", 0)),
        **_end(to),
    )
    to.text = dump_recipe(recipe)
    to.beside[".accelerate.yaml"] = write_settings(_settings(to))
    known = {
        "learning_rate", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm",
        "scheduler", "warmup_steps", "warmup_ratio", "seed", "lora_alpha", "dataset", "trust_remote_code",
    }  # fmt: skip
    others = (name for name in run.learning if name not in known)
    to.lose("a recipe has no key for it", *(f"learning.{name}" for name in others))
    to.lose("the dtype of the model decides it", "stored_dtype", "base_dtype", "optimizer_state_bits")


def _model(to: RunWriter) -> ModelChoice:
    run = to.run
    frozen = run.method not in (None, "full")
    dtype = run.base_dtype if frozen else run.stored_dtype
    attention = to.choice("attention", _ATTENTION) or "sdpa"
    reference = to.model() or run.family or ""
    if run.objective == "diffusion" and run.family is not None:
        reference = run.family
        to.lose(
            "the recipe names the denoiser by its family: give its folder for the weights", "model", "family"
        )
    # Where the other program starts from a checkpoint, random weights must not take its place.
    starts = run.objective == "diffusion" or (run.objective == "pretrain" and run.program in _FROM_CONFIG)
    return ModelChoice(
        reference,
        weights="auto" if starts else "pretrained",
        dtype=cast("Any", _DTYPES.get(dtype or "", "auto")),
        attention=cast("Any", attention),
        trust_remote_code=run.learning.get("trust_remote_code") is True,
    )


def _method(to: RunWriter, choice: ModelChoice) -> Method:
    run = to.run
    if run.method in (None, "full"):
        if run.objective == "dpo":
            to.lose("the reference of dpo is the teacher of a distillation", "method")
            return Method("distillation", distillation=Distillation(choice, alpha=1.0))
        return Method()
    if run.method not in ("lora", *QUANTISED_BASES):
        why = f"recipes have no method {run.method}: every parameter trains"
        to.lose(
            why, "method", "lora_rank", "lora_targets", "lora_dropout", "lora_modules_to_save", "quantisation"
        )
        to.lose(why, "learning.lora_alpha")
        return Method()
    base = QUANTISED_BASES.get(str(run.method), "unchanged")
    to.lose("a recipe names the base by its format: nf4, int8, float8", "quantisation")
    targets = run.lora_targets
    names = (targets,) if isinstance(targets, str) else targets or ()
    wild = not isinstance(targets, str) and any("*" in name for name in names)
    if wild or any(" " in name for name in names):
        to.lose("all linear layers of the blocks are adapted", "lora_targets")
        targets = "all-linear"
    rank = max(run.lora_rank or 16, 1)
    return Method(
        "lora",
        Lora(
            rank=min(rank, 1 << 16),
            alpha=float(run.learning.get("lora_alpha", 2 * rank)),
            dropout=run.lora_dropout or 0.0,
            targets=targets,
            modules_to_save=run.lora_modules_to_save,
            base=cast("Any", base),
        ),
    )


def _objective(to: RunWriter) -> Objective:
    run = to.run
    name = run.objective
    if name == "dpo" and run.method not in (None, "full"):
        to.lose(
            "recipes train dpo without adapters alone: orpo has the same pairs without a reference",
            "objective",
        )
        name = "orpo"
    if name in (None, "sft", "pretrain", "diffusion"):
        to.lose("recipes train every token, unless data.options names messages or prompts", "objective")
        name = None
    fused = None
    if run.objective in TOKEN_OBJECTIVES and run.fused_loss is not None:
        fused = run.fused_loss != "none"
    to.lose("recipes compute the loss whole or in chunks", "fused_loss")
    return Objective(name, fused=fused)


def _data(to: RunWriter) -> Data:
    run = to.run
    packing = run.packing is not False
    if run.objective == "diffusion":
        packing = True
    name = dataset_id(run.learning.get("dataset"))
    if name is None:
        to.lose("the recipe trains on generated samples until you name yours under data:", "learning.dataset")
        return Data(packing=packing, document_mask=not run.documents_joined)
    return Data("dataset", name, packing=packing, document_mask=not run.documents_joined)


def _batch(to: RunWriter) -> Batch:
    run = to.run
    if run.micro_batch is None:
        to.lose("left open by the source: 1 is written", "micro_batch")
    if run.sequence_length is None and run.objective != "diffusion":
        to.lose("left open by the source: give batch.sequence_length", "sequence_length")
    batch = Batch(
        micro_batch=run.micro_batch or 1,
        sequence_length=run.sequence_length,
        height=run.height,
        width=run.width,
        frames=run.frames,
    )
    to.lose("recipes have sides of pictures, and no area", "pixel_area")
    to.lose("the accumulation and the ranks decide it", "global_batch")
    if run.accumulation is None and run.global_batch is not None:
        to.lose("the global batch and the ranks decide it", "accumulation")
        return replace(batch, global_batch=run.global_batch)
    if run.accumulation is None:
        to.lose("left open by the source: 1 is written", "accumulation")
    return replace(batch, accumulation=run.accumulation or 1)


def _optimizer(to: RunWriter) -> Optimizer:
    run, learning = to.run, to.run.learning
    name = optimizer_word(run.optimizer)
    if name not in _OPTIMIZERS:
        to.lose(f"recipes have {', '.join(_OPTIMIZERS)}", "optimizer", "optimizer_state_bits")
        name = "adamw8bit" if run.optimizer_state_bits == 8 else "adamw"
    default = Optimizer()
    clip = learning.get("max_grad_norm", default.clip_grad_norm)
    return Optimizer(
        name=cast("Any", name),
        learning_rate=float(learning.get("learning_rate", default.learning_rate)),
        betas=(
            float(learning.get("adam_beta1", default.betas[0])),
            float(learning.get("adam_beta2", default.betas[1])),
        ),
        epsilon=float(learning.get("adam_epsilon", default.epsilon)),
        weight_decay=float(learning.get("weight_decay", default.weight_decay)),
        momentum=run.momentum if run.momentum is not None and 0 <= run.momentum < 1 else default.momentum,
        clip_grad_norm=float(clip) if clip else None,
    )


def _schedule(to: RunWriter) -> Schedule:
    run, learning = to.run, to.run.learning
    name = learning.get("scheduler", "cosine")
    if name not in ("constant", "linear", "cosine"):
        to.lose("recipes have constant, linear and cosine", "learning.scheduler")
        name = "constant" if str(name).startswith("constant") else "cosine"
    steps = learning.get("warmup_steps", 0)
    ratio = learning.get("warmup_ratio")
    if ratio:
        to.lose("recipes count the steps of the warm-up", "learning.warmup_ratio", "learning.warmup_steps")
        steps = round(float(ratio) * run.steps) if run.steps is not None else 0
    return Schedule(cast("Any", name), max(0, int(steps)))


def _sharding(to: RunWriter) -> Sharding:
    run = to.run
    selective = run.gradient_checkpointing == "selective"
    number = run.reshard if type(run.reshard) is int and run.reshard > 0 else None
    if run.activation_offloading or run.gradient_checkpointing == "offload":
        why = "recipes keep the inputs of blocks in host memory (activation_checkpointing_offload)"
        to.lose(why, "activation_offloading", "gradient_checkpointing")
    reduce = _DTYPES.get(run.reduce_dtype or "", "float32")
    return Sharding(
        reduce_dtype=cast("Any", reduce),
        reshard_after_forward=number,
        checkpointing=Checkpointing("selective") if selective else None,
        compile=run.compile,
        expert_parallel=run.mesh.ep or 1,
    )


def _end(to: RunWriter) -> dict[str, Any]:
    run = to.run
    if run.steps is not None:
        to.lose("the steps end the run", "epochs")
        return {"steps": run.steps}
    if run.epochs is None:
        to.lose("left open by the source: one pass is written", "epochs")
    return {"epochs": run.epochs or 1.0}


def _settings(to: RunWriter) -> FsdpSettings:
    run, mesh = to.run, to.run.mesh
    compute = run.compute_dtype
    if compute == "fp8":
        to.lose("what is written computes in bf16", "compute_dtype")
    settings = replace(
        to.settings(),
        activation_checkpointing=run.gradient_checkpointing not in (None, "none", "selective"),
        activation_checkpointing_offload=run.gradient_checkpointing == "offload",
        mixed_precision="no" if compute == "fp32" else "fp16" if compute == "fp16" else "bf16",
        num_processes=run.processes,
        num_machines=run.nodes or 1,
    )
    if run.fsdp == "none":
        to.lose(
            "recipes are trained with FSDP2: each rank holds a share instead of a copy", "fsdp", "reshard"
        )
    to.lose("recipes have no pipeline", "mesh.pp")
    dims = _dims(run, mesh.cp or 1, mesh.tp or 1)
    if run.processes is None and dims.dp_shard is not None:
        to.lose(
            "accelerate needs every size, and the source leaves the ranks open", "mesh.dp_shard", "processes"
        )
        settings = replace(settings, num_processes=dims.other_sizes * dims.dp_shard)
    return replace(settings, mesh=dims)


def _dims(run: DescribedRun, cp: int, tp: int) -> ParallelDims:
    mesh = run.mesh
    replicas = mesh.dp_replicate if run.fsdp != "none" and mesh.dp_replicate and mesh.dp_replicate > 0 else 1
    shard = mesh.dp_shard if run.fsdp != "none" and mesh.dp_shard and mesh.dp_shard > 0 else None
    if replicas * cp * tp == 1:
        return ParallelDims()  # every rank shards
    if shard is None:
        shard = max(1, (run.processes or 0) // (replicas * cp * tp))
    return ParallelDims(dp_replicate=replicas, dp_shard=shard, cp=cp, tp=tp)
