"""The run that a command line of a training script of diffusers describes.

Source: diffusers 0.40.0.dev0 ``examples/dreambooth/train_dreambooth_lora_flux.py:1245-1358`` (dtypes of
base and adapters), ``train_dreambooth_flux.py:1173`` (fp32 weights),
``text_to_image/train_text_to_image_sdxl.py:705``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsdptool.config.dialects.diffusers import video_fun
from fsdptool.config.dialects.diffusers.run_keys import (
    BATCHES,
    BESIDE,
    CLIP,
    EPOCHS,
    KEYS,
    MODELS,
    RANKS,
    SCRIPT,
    SIDES,
    TARGETS,
)
from fsdptool.config.dialects.run_reader import (
    RunFile,
    RunReader,
    beside,
    dtype_word,
    global_batch,
    state_bits,
)
from fsdptool.records.described_run import DescribedMesh, DescribedRun, UnmodelledKey
from fsdptool.source.known_models import denoises, family_of_name

_FOUR_BITS = ("nf4", "fp4")


def describe(file: RunFile) -> DescribedRun | None:
    """Return the run of a command line; None where the name of its model says that it makes no images."""
    read = RunReader(file, KEYS)
    launch = file.launch
    script = launch.script.rpartition(".")[2].lower()
    model = _model(read, script)
    named = family_of_name(model)[0] if model else None
    if named is not None and not denoises(named):
        return None
    pairs = "diffusion_dpo" in script or "diffusion_orpo" in script
    adapter = "lora" in script or pairs or read.has("rank") or read.has("lora_rank")
    if pairs:  # both images of a pair, and DPO's forward pass without adapters
        read.unmodelled(f"{script}.py", "more")
    precision = read.text("mixed_precision") or launch.mixed_precision
    known = precision is not None or not launch.fsdp
    compute = dtype_word(precision or "no") if known else None
    base, quantisation = _quantised(read, compute) if adapter else (None, "none")
    stored = _stored(read, compute, quantisation, adapter=adapter)
    if video_fun.is_video_fun(read):
        video_fun.tell(read, script, adapter=adapter)
    frozen = any(word in script for word in BESIDE)
    micro = read.whole("train_batch_size") if read.has("train_batch_size") else _batch(read, script)
    accumulation = read.whole("gradient_accumulation_steps")
    processes = launch.processes if launch.processes and not read.has("gpu_ids") else None
    if launch.processes == 1 and launch.program == "accelerate":
        processes = None
    sharded = launch.fsdp is not None
    mesh = (
        DescribedMesh(dp_replicate=1, dp_shard=-1) if sharded else DescribedMesh(dp_replicate=-1, dp_shard=1)
    )
    optimizer = _optimizer(read)
    steps = read.whole("max_train_steps")
    epochs = None if steps else _epochs(read, script)
    read.use("num_train_epochs", "num_epochs")
    published = next((name for part, name in MODELS.items() if part in script), None)
    if launch.deepspeed:
        read.notes.append("DeepSpeed is out of scope: accelerate's FSDP2 is fsdp_version 2")
        read.unmodelled("use_deepspeed", "less")
    recomputes = read.flag("gradient_checkpointing") or launch.checkpointing
    run = read.describe(
        model=model,
        family=read.family_by(f"{script}.py", model, published),
        method="lora" if adapter else "full",
        lora_rank=_rank(read, script) if adapter else None,
        lora_dropout=read.number("lora_dropout") if adapter else None,
        lora_targets=_targets(read, script) if adapter else None,
        ema=read.flag("use_ema"),
        base_dtype=compute if frozen else base,
        quantisation=quantisation,
        stored_dtype=stored,
        compute_dtype=compute,
        objective="diffusion",
        micro_batch=micro,
        accumulation=accumulation,
        global_batch=global_batch(micro, accumulation, processes, mesh),
        optimizer=optimizer,
        optimizer_state_bits=state_bits(optimizer, stored),
        gradient_checkpointing="full" if recomputes else "none",
        attention="sdpa",
        fused_loss="none",
        compile=False,
        processes=processes,
        fsdp=launch.fsdp or "none",
        wrap_classes=(*(launch.wrap_classes or ()), "root") if sharded else (),
        reshard=launch.reshard,
        cpu_offload=launch.cpu_offload,
        mesh=mesh,
        steps=steps,
        epochs=epochs,
        **_sizes(read, script),
    )
    return _with_frozen(run, script) if frozen else run


def _with_frozen(run: DescribedRun, script: str) -> DescribedRun:
    keys = run.keys
    trained = UnmodelledKey(f"{script}.py", "memory")
    note = f"{script}.py trains a network beside the model, which stays frozen: that network is not planned"
    return replace(
        run,
        keys=replace(keys, not_modelled=(*keys.not_modelled, trained)),
        notes=(*run.notes, note),
    )


def _model(read: RunReader, script: str) -> str | None:
    transformer = "pretrained_transformer_model_name_or_path"
    named: tuple[str, ...] = ("pretrained_model_name_or_path", "pretrained_teacher_model")
    if read.has("pretrained_decoder_model_name_or_path") or read.has("pretrained_prior_model_name_or_path"):
        part = "prior" if "prior" in script else "decoder"
        named = (f"pretrained_{part}_model_name_or_path", *named)
    return read.text(transformer) if read.has(transformer) else read.text(*named)


def _optimizer(read: RunReader) -> str:
    optimizer = "adafactor" if read.flag("use_adafactor") else (read.text("optimizer") or "AdamW").lower()
    if read.flag("use_came"):
        optimizer = "came"
    # Of Adam, too (cogvideo/train_cogvideox_lora.py:get_optimizer); the scripts ignore it beside Prodigy.
    if read.flag("use_8bit_adam") and optimizer in ("adam", "adamw"):
        optimizer = f"{optimizer}8bit"
    return optimizer


def _stored(read: RunReader, compute: str | None, quantisation: str, *, adapter: bool) -> str | None:
    """Return the dtype of what trains.

    accelerate 1.15 casts it to fp32 where it shards and computes in less, adapters included, but for models
    with 4-bit weights (``utils/fsdp_utils.py:fsdp2_prepare_model``). Without FSDP the scripts of diffusers
    cast adapters of fp16 to fp32; those of VideoX-Fun leave everything in the dtype of the computation.
    """
    if read.file.launch.fsdp is not None and quantisation not in _FOUR_BITS:
        return "fp32" if compute is not None or not adapter else None
    if video_fun.is_video_fun(read):
        return compute
    return compute if adapter and compute != "fp16" else "fp32"


def _batch(read: RunReader, script: str) -> int | None:
    found = _of_script(read, script, "train_batch_size", BATCHES)
    if found is None:
        return read.whole("train_batch_size")
    return int(read.default("train_batch_size", found, f"examples: {script}.py"))


def _rank(read: RunReader, script: str) -> int | None:
    found = _of_script(read, script, "rank", RANKS)
    if found is None or read.has("rank") or read.has("lora_rank"):
        return read.whole("rank", "lora_rank")
    return int(read.default("rank", found, f"examples: {script}.py"))


def _of_script(read: RunReader, script: str, key: str, table: Mapping[str, int]) -> int | None:
    """Return a default of a script that is not that of most of them, or None."""
    if video_fun.is_video_fun(read):
        return video_fun.DEFAULTS[key]
    return next((value for part, value in table.items() if part in script), None)


def _quantised(read: RunReader, dtype: str | None) -> tuple[str | None, str]:
    """Return the dtype of a frozen base and its quantisation, which a file of bitsandbytes' options says."""
    name = read.text("bnb_quantization_config_path")
    options = beside(read.file, name) if name is not None else None
    eight, four, kind = (
        (options.get("load_in_8bit", False), options.get("load_in_4bit", False),
         options.get("bnb_4bit_quant_type", "fp4"))
        if isinstance(options, dict) else (None, None, None)
    )  # fmt: skip
    if not isinstance(eight, bool) or not isinstance(four, bool) or (four and kind not in _FOUR_BITS):
        read.used.pop("bnb_quantization_config_path", None)
        return dtype, "none"
    if eight:
        return "int8 (bitsandbytes)", "int8"
    return (f"{kind} (bitsandbytes)", str(kind)) if four else (dtype, "none")


