"""What VideoX-Fun's scripts do unlike those of diffusers that they are copies of.

Source: VideoX-Fun 8028dbe9 ``scripts/flux/train.py`` (weights in the dtype of the computation, sizes of
images), 06a9ab54 ``scripts/wan2.1/train_lora.py`` (clips, adapters), ``videox_fun/utils/lora_utils.py``.
"""

from __future__ import annotations

import re
from typing import Any

from fsdptool.config.dialects.run_reader import RunReader

_TARGETS = "linear layers of the transformer"
_OTHERS = frozenset([
    "distill", "reward", "grpo", "dmd", "ode", "pdd", "upsampler", "s2v", "animate", "avatar", "edit",
    "control", "omni", "taehv", "vace", "fantasytalking", "infinitetalk",
])  # fmt: skip
"""Words of the names of scripts, and of their folders, that hold further models or give the model further
inputs."""
_OF_IMAGES = re.compile(r"(?:^|\.)(?:flux|qwen_?image|z_?image)\w*\.")
_OF_CLIPS = re.compile(r"(?:^|\.)(?:wan|cogvideo|hunyuanvideo|longcat_?video|ltx)[\w.]*\.")
"""Folders of the scripts that train on images, and on clips."""
_MULTIPLE = 16
"""Pixels of which the sides of ``fix_sample_size`` are made multiples."""
_LARGEST = 1 << 16
DEFAULTS = {"train_batch_size": 16, "rank": 128, "num_train_epochs": 100}


def is_video_fun(read: RunReader) -> bool:
    """Whether a command line is one of VideoX-Fun."""
    return read.has("train_data_meta")


def targets(read: RunReader) -> tuple[str, ...] | str:
    """Return the layers that adapters stand beside; without names all of the transformer's."""
    named = read.names("target_name")
    parts = named.split(",") if isinstance(named, str) else named or ()
    return tuple(part.strip() for part in parts if part.strip()) or _TARGETS


def tell(read: RunReader, script: str, *, adapter: bool) -> None:
    """Tell what else decides the memory of a command line."""
    words = {*re.split(r"[._]", read.file.launch.script.lower())}
    read.notes.append(f"{script}.py is taken for a script of VideoX-Fun by its flags")
    if words & _OTHERS:
        read.unmodelled(f"{script}.py", "more")
    if (read.text("train_mode") or "normal") != "normal":
        read.unmodelled("train_mode", "more")
    if not adapter:
        trained = read.names("trainable_modules") or ()
        if "." not in ((trained,) if isinstance(trained, str) else trained):
            read.unmodelled("trainable_modules", "less")


def sizes(read: RunReader) -> dict[str, Any]:
    """Return the sizes of the clips that train, or of the images where a script trains on images alone.

    Clips of fewer frames are larger at most up to the same length. Images train beside clips: where they are
    larger, that is told.
    """
    clips = _trains_on_clips(read)
    found: dict[str, Any] = {"frames": _default(read, "video_sample_n_frames", 17)} if clips else {}
    fixed = read.raw("fix_sample_size")
    if isinstance(fixed, list) and len(fixed) == 2 and read.flag("enable_bucket"):
        read.use("fix_sample_size")
        height, width = (_fixed(read, item) for item in fixed)
        return {**found, "height": height, "width": width}
    side = _default(read, "video_sample_size" if clips else "image_sample_size", 512)
    if not clips:
        return {"height": side, "width": side}
    image = _default(read, "image_sample_size", 512)
    if read.flag("training_with_video_token_length") and read.flag("random_hw_adapt"):
        tokens = _default(read, "token_sample_size", 512)
        if side is not None and image is not None and tokens is not None:
            side = max(side, min(tokens, image))
    frames = found["frames"]
    if side is None or frames is None or image is None:
        return {**found, "height": side, "width": side}
    # The VAEs make one frame of four, and keep the first.
    if image**2 > ((frames - 1) // 4 + 1) * side**2:
        read.unmodelled("image_sample_size", "more")
        read.notes.append(f"images of {image} x {image} train beside the clips, and are not planned")
    return {**found, "height": side, "width": side}


def _trains_on_clips(read: RunReader) -> bool:
    """Whether a script trains on clips: its folder says so, or else its flags."""
    script = read.file.launch.script.lower()
    if _OF_IMAGES.search(script):
        return False
    named = read.has("video_sample_n_frames") or read.has("video_sample_size")
    return named or _OF_CLIPS.search(script) is not None


def _default(read: RunReader, key: str, value: int) -> int | None:
    source = "VideoX-Fun scripts/wan2.1/train_lora.py"
    return read.whole(key) if read.has(key) else int(read.default(key, value, source))


def _fixed(read: RunReader, item: object) -> int | None:
    """Return a side of ``fix_sample_size`` as the scripts round it."""
    side = read.whole_of("fix_sample_size", item)
    if side is not None and not _MULTIPLE <= side < _LARGEST:
        read.problems.append(f"fix_sample_size: {side} is not the side of an image")
        read.unmodelled("fix_sample_size")
        return None
    return side // _MULTIPLE * _MULTIPLE if side is not None else None
