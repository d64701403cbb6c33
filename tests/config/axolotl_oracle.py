"""What axolotl really makes of a file: its own validation and set-up, and the TrainingArguments they feed.

axolotl pins other versions of what this project tests with, so it is no dependency of ours. Where it is
to be run: ``pip install --no-deps axolotl==0.19.0 addict`` (both are plain Python). Modules that it only
imports on the way and that are absent are stood in for; its validation, ``setup_fsdp_envs``,
transformers' part and accelerate's plugin run for real.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

from accelerate_oracle import plugin_settings
from trainer_oracle import _Bare

AVAILABLE = all(importlib.util.find_spec(name) is not None for name in ("axolotl", "addict"))
_ON_THE_WAY = ("numba", "ring_flash_attn", "mistral_common")
_MACHINE = {"bf16": True, "fp8": True, "tf32": True, "n_gpu": 8, "n_node": 1, "compute_capability": "sm_90"}


class _StandIns(MetaPathFinder, Loader):
    """Imports that have nothing to do with FSDP, for as long as axolotl is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in _ON_THE_WAY else None

    def create_module(self, spec: ModuleSpec) -> Any:
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        return module

    def exec_module(self, module: Any) -> None:
        """Nothing is run."""


@contextmanager
def _without_extras() -> Iterator[None]:
    finder = _StandIns()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] in _ON_THE_WAY]:
            if isinstance(sys.modules[name], MagicMock):
                del sys.modules[name]


def run_axolotl(text: str) -> dict[str, Any] | str:
    """Return the plugin's settings by our names, or who stopped and how; ``{}`` when FSDP is off."""
    import torch
    import yaml
    from accelerate.utils import FullyShardedDataParallelPlugin

    logging.disable(logging.CRITICAL)
    data = yaml.safe_load(text)
    # Plugins would be imported, and a streaming data set looked up; neither has to do with FSDP.
    data = {key: value for key, value in data.items() if key not in ("plugins", "pretraining_dataset")}
    data["datasets"] = data.get("datasets") or [{"path": "a", "type": "alpaca"}]
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("FSDP_", "ACCELERATE_", "PARALLELISM_CONFIG_"))
    }
    with patch.dict(os.environ, clean, clear=True), _without_extras(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = importlib.import_module("axolotl.utils.config")
        mapping = importlib.import_module("axolotl.utils.dict")
        trainer = importlib.import_module("axolotl.utils.trainer")
        try:
            cfg = config.validate_config(
                mapping.DictDefault(data),
                capabilities=_MACHINE,
                env_capabilities={"torch_version": torch.__version__.split("+")[0]},
            )
            if not (cfg.fsdp or cfg.fsdp_config):
                return {}
            trainer.setup_fsdp_envs(cfg)
            bare = _Bare(cfg.fsdp if cfg.fsdp else True, dict(cfg.fsdp_config))
            arguments = bare.process(bare)
            if arguments["fsdp_version"] not in (1, 2):
                return f"there is no FSDP{arguments['fsdp_version']}: the plugin takes neither path"
            plugin = _plugin(FullyShardedDataParallelPlugin, arguments)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        finally:
            logging.disable(logging.NOTSET)
        # axolotl/core/builders/base.py:_configure_gradient_checkpointing, and the Trainer's own check.
        if plugin.activation_checkpointing and cfg.gradient_checkpointing and not cfg.activation_offloading:
            return "ValueError: can't both be set to True"
        return plugin_settings(plugin)


def _plugin(kind: Any, arguments: dict[str, Any]) -> Any:
    import torch

    with (
        patch("accelerate.utils.dataclasses.is_cuda_available", return_value=True),
        patch.object(torch.cuda, "current_device", return_value=0),
    ):
        return kind(**arguments)


def check_explained(path: Path) -> None:
    """Assert that axolotl and our reading of ``path`` agree in every setting."""
    from fsdptool.config import read_settings

    reading = read_settings(path)
    outcome = run_axolotl(path.read_text(encoding="utf-8"))
    if isinstance(outcome, str):
        assert reading.errors, f"{path.name}: axolotl refuses it ({outcome}) and we do not"
        return
    if not outcome:
        assert reading.version is None, f"{path.name}: FSDP does not start, explained as it does"
        return
    explained = {item.key: item.value for item in reading.effective}
    for key in ("activation_checkpointing_offload", "ignored_modules"):
        assert not outcome.pop(key)
    different = {
        key: value
        for key, value in outcome.items()
        if explained.get(key, "not explained") != (list(value) if isinstance(value, tuple) else value)
    }
    assert not different or reading.errors, f"{path.name}: {different}, explained otherwise"