def _epochs(read: RunReader, script: str) -> float | None:
    found = _of_script(read, script, "num_train_epochs", EPOCHS)
    if found is None or read.has("num_train_epochs") or read.has("num_epochs"):
        return read.number("num_train_epochs", "num_epochs")
    return float(read.default("num_train_epochs", found, f"examples: {script}.py"))


def _targets(read: RunReader, script: str) -> tuple[str, ...] | str:
    if video_fun.is_video_fun(read):
        return video_fun.targets(read)
    named = read.names("lora_layers")
    if named:
        return (named,) if isinstance(named, str) else named
    return next(targets for part, targets in TARGETS.items() if part in script)


def _sizes(read: RunReader, script: str) -> dict[str, Any]:
    if video_fun.is_video_fun(read):
        return video_fun.sizes(read)
    if "cogvideo" in script or read.has("max_num_frames"):
        sizes = {"height": "height", "width": "width", "frames": "max_num_frames"}
        if "cogvideo" not in script:
            return {name: read.whole(key) for name, key in sizes.items()}
        return {
            name: read.whole(key) if read.has(key) else read.default(key, *CLIP[key])
            for name, key in sizes.items()
        }
    if not read.has("resolution") and read.has("height") and read.has("width"):
        names = ("height", "width", "num_frames") if read.has("num_frames") else ("height", "width")
        return {name.removeprefix("num_"): read.whole(name) for name in names}
    if not read.has("resolution") and not SCRIPT.search(script):
        return {}  # what a copy does without is its own
    found = next((side for part, side in SIDES.items() if part in script), None)
    if found is not None and not read.has("resolution"):
        read.default("resolution", found, f"examples: {script}.py")
        return {"height": found, "width": found}
    side = read.whole("resolution")
    return {"height": side, "width": side}
