"""What a class that reads images or sound is called with, from its configuration and its forward.

The names are those of the class's ``forward`` and ``main_input_name``; shapes come from the sizes in its
configuration. Where a configuration leaves a choice (mel bins before or behind frames, labels or none),
:func:`candidates` yields each, and the sweep keeps the first that the small model accepts. What no rule can
know is in ``inputs.json``.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Listing = dict[str, dict[str, Any]]

OWN: Mapping[str, Any] = json.loads(Path(__file__).with_name("inputs.json").read_text(encoding="utf-8"))
"""By class or model type: ``inputs`` that replace or complete the inferred ones; null drops one."""

TOKENS = 32
SIDE = 64
"""Pixels each way, of models that take any size."""
SAMPLES = 4000
"""Samples of sound: a quarter of a second at 16 kHz, 12 frames of wav2vec 2.0."""
FRAMES = 64
"""Frames of a spectrogram."""


def first(config: Any, *names: str, default: Any = None) -> Any:
    """Return the first of these settings in a configuration or in its vision, audio or backbone part."""
    parts = (
        "vision_config",
        "audio_config",
        "encoder_config",
        "backbone_config",
        "vq_config",
        "image_encoder_config",
    )
    for part in (config, *(getattr(config, name, None) for name in parts)):
        for name in names:
            value = getattr(part, name, None)
            if value is not None and not isinstance(value, bool):
                return value
    return default


def size_of(config: Any) -> tuple[int, int]:
    """Return the height and width of an image."""
    size = first(config, "image_size", "input_size", default=SIDE)
    if isinstance(size, Mapping):
        size = [size.get("height", SIDE), size.get("width", SIDE)]
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))


def floats(*shape: int) -> dict[str, Any]:
    """Return a tensor of normal values."""
    return {"shape": list(shape)}


def integers(*shape: int, high: int) -> dict[str, Any]:
    """Return a tensor of integers below ``high``."""
    return {"shape": list(shape), "dtype": "int64", "high": max(int(high), 1)}


def fixed(values: list[int], *shape: int) -> dict[str, Any]:
    """Return a tensor of given integers, zero behind them."""
    return {"shape": list(shape), "dtype": "int64", "values": values}


def images(config: Any, names: Mapping[str, Any]) -> list[Listing]:
    """Return the ways in which a class may take one image or film per sample."""
    vision = getattr(config, "vision_config", None) or config
    channels = first(config, "num_channels", "in_channels", "in_chans", default=3)
    height, width = size_of(config)
    patch = first(vision, "patch_size", default=16)
    patch = patch if isinstance(patch, int) else int(patch[-1])
    key = "pixel_values" if "pixel_values" in names else "pixel_values_videos"
    if "image_grid_thw" in names or "image_grid_hw" in names:
        merge = first(vision, "spatial_merge_size", "merge_kernel_size", default=2)
        merge = merge if isinstance(merge, int) else int(merge[0])
        rows, deep = 2 * merge, first(vision, "temporal_patch_size", default=1)
        grid = "image_grid_thw" if "image_grid_thw" in names else "image_grid_hw"
        values = [1, rows, rows] if grid == "image_grid_thw" else [rows, rows]
        listing = {
            key: {**floats(rows * rows, channels * deep * patch * patch), "flat": True},
            grid: fixed(values, len(values)),
        }
        spatial = {key: {**floats(rows * rows, channels, patch, patch), "flat": True}, grid: listing[grid]}
        return [listing, spatial]
    if "spatial_shapes" in names:
        rows = 4
        return [
            {
                key: floats(rows * rows, channels * patch * patch),
                "spatial_shapes": fixed([rows, rows], 2),
                "pixel_attention_mask": {"shape": [rows * rows], "dtype": "bool"},
            }
        ]
    image = floats(channels, height, width)
    frames = first(config, "num_frames", "frames_per_clip", default=4)
    film = floats(frames, channels, height, width)
    one = {**floats(1, channels, height, width)}
    plain: Listing = {key: image}
    if "image_sizes" in names:
        sized = {key: image, "image_sizes": fixed([height, width], 2)}
        tiles = {key: floats(3, channels, height, width), "image_sizes": fixed([height, width], 2)}
        return [plain, sized, tiles]
    if key == "pixel_values_videos" or hasattr(config, "tubelet_size") or hasattr(config, "num_frames"):
        return [{key: film}, plain]
    if "pixel_attention_mask" in names:
        mask = {"shape": [1, height, width], "dtype": "bool"}
        return [{key: one, "pixel_attention_mask": mask}, {key: one}, plain]
    # A configuration may keep the size of a patch's grid, which convolutions reduce to nothing.
    larger = [{key: floats(channels, side, side)} for side in (SIDE, 2 * SIDE) if side > height]
    return [plain, *larger, {key: one}, {key: film}]


def sounds(config: Any, names: Mapping[str, Any], key: str) -> list[Listing]:
    """Return the ways in which a class may take one recording per sample."""
    bins = first(
        config, "num_mel_bins", "input_feat_per_channel", "feature_size", "n_mels", "mel_bins", default=80
    )
    positions = first(config, "max_source_positions")
    if key == "input_values":
        length = first(config, "max_length")
        spectrogram = [{key: floats(length, bins)}] if hasattr(config, "num_mel_bins") and length else []
        return [*spectrogram, {key: floats(SAMPLES)}, {key: floats(1, SAMPLES)}, {key: floats(FRAMES, bins)}]
    wide = first(config, "feature_projection_input_dim", "hidden_size", default=bins)
    whole = [{key: floats(bins, 2 * positions)}] if isinstance(positions, int) else []
    variants: list[Listing] = [
        *whole,
        {key: floats(FRAMES, bins)},
        {key: floats(bins, FRAMES)},
        {key: floats(FRAMES, wide)},
    ]
    for mask in ("input_features_mask", "feature_attention_mask"):
        if mask in names:
            variants += [{**item, mask: {"shape": [FRAMES], "dtype": "bool"}} for item in list(variants)]
    return variants


def labels_of(name: str, config: Any, names: Mapping[str, Any]) -> Iterator[Listing]:
    """Yield the labels that a class may compute its loss from, and at last none."""
    classes = max(int(getattr(config, "num_labels", 2) or 2), 2)
    vocabulary = first(getattr(config, "text_config", None) or config, "vocab_size", default=32)
    if "labels" in names:
        one_per_sample = ("Classification", "XVector", "WithTeacher")
        if name.endswith(one_per_sample) and "Frame" not in name:
            yield {"labels": integers(high=classes)}
        if "SemanticSegmentation" in name:
            yield {"labels": integers(*size_of(config), high=classes)}
        if name.endswith("CTC"):
            yield {"labels": {**integers(4, high=vocabulary), "low": 1}}
        if "input_ids" not in names and "decoder_input_ids" in names:
            yield {"labels": integers(TOKENS, high=vocabulary)}
    if "return_loss" in names or "decoder_input_ids" in names:
        yield {"decoder_input_ids": integers(TOKENS, high=vocabulary)} if "decoder_input_ids" in names else {}
    yield {}


def candidates(name: str, model: Any) -> Iterator[Listing]:
    """Yield what a class may be called with, the likeliest first.

    Args:
        name: The class.
        model: A small model of the class, with values.
    """
    config = model.config
    names = inspect.signature(model.forward).parameters
    own = {**OWN.get(config.model_type, {}), **OWN.get(name, {})}.get("inputs", {})
    parts: list[list[Listing]] = []
    if "pixel_values" in names or model.main_input_name == "pixel_values_videos":
        parts.append(images(config, names))
    main = model.main_input_name
    if main in ("input_values", "input_features") or ("input_features" in names and not parts):
        parts.append(
            sounds(
                config, names, main if main.startswith("input_") and main != "input_ids" else "input_features"
            )
        )
    for choice in itertools.product(*parts):
        listing: Listing = {key: tensor for part in choice for key, tensor in part.items()}
        listing |= {key: tensor for key, tensor in own.items() if tensor is not None}
        for dropped in (key for key, tensor in own.items() if tensor is None):
            listing.pop(dropped, None)
        if "input_ids" in names and "input_ids" not in listing:
            yield from text(name, model, listing, names)
        else:
            for labels in labels_of(name, config, names):
                yield {**labels, **listing}


def text(name: str, model: Any, listing: Listing, names: Mapping[str, Any]) -> Iterator[Listing]:
    """Yield the text beside images or sound: its placeholders are as many as the model makes features."""
    config = model.config
    inner = getattr(config, "text_config", None) or config
    vocabulary = first(inner, "vocab_size", default=first(config, "vocab_size", default=512))
    token = first(config, "image_token_id", "image_token_index", "audio_token_id", "audio_token_index")
    count = features(model, listing) if isinstance(token, int) else 0
    length = TOKENS + count
    words = {**integers(length, high=vocabulary)}
    if isinstance(token, int) and count:
        specials = [
            value
            for key in vars(config)
            if key.endswith(("token_id", "token_index"))
            if isinstance(value := getattr(config, key), int)
        ]
        words["high"] = min([vocabulary, *(item for item in specials if item > vocabulary // 2)])
        words["low"] = max([0, *(item + 1 for item in specials if 0 <= item <= vocabulary // 2)])
        words["values"] = [token] * count
    base: Listing = {"input_ids": words, **listing}
    if "mm_token_type_ids" in names or "token_type_ids" in names:
        kind = "mm_token_type_ids" if "mm_token_type_ids" in names else "token_type_ids"
        base[kind] = fixed([1] * count, length)
    labels = {
        "labels": {**integers(length, high=words["high"]), **({"values": [-100] * count} if count else {})}
    }
    if "decoder_input_ids" in names:
        yield {**base, "labels": integers(TOKENS, high=vocabulary)}
    if "labels" in names and not name.endswith("Classification"):
        yield {**base, **labels}
    yield from ({**base, **found} for found in labels_of(name, config, names))


def features(model: Any, listing: Listing) -> int:
    """Return how many placeholders one sample's image or sound has, by asking the model for its features."""
    import torch

    from fsdptool.families.bases.batches import listed_inputs
    from fsdptool.families.synthetic import synthesise

    batch = 2
    tensors = synthesise(listed_inputs(listing, batch), torch.Generator().manual_seed(0))
    tensors = {
        key: value.flatten(0, 1) if listing[key].get("flat") else value for key, value in tensors.items()
    }
    for getter in ("get_image_features", "get_audio_features", "get_video_features"):
        owner = next((part for part in (model, getattr(model, "model", None)) if hasattr(part, getter)), None)
        if owner is None:
            continue
        taken = inspect.signature(getattr(owner, getter)).parameters
        try:
            with torch.no_grad():
                out = getattr(owner, getter)(**{key: value for key, value in tensors.items() if key in taken})
        except Exception:
            continue
        rows = getattr(out, "pooler_output", out)
        rows = rows if isinstance(rows, list | tuple) else [rows]
        total = sum(item.numel() // item.shape[-1] for item in rows if isinstance(item, torch.Tensor))
        return int(total // batch)
    return 0
