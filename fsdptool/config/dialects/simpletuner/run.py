"""The run that a SimpleTuner file describes, with the data backend that it names.

Source: SimpleTuner 4.8.0 ``helpers/configuration/cmd_args.py:982-1109`` (steps, dtype of weights),
``helpers/training/optimizers/adamw_bfloat16`` (three states in bf16), ``helpers/training/trainer.py:3898``.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import PurePath
from typing import Any

from fsdptool.config.dialects.run_reader import (
    RunFile,
    RunReader,
    beside,
    dtype_word,
    global_batch,
    state_bits,
)
from fsdptool.config.dialects.simpletuner.run_keys import (
    DEFAULT_FLAVOURS,
    ENVIRONMENT,
    FLUX_TARGETS,
    KEYS,
    LORA_TARGETS,
    MODELS,
    ONE_SIZE,
    PLAIN_TARGETS,
    SWITCHES,
)
from fsdptool.records.described_run import DescribedMesh, DescribedRun

_LARGEST = 1 << 16
"""Pixels beyond the side of every image that is trained on."""
_TRAINED = frozenset({"image", "video", "audio", ""})
_SHELL = frozenset({"MODEL_TYPE", "TRAINER_EXTRA_ARGS", "TRAIN_BATCH_SIZE"})
"""Variables of every shell file."""
_PLAIN = {"gradient_checkpointing_interval": "1", "gradient_checkpointing_backend": "torch"}
"""Keys, and the values with which the program does as without them."""
_EDITS = re.compile(r"kontext|qwen-image-edit|hidream-e1", re.IGNORECASE)
"""Models that append the patches of a conditioning image to those of the image that trains.

