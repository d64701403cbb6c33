"""Command lines of diffusers' training scripts: only the run that they describe is read."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from fsdptool.config.dialects.protocol import RunFormat

if TYPE_CHECKING:
    from fsdptool.config.dialects.run_reader import Launch, RunFile
    from fsdptool.files.tree import Node
    from fsdptool.records.described_run import DescribedRun

_OWN = frozenset([
    "instance_data_dir", "instance_prompt", "train_data_dir", "resolution", "mixed_precision",
    "max_train_steps", "train_batch_size", "class_data_dir", "output_dir", "lr_scheduler",
])  # fmt: skip
"""Flags of nearly every script: a copy may have a model of its own by default."""
_OTHERS = frozenset({"model_family", "network_module", "optimizer_type", "save_model_as"})
"""Flags of SimpleTuner and of sd-scripts, which share many with diffusers."""
_IMAGES = frozenset([
    "train_batch_size", "resolution", "instance_data_dir", "train_data_dir", "instance_prompt", "center_crop",
    "random_flip", "proportion_empty_prompts", "snr_gamma", "pretrained_vae_model_name_or_path",
    "with_prior_preservation", "num_validation_images", "image_column", "conditioning_image_column",
    "train_data_meta",
])  # fmt: skip
"""Flags of which the command of a copy with another name has several."""
_GENERATES = frozenset([
    "instance_data_dir", "instance_data_root", "instance_prompt", "class_data_dir", "snr_gamma",
    "proportion_empty_prompts", "pretrained_vae_model_name_or_path", "with_prior_preservation",
    "num_validation_images", "validation_prompt", "validation_prompts", "conditioning_image_column",
    "train_data_meta", "noise_offset", "guidance_scale", "weighting_scheme", "num_frames", "max_num_frames",
])  # fmt: skip
"""Flags of programs for models that make images and video, which no others have."""
_SIZES = frozenset({"resolution", "center_crop", "random_flip"})
"""Flags of these, and of programs for models that look at images."""
_LOOKS = re.compile(
    r"clip(?!s)|classif|caption|segment|detect|embed|encoder|ocr|vlm|vit(?![a-z])|bert|gpt|llm"
)
"""Parts of the names of scripts for models that read text or look at images."""
_GENERIC = re.compile(r"(?:^|\.)train_(?:lora|qwen|custom)(?!_diffusion|_?image)\w*$")
"""Names of scripts that other programs have, too."""

_NAMES = frozenset([
    "pretrained_model_name_or_path", "pretrained_teacher_model", "pretrained_prior_model_name_or_path",
    "pretrained_decoder_model_name_or_path",
])  # fmt: skip
"""Flags that name the model of a script."""


class Diffusers(RunFormat):
    """``accelerate launch train_dreambooth_lora_flux.py --pretrained_model_name_or_path ...``."""

    name = "diffusers"

    def describes(self, root: Node) -> float:
        """Return 0: the scripts have no files of their own."""
        return 0.0

    def starts(self, launch: Launch, names: frozenset[str]) -> float:
        """Return how surely a command line is that of one of diffusers' scripts, or of a copy."""
        from fsdptool.config.dialects.diffusers.run_keys import SCRIPT

        if names & _OTHERS:
            return 0.0
        named = bool(names & _NAMES)
        name = launch.script.rpartition(".")[2].lower()
        generates = bool(names & _GENERATES or (names & _SIZES and _LOOKS.search(name) is None))
        if SCRIPT.search(launch.script) and (generates or _GENERIC.search(launch.script) is None):
            return 1.0 if named else 0.95 if len(names & _OWN) > 2 else 0.0
        return 0.92 if named and generates and len(names & _IMAGES) > 1 else 0.0

    def describe(self, file: RunFile) -> DescribedRun | None:
        """Return the run of a command line; None where its model makes no images."""
        from fsdptool.config.dialects.diffusers.run import describe

        return describe(file)
