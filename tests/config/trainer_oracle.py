"""What transformers really makes of a file: its argument parser's rules and the plugin built from them."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

from accelerate_oracle import plugin_settings


class _Bare:
    """The part of TrainingArguments that ``_process_fsdp_args`` reads, without its device set-up."""

    def __init__(self, fsdp: Any, fsdp_config: Any) -> None:
        from transformers import TrainingArguments

        self.fsdp = fsdp
        self.fsdp_config = fsdp_config
        self.activation_checkpointing = False
        self._apply_legacy_fsdp_to_config = TrainingArguments._apply_legacy_fsdp_to_config
        self.process = TrainingArguments._process_fsdp_args


def run_trainer(
    fsdp: Any, fsdp_config: Any, environment: Mapping[str, str] | None = None
) -> dict[str, Any] | str:
    """Return the plugin's settings by our names, or how transformers stopped, in an environment."""
    import torch
    from accelerate.utils import FullyShardedDataParallelPlugin

    logging.getLogger("transformers.training_args").setLevel(logging.ERROR)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("FSDP_", "ACCELERATE_"))}
    with patch.dict(os.environ, clean | dict(environment or {}), clear=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            bare = _Bare(fsdp, fsdp_config)
            arguments = bare.process(bare)
            if arguments is None:
                return {}
            with (
                patch("accelerate.utils.dataclasses.is_cuda_available", return_value=True),
                patch.object(torch.cuda, "current_device", return_value=0),
            ):
                plugin = FullyShardedDataParallelPlugin(**arguments)
            settings = plugin_settings(plugin)
            if "limit_all_gathers" in arguments:
                settings["limit_all_gathers"] = plugin.limit_all_gathers
            return settings
        except Exception as error:
            return f"{type(error).__name__}: {error}"


def load(path: Path) -> tuple[Any, Any]:
    """Return ``fsdp`` and ``fsdp_config`` of a file in either form."""
    data = _mapping(path)
    if "fsdp" in data or "fsdp_config" in data:
        return data.get("fsdp"), dict(data.get("fsdp_config") or {})
    return True, dict(data)


def _mapping(path: Path) -> Mapping[str, Any]:
    import yaml

    text = path.read_text(encoding="utf-8")
    data: Mapping[str, Any] = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    return data


def _precision(path: Path) -> str:
    """Return the precision of TrainingArguments made from the file: ``no``, ``fp16`` or ``bf16``."""
    data = _mapping(path)
    return _precision_of(*(data.get(key) is True for key in ("bf16", "fp16")))


@cache
def _precision_of(bf16: bool, fp16: bool) -> str:
    from transformers import TrainingArguments

    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, {"ACCELERATE_MIXED_PRECISION": "no"}),
    ):
        return str(TrainingArguments(output_dir=folder, use_cpu=True, bf16=bf16, fp16=fp16).mixed_precision)


def check_explained(path: Path) -> str | None:
    """Assert that transformers and our reading of ``path`` agree in every setting.

    Returns:
        None when all is as explained; how transformers stopped, or the settings it took otherwise, for
        a file in which we found an error, too.
    """
    from fsdptool.config import read_settings

    reading = read_settings(path, dialect="trainer")
    outcome = run_trainer(*load(path))
    if isinstance(outcome, str):
        assert reading.errors, f"{path.name}: transformers refuses it ({outcome}) and we do not"
        return outcome
    explained = {item.key: item.value for item in reading.effective}
    if not outcome:
        assert reading.version is None, f"{path.name}: FSDP does not start, explained as it does"
        return None
    # What TrainingArguments have no word for is the plugin's default.
    assert not outcome.pop("activation_checkpointing_offload") and outcome.pop("ignored_modules") is None
    if "mixed_precision" in explained:  # not in a file that is fsdp_config alone
        outcome["mixed_precision"] = _precision(path)
    assert set(explained) == set(outcome), path.name
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in outcome.items()}
    different = {key: value for key, value in plain.items() if explained[key] != value}
    if different:
        assert reading.errors, f"{path.name}: {different}, explained otherwise"
    return str(different) if different else None
