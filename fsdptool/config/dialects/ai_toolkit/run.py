"""The run that an ai-toolkit file describes: the first process that trains.

Source: ai-toolkit 0.12.26 ``toolkit/config_modules.py``, ``jobs/process/BaseSDTrainProcess.py:117,1899,1983``
(adapters in fp32), ``toolkit/buckets.py:21`` (sizes keep the area of a square).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsdptool.config.dialects.ai_toolkit.run_keys import ARCHITECTURES, KEYS, SWITCHES, TRAINERS
from fsdptool.config.dialects.run_reader import RunFile, RunReader, area_of, dtype_word, state_bits
from fsdptool.records.described_run import DescribedMesh, DescribedRun

_QUANTISED = {
    "qfloat8": ("float8 e4m3 (quanto qfloat8)", "float8"),
    "float8": ("float8 e4m3 (torchao)", "float8"),
    "qint8": ("int8 (quanto)", "int8"),
    "int8": ("int8 (torchao)", "int8"),
    "qint4": ("int4 (quanto)", "int4"),
    "convrot8": ("int8 (convrot8)", "int8"),
}
"""``qtype`` (without the path behind a bar), the dtype of the base and the quantisation."""
_LARGEST = 1 << 16
"""Pixels beyond the side of every image that is trained on."""
_CHOOSE = frozenset({"ignore_if_contains", "only_if_contains"})
"""Arguments of a network that leave layers without adapters (toolkit/lora_special.py)."""
_EDITS = re.compile(r"(?:qwen_image_edit(?:_plus)?|flux_kontext|omnigen2|hidream_e1|flux2.*)(?::.*)?")
"""Architectures that append the patches of control images to those of the image; a variant follows ``:``."""
_TARGETS = "linear layers of the transformer blocks"


def describe(file: RunFile) -> DescribedRun | None:
    """Return the run of a file; None where no process trains."""
    process = _process(file.data)
    if process is None:
        return None
    read = RunReader(replace(file, data=process), KEYS)
    dtype = dtype_word(read.text("train.dtype")) or "fp32"
    network = read.raw("network")
    adapter = isinstance(network, Mapping)
    kind = (read.text("network.type") or "lora").lower() if adapter else ""
    low_rank = kind in ("lora", "lierla", "locon", "dora") or (
        kind == "lokr" and not read.flag("network.lokr_full_rank")
    )
    chosen = read.raw("network.network_kwargs")
    if isinstance(chosen, Mapping) and chosen and chosen.keys() <= _CHOOSE:
        read.unmodelled("network.network_kwargs", "less")
    told = read.raw("model.model_kwargs")
    if isinstance(told, Mapping) and told.keys() <= {"llama_model_path"}:
        read.inert("model.model_kwargs")
    base, quantisation = _base(read, dtype)
    beside = not adapter and _trains_beside(read)
    if (read.text("type") or "") not in TRAINERS:
        read.unmodelled("type")
    model = read.text("model.name_or_path")
    architecture, decided_by = _architecture(read)
    micro, steps = read.whole("train.batch_size"), read.whole("train.steps")
    legacy = read.whole("train.gradient_accumulation_steps")
    accumulation = read.whole("train.gradient_accumulation") or 1
    if legacy is not None and legacy > 1 and accumulation == 1:
        accumulation = legacy
        read.notes.append("gradient_accumulation_steps: every micro-batch counts as a step")
        steps = steps // legacy if steps else steps
    if read.has("train.gradient_accumulation") and (legacy or 1) > 1:
        read.problems.append("gradient_accumulation and gradient_accumulation_steps exclude each other")
    sides, frames = _datasets(read)
    area = area_of(sides) or (_slider_area(read) if read.text("type") == "slider" else None)
    if (read.raw("sample.num_frames") or 1) != 1 and frames == 1:
        read.notes.append("sample.num_frames concerns samples only: images are trained")
    optimizer = (read.text("train.optimizer") or "adamw").lower()
    stored = "fp32" if adapter else dtype
    attention = (read.text("train.attention_backend") or "native").lower()
    return read.describe(
        model=model,
        family=read.family_by(decided_by, model, ARCHITECTURES.get(architecture)),
        method="lora" if adapter else "full",
        lora_rank=_rank(read) if adapter and low_rank else None,
        lora_targets=_TARGETS if adapter else None,
        ema=read.flag("train.ema_config.use_ema"),
        base_dtype=base if adapter or beside else None,
        quantisation=quantisation,
        stored_dtype=stored,
        compute_dtype=dtype,
        objective="diffusion",
        frames=frames,
        pixel_area=area,
        micro_batch=micro,
        accumulation=accumulation,
        global_batch=micro * accumulation if micro is not None else None,
        optimizer=optimizer,
        optimizer_state_bits=None if optimizer == "adafactor" else state_bits(optimizer, stored),
        gradient_checkpointing="full" if read.flag("train.gradient_checkpointing") else "none",
        attention="sdpa" if attention == "native" else attention,
        fused_loss="none",
        compile=read.flag("model.compile"),
        processes=1,
        fsdp="none",
        wrap_classes=(),
        cpu_offload=False,
        mesh=DescribedMesh(dp_replicate=1, dp_shard=1),
        steps=steps,
    )


def _process(data: Mapping[str, Any]) -> Mapping[str, Any] | None:
    config = data.get("config")
    listed = config.get("process") if isinstance(config, Mapping) else None
    listed = listed if isinstance(listed, list) else ()
    found = (item for item in listed if isinstance(item, Mapping) and "train" in item)
    return next(found, None)


def _rank(read: RunReader) -> int | None:
    """Return the rank; its old name wins (``NetworkConfig``)."""
    return read.whole("network.rank") if read.has("network.rank") else read.whole("network.linear")


def _trains_beside(read: RunReader) -> bool:
    """Whether something beside the model trains, and the model itself does not (``is_fine_tuning``)."""
    key = next((key for key in ("embedding", "decorator") if read.has(key)), None)
    key = "adapter" if read.switched_on("adapter.train") else key
    if key is not None:
        read.notes.append(f"{key}: the model stays frozen beside what is trained, which is not planned")
    return key is not None


def _architecture(read: RunReader) -> tuple[str, str]:
    """Return the architecture, with the variant behind a colon where that says the size, and what says it."""
    named = read.text("model.arch")
    switched = ((arch, f"model.{key}") for key, arch in SWITCHES.items() if read.switched_on(f"model.{key}"))
    default = ("sd1", "the default of model.arch")
    arch, key = (named.lower(), "model.arch") if named else next(switched, default)
    return arch if arch in ARCHITECTURES else arch.partition(":")[0], key


def _base(read: RunReader, dtype: str) -> tuple[str, str]:
    read.use("model.qtype", "model.arch", *(f"model.{key}" for key in SWITCHES))
    if not read.flag("model.quantize"):
        return dtype, "none"
    kind, bar, _ = (read.text("model.qtype") or "qfloat8").partition("|")
    base, word = _QUANTISED.get(kind.lower(), (kind, kind))
    return f"{kind} with an accuracy recovery adapter" if bar else base, word


def _slider_area(read: RunReader) -> int:
    """Return the pixels of the largest image of a slider, which trains on no data (``SliderConfig``)."""
    section = read.raw("slider")
    listed = section.get("resolutions") if isinstance(section, Mapping) else None
    sizes = [size for size in listed if isinstance(size, list)] if isinstance(listed, list) else []
    pairs = [size for size in sizes if len(size) == 2 and all(map(_is_side, size))]
    return max((width * height for width, height in pairs), default=512 * 512)


def _is_side(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST


def _datasets(read: RunReader) -> tuple[list[int], int]:
    """Return the sides of the squares that images are as large as, and the frames of a sample."""
    listed = read.value("datasets")
    sides: list[int] = []
    frames, controlled = 1, False
    arch = (read.text("model.arch") or "").lower()
    for item in listed if isinstance(listed, list) else []:
        if not isinstance(item, Mapping):
            continue
        if any(item.get(key) for key in item if str(key).startswith("control_path")):
            controlled = _EDITS.fullmatch(arch) is not None
        sizes = item.get("resolution", 512)
        for size in sizes if isinstance(sizes, list) else [sizes]:
            if isinstance(size, int | float) and 0 < size < _LARGEST:
                sides.append(int(size))
        count = item.get("num_frames", 1)
        frames = max(frames, count if isinstance(count, int) else 1)
        if item.get("auto_frame_count"):
            read.unmodelled("datasets.auto_frame_count", "more")
    if controlled:
        read.unmodelled("datasets.control_path", "more")
    return sides, frames
