"""The run that a recipe describes; precision and mesh are those of the accelerate file beside it."""

from __future__ import annotations

from fsdptool.config.dialects.run_reader import (
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

_METHODS = {"nf4": "qlora", "int8": "lora8bit"}
_CHECKPOINTING = {"none": "none", "full": "full"}


def describe(file: RunFile) -> DescribedRun:
    """Return the run of a recipe."""
    read = RunReader(file, RunKeys("fsdptool", tool_version(), unknown="refused"))
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
    mesh = DescribedMesh(ep=sharding.expert_parallel)
    mode = sharding.checkpointing.mode if sharding.checkpointing is not None else None
    accumulation = batch.accumulation if batch.global_batch is None else None
    return read.describe(
        model=model.reference,
        family=model.reference if ":" in model.reference and "/" not in model.reference else None,
        method=_METHODS.get(base, "lora") if adapter else recipe.method.name,
        lora_rank=lora.rank if adapter and lora is not None else None,
        lora_targets=lora.targets if adapter and lora is not None else None,
        lora_modules_to_save=lora.modules_to_save if adapter and lora is not None else (),
        base_dtype=compute if model.dtype == "auto" else dtype_word(model.dtype),
        quantisation="none" if base == "unchanged" else base,
        stored_dtype=stored,
        compute_dtype=compute,
        reduce_dtype=dtype_word(sharding.reduce_dtype or sharding.param_dtype),
        objective=recipe.objective.name,
        sequence_length=batch.sequence_length,
        height=batch.height,
        width=batch.width,
        frames=batch.frames,
        packing=recipe.data.packing,
        micro_batch=batch.micro_batch,
        accumulation=accumulation,
        global_batch=batch.global_batch
        or global_batch(batch.micro_batch, accumulation, launch.processes, mesh),
        optimizer=recipe.optimizer.name,
        optimizer_state_bits=state_bits(recipe.optimizer.name, stored),
        gradient_checkpointing=None if mode is None else _CHECKPOINTING.get(mode, "selective"),
        attention=model.attention,
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
