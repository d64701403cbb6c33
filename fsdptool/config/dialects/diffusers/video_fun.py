"""What VideoX-Fun's scripts do unlike those of diffusers that they are copies of.

Source: VideoX-Fun 8028dbe9 ``scripts/flux/train.py`` (weights in the dtype of the computation, sizes of
images), 06a9ab54 ``scripts/wan2.1/train_lora.py`` (clips, adapters), ``videox_fun/utils/lora_utils.py``.
"""

from __future__ import annotations

from typing import Any

from fsdptool.config.dialects.run_reader import RunReader

_TARGETS = "linear layers of the transformer"
_OTHER_LOOPS = ("distill", "reward", "grpo", "dmd", "ode", "upsampler", "s2v", "animate", "avatar")
"""Parts of the names of scripts that hold further models, or give the model further inputs."""
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
    read.notes.append(f"{script}.py is taken for a script of VideoX-Fun by its flags")
    if any(part in script for part in _OTHER_LOOPS):
        read.unmodelled(f"{script}.py", "more")
    if (read.text("train_mode") or "normal") != "normal":
        read.unmodelled("train_mode", "more")
    if not adapter:
        trained = read.names("trainable_modules") or ()
        if "." not in ((trained,) if isinstance(trained, str) else trained):
            read.unmodelled("trainable_modules", "less")


def sizes(read: RunReader) -> dict[str, Any]:
    """Return the largest sizes that train: clips of fewer frames are larger at most up to the same length."""
    source = "VideoX-Fun scripts/wan2.1/train_lora.py"
    fixed = read.raw("fix_sample_size")
    clips = read.has("video_sample_n_frames") or read.has("video_sample_size")
    found: dict[str, Any] = {}
    if clips:
        key = "video_sample_n_frames"
        found["frames"] = read.whole(key) if read.has(key) else read.default(key, 17, source)
    if isinstance(fixed, list) and len(fixed) == 2 and read.flag("enable_bucket"):
        read.use("fix_sample_size")
        return {**found, "height": int(fixed[0]), "width": int(fixed[1])}

    def side_of(key: str) -> int | None:
        return read.whole(key) if read.has(key) else int(read.default(key, 512, source))

    side = side_of("video_sample_size" if clips else "image_sample_size")
    if clips and read.flag("training_with_video_token_length") and read.flag("random_hw_adapt"):
        image, tokens = side_of("image_sample_size"), side_of("token_sample_size")
        if side is not None and image is not None and tokens is not None:
            side = max(side, min(tokens, image))
    return {**found, "height": side, "width": side}