They train on nothing else (``requires_conditioning_dataset``). Kandinsky 5's ``i2i`` is not among them: its
image is further channels of the same patches (``helpers/models/kandinsky5_image/model.py``).
"""


def describe(file: RunFile) -> DescribedRun:
    """Return the run of a file or a command line."""
    shell = any(str(key) in _SHELL for key in file.data)
    further = _unknown_words(str(file.data.get("TRAINER_EXTRA_ARGS") or "")) if shell else ()
    file = replace(file, data=_flags(file.data, shell))
    # A shell file sets variables for other programs, too: one that is not a flag here is not refused.
    read = RunReader(file, replace(KEYS, unknown="dropped") if shell else KEYS)
    for word in further:
        read.unread_elsewhere(f"TRAINER_EXTRA_ARGS: {word} is a variable, which is not resolved")
    launch = file.launch
    model, family = _model(read)
    for key, plain in _PLAIN.items():
        if str(read.raw(key)).lower() == plain:
            read.inert(key)
    method = (read.text("model_type") or "full").lower()
    adapter = method == "lora"
    standard = adapter and (read.text("lora_type") or "standard").lower() == "standard"
    dtype = _weights(read)
    precision = (read.text("base_model_precision") or "no_change").lower()
    base, quantisation = _base(precision, dtype)
    named = (read.text("optimizer") or "").lower()
    optimizer = named.replace("-", "_") if named in ("adamw-bf16", "adamw-8bit") else named
    if optimizer != named:
        read.problems.append(f"optimizer {named} is not a name of SimpleTuner 4.8: read as {optimizer}")
    fsdp = launch.fsdp or (read.whole("fsdp_version") if read.flag("fsdp_enable") else None)
    cp = read.whole("context_parallel_size") or 1
    # Ranks that share a sample are more than one process, whose number the launcher then decides.
    counted = read.has("num_processes") or cp < 2
    processes = launch.processes or (read.whole("num_processes") if counted else None)
    read.use(
        "fsdp_reshard_after_forward", "fsdp_cpu_offload", "fsdp_activation_checkpointing", "mixed_precision"
    )
    micro, accumulation = read.whole("train_batch_size"), read.whole("gradient_accumulation_steps")
    replicas = 1 if fsdp or (processes or 1) == 1 else -1
    mesh = DescribedMesh(dp_replicate=replicas, dp_shard=-1 if fsdp else 1, cp=cp)
    steps = read.whole("max_train_steps")
    epochs = None if steps else read.number("num_train_epochs")
    read.use("num_train_epochs", "lora_alpha")
    attention = read.text("attention_mechanism") or "diffusers"
    recomputes = read.flag("gradient_checkpointing") or read.flag("fsdp_activation_checkpointing")
    if model is not None and _EDITS.search(model):
        read.unmodelled("conditioning_data", "more")
    return read.describe(
        model=model,
        family=family,
        method=method,
        lora_rank=read.whole("lora_rank") if standard else None,
        lora_dropout=read.number("lora_dropout") if standard else None,
        lora_targets=_targets(read) if standard else None,
        ema=read.flag("use_ema") and read.text("ema_device") == "accelerator",
        base_dtype=base if adapter else None,
        quantisation=quantisation,
        stored_dtype=dtype,
        compute_dtype=dtype_word(read.text("mixed_precision")) or "bf16",
        reduce_dtype=None,
        objective="diffusion",
        micro_batch=micro,
        accumulation=accumulation,
        global_batch=global_batch(micro, accumulation, processes, mesh),
        optimizer=optimizer,
        optimizer_state_bits=16 if optimizer.endswith("bf16") else state_bits(optimizer, dtype),
        gradient_checkpointing="full" if recomputes else "none",
        attention="sdpa" if attention == "diffusers" else attention,
        fused_loss="none",
        compile=(read.text("dynamo_backend") or "no").lower() != "no",
        processes=processes,
        fsdp=fsdp if fsdp in (1, 2) else "none",
        wrap_classes=_classes(read, launch.wrap_classes) if fsdp else (),
        reshard=(read.raw("fsdp_reshard_after_forward") not in (False, "false")) if fsdp else None,
        cpu_offload=launch.cpu_offload or read.flag("fsdp_cpu_offload"),
        mesh=mesh,
        steps=steps or None,
        epochs=epochs or None,
        **_sizes(read, file),
    )


def _flags(data: Mapping[str, Any], shell: bool) -> dict[str, Any]:
    """Return the keys without leading dashes; of a shell file the flags that its variables stand for."""
    plain = {str(key).lstrip("-").replace("-", "_"): value for key, value in data.items()}
    if not shell:
        return plain
    flags: dict[str, Any] = {"model_family": "sdxl"}
    for key, value in plain.items():
        if key in SWITCHES:
            flags |= {"model_family": SWITCHES[key]} if str(value).lower() == "true" else {}
        elif key == "TRAINER_EXTRA_ARGS":
            flags |= dict(_extra(str(value)))
        elif key == "ACCELERATE_EXTRA_ARGS":
            flags |= {name: told for name, told in _extra(str(value)) if name == "num_processes"}
        else:
            flags[ENVIRONMENT.get(key, key.lower())] = value
    return flags


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _unknown_words(text: str) -> tuple[str, ...]:
    """Return the words that a shell puts in, and that may be any flags."""
    words = _words(text)
    flags = [word.startswith("--") and "=" not in word for word in words]
    after = zip(words, (False, *flags), strict=False)
    return tuple(word for word, valued in after if word.startswith(("$", "`")) and not valued)


def _extra(text: str) -> Iterable[tuple[str, Any]]:
    words = _words(text)
    for word, after in zip_longest(words, words[1:], fillvalue="--"):
        name, equals, value = word.partition("=")
        if name.startswith("--"):
            yield name[2:].replace("-", "_"), value if equals else True if after.startswith("--") else after


def _model(read: RunReader) -> tuple[str | None, str | None]:
    """Return the model, and its size in the catalogue where not its name but its family says that."""
    family = (read.text("model_family") or "").lower().replace("z-image", "z_image")
    flavour = read.text("model_flavour", "model_flavor")
    named = read.text("pretrained_transformer_model_name_or_path", "pretrained_model_name_or_path")
    read.use("pretrained_model_name_or_path")
    known = MODELS.get(family, {})
    if named is not None:
        alone = DEFAULT_FLAVOURS.get(family) if family in ONE_SIZE else None
        return named, read.family_by("model_family", named, known.get((flavour or alone or "").lower()))
    if flavour is None and family in DEFAULT_FLAVOURS:
        source = "helpers/models/*/model.py: DEFAULT_MODEL_FLAVOUR"
        flavour = str(read.default("model_flavour", DEFAULT_FLAVOURS[family], source))
    return known.get((flavour or "").lower()) or f"{family} {flavour or ''}".strip() or None, None


def _targets(read: RunReader) -> tuple[str, ...]:
    """Return the layers with adapters: those that are named, or those of the family."""
    named = read.names("peft_lora_target_modules")
    family = (read.text("model_family") or "").lower()
    if named is not None:
        return (named,) if isinstance(named, str) else named
    if family in ("flux", "chroma"):
        return FLUX_TARGETS.get(read.text("flux_lora_target") or "all", PLAIN_TARGETS)
    return LORA_TARGETS.get(family, PLAIN_TARGETS)


def _weights(read: RunReader) -> str:
    """Return the dtype of the weights that train (cmd_args.py:1109)."""
    mixed = dtype_word(read.text("mixed_precision")) or "bf16"
    quantised = (read.text("base_model_precision") or "no_change") not in ("no_change", "bf16")
    if mixed == "bf16" or (quantised and read.text("base_model_default_dtype") == "bf16"):
        return "bf16"
    return mixed


def _base(precision: str, dtype: str) -> tuple[str, str]:
    """Return the dtype of a frozen base and its quantisation."""
    kind, _, library = precision.partition("-")
    if precision in ("no_change", "bf16", "fp32", "fp16"):
        return dtype, "none"
    word = "float8" if kind.startswith("fp8") else kind
    return f"{word} ({library})", word


def _classes(read: RunReader, launched: tuple[str, ...] | None) -> tuple[str, ...]:
    own = read.names("fsdp_transformer_layer_cls_to_wrap")
    listed = own if isinstance(own, tuple) else (own,) if own else launched or ()
    wraps = str(read.raw("fsdp_auto_wrap_policy") or "TRANSFORMER_BASED_WRAP").upper()
    if not listed and wraps == "TRANSFORMER_BASED_WRAP":
        listed = ("the model's _no_split_modules",)
    return (*listed, "root")


def _sizes(read: RunReader, file: RunFile) -> dict[str, Any]:
    """Return the sizes of the samples that train: the data backend's values win over the file's."""
    own = (read.number("resolution"), read.text("resolution_type") or "pixel_area")
    named = read.text("data_backend_config")
    stem = PurePath(file.path).stem if file.path is not None else None
    backends = beside(file, named, f"{stem}.multidatabackend.json" if stem else None)
    if not isinstance(backends, list):
        if named is not None:
            read.problems.append(f"data_backend_config {named} is not read: its sizes would count")
        area = _area(*own)
        side = round(area**0.5) if area is not None and own[1] == "pixel" else None
        return {"height": side, "width": side, "pixel_area": area}
    trained = [
        item
        for item in backends
        if isinstance(item, Mapping)
        and str(item.get("dataset_type", "")) in _TRAINED
        and not item.get("disabled")
    ]
    areas, squares, frames = [], [], []
    for item in trained:
        size = item.get("resolution", own[0])
        kind = str(item.get("resolution_type", own[1]))
        area = _area(size, kind)
        if area is not None:
            areas.append(area)
        cropped = (
            str(item.get("crop", "false")).lower() == "true" and item.get("crop_aspect", "square") == "square"
        )
        squares.append(cropped)
        video = item.get("video")
        count = video.get("num_frames") if isinstance(video, Mapping) else None
        if isinstance(count, int):
            frames.append(count)
    largest = max(areas, default=None)
    side = round(largest**0.5) if largest is not None and squares and all(squares) else None
    return {"height": side, "width": side, "frames": max(frames, default=None), "pixel_area": largest}


def _area(size: object, kind: str) -> int | None:
    """Return the pixels of a resolution: a side, or megapixels of which 1.0 is 1024 x 1024."""
    try:
        value = float(str(size))
    except ValueError:
        return None
    if not 0 < value < _LARGEST:
        return None
    return round(value * 1024 * 1024) if kind == "area" else round(value * value)
