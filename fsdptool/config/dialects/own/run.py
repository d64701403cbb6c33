"""The run that a recipe describes; precision and mesh are those of the accelerate file beside it."""

from __future__ import annotations

from dataclasses import replace

from fsdptool.config.dialects.run_reader import (
    Learned,
    RunFile,
    RunKeys,
    RunReader,
    dtype_word,
    global_batch,
    state_bits,
)
from fsdptool.errors import ConfigError
from fsdptool.records.codec import from_json
from fsdptool.records.described_run import DescribedMesh, DescribedRun
from fsdptool.records.diagnostic import tool_version
from fsdptool.records.recipe import Recipe

LEARNING = {
    "learning_rate": Learned("optimizer.learning_rate", 1e-4),
    "weight_decay": Learned("optimizer.weight_decay", 0.1),
    "adam_beta1": Learned("optimizer.betas.0", 0.9),
    "adam_beta2": Learned("optimizer.betas.1", 0.95),
    "adam_epsilon": Learned("optimizer.epsilon", 1e-8),
    "max_grad_norm": Learned("optimizer.clip_grad_norm", 1.0),
    "scheduler": Learned(
        "schedule.name", "cosine", words={"constant": "constant", "linear": "linear", "cosine": "cosine"}
    ),
    "warmup_steps": Learned("schedule.warmup_steps", 0),
    "seed": Learned("seed", 0),
    "lora_alpha": Learned("method.lora.alpha", lambda run: 32.0 if run.lora_rank else None),
    "dataset": Learned("data.path"),
    "trust_remote_code": Learned("model.trust_remote_code", False),
}
_METHODS = {"nf4": "qlora", "int8": "lora8bit"}
_CHECKPOINTING = {"none": "none", "full": "full"}


def describe(file: RunFile) -> DescribedRun:
    """Return the run of a recipe."""
    read = RunReader(file, RunKeys("fsdptool", tool_version(), unknown="refused", learning=LEARNING))
    read.use(*map(str, file.data))
    try:
        recipe = from_json(Recipe, dict(file.data), where="recipe")
    except ConfigError as error:
        read.problems.append(error.message)
        return read.describe(model=read.text("model.reference"))
    model, lora, launch = recipe.model, recipe.method.lora, file.launch
    batch, sharding = recipe.batch, recipe.sharding
    adapter = recipe.method.name == "lora" and lora is not None
    compute = dtype_word(sharding.param_dtype) or dtype_word(launch.mixed_precision)
    stored = "fp32" if adapter or model.dtype == "auto" else dtype_word(model.dtype)
    base = lora.base if adapter and lora is not None else "unchanged"
    mesh = replace(launch.mesh or DescribedMesh(), ep=sharding.expert_parallel)
    mode = sharding.checkpointing.mode if sharding.checkpointing is not None else None
    if mode is None and launch.fsdp is not None:
        mode = "full" if launch.checkpointing else "none"
    fused = recipe.objective.fused
    unclipped = {} if recipe.optimizer.clip_grad_norm is not None else {"max_grad_norm": 0.0}
    accumulation = batch.accumulation if batch.global_batch is None else None
    described = read.describe(
        model=model.reference,
        family=model.reference if ":" in model.reference and "/" not in model.reference else None,
        method=_METHODS.get(base, "lora") if adapter else recipe.method.name,
        lora_rank=lora.rank if adapter and lora is not None else None,
        lora_dropout=lora.dropout if adapter and lora is not None else None,
        lora_targets=lora.targets if adapter and lora is not None else None,
        lora_modules_to_save=lora.modules_to_save if adapter and lora is not None else (),
        base_dtype=compute if model.dtype == "auto" else dtype_word(model.dtype),
        quantisation="none" if base == "unchanged" else base,
        stored_dtype=stored,
        compute_dtype=compute,
        reduce_dtype=dtype_word(sharding.reduce_dtype or sharding.param_dtype),
        objective=_objective(recipe),
        sequence_length=batch.sequence_length,
        height=batch.height,
        width=batch.width,
        frames=batch.frames,
        packing=recipe.data.packing,
        documents_joined=recipe.data.packing and not recipe.data.document_mask,
        micro_batch=batch.micro_batch,
        accumulation=accumulation,
        global_batch=batch.global_batch
        or global_batch(batch.micro_batch, accumulation, launch.processes, mesh),
        optimizer=recipe.optimizer.name,
        momentum=recipe.optimizer.momentum or None,
        optimizer_state_bits=state_bits(recipe.optimizer.name, stored),
        gradient_checkpointing=None if mode is None else _CHECKPOINTING.get(mode, "selective"),
        attention=model.attention,
        ema=recipe.ema.decay is not None,
        fused_loss=None if fused is None else "chunked" if fused else "none",
        compile=sharding.compile,
        processes=launch.processes,
        fsdp=launch.fsdp or 2,
        wrap_classes=launch.wrap_classes,
        reshard=sharding.reshard_after_forward or launch.reshard,
        cpu_offload=launch.cpu_offload,
        mesh=mesh,
        steps=recipe.steps,
        epochs=recipe.epochs,
    )
    return replace(described, learning={**described.learning, **unclipped})


def _objective(recipe: Recipe) -> str | None:
    """Return the objective; a recipe without one takes that of the model's family."""
    data, batch = recipe.data, recipe.batch
    if recipe.objective.name is not None:
        return recipe.objective.name
    if batch.height is not None:
        return "diffusion"
    if data.assistant_only_loss or {"messages_column", "prompt_column"} & data.options.keys():
        return "sft"
    return "pretrain" if batch.sequence_length is not None else None
