"""What SimpleTuner really makes of a ``config.json`` or a command line: its parser and its plugin, run here.

SimpleTuner is not a dependency: FSDPTOOL_SIMPLETUNER names the folder of its unpacked wheel (4.8.0). Packages
that it imports and that are missing here are replaced by empty stand-ins, and so is a model family that does
not load: no FSDP setting passes through them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import logging
import os
import shlex
import sys
import tempfile
import types
import warnings
from types import FrameType
from typing import Any
from unittest.mock import MagicMock

from accelerate_oracle import clean_environment, devices, plugin_settings

REQUIRED = {
    "model_family": "sdxl",
    "model_type": "full",
    "pretrained_model_name_or_path": "model",
    "output_dir": "out",
    "optimizer": "adamw_bf16",
    "data_backend_config": "data.json",
}
"""What SimpleTuner asks for besides FSDP."""


class _StandIn(types.ModuleType):
    """A module that has every name."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for what SimpleTuner imports and nobody else finds."""

    def __init__(self, families: frozenset[str]) -> None:
        self.families = families

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "simpletuner":
            family = name.removeprefix("simpletuner.helpers.models.").partition(".")[0]
            if family not in self.families:
                return None
        elif self.families or not _asked_by_simpletuner():
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        return None


def _asked_by_simpletuner() -> bool:
    """Whether the import statement stands in a module of SimpleTuner."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("importlib", "_frozen")):
        frame = frame.f_back
    return frame is not None and str(frame.f_globals.get("__name__")).startswith("simpletuner")


def folder() -> str | None:
    """Return the folder that FSDPTOOL_SIMPLETUNER names, or None."""
    return os.environ.get("FSDPTOOL_SIMPLETUNER")


@functools.cache
def _program() -> tuple[Any, Any, Any]:
    """Return its parser of command lines, its converter of mappings, and its trainer."""
    place = folder()
    assert place is not None
    families = frozenset({"mageflow"})  # transformers 5.23 does not load it
    sys.path.insert(0, place)
    sys.meta_path.insert(0, _Finder(families))
    sys.meta_path.append(_Finder(frozenset()))
    # It opens a log in the folder it is started in.
    with tempfile.TemporaryDirectory() as away, contextlib.chdir(away), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        parser = importlib.import_module("simpletuner.helpers.configuration.cmd_args")
        json_file = importlib.import_module("simpletuner.helpers.configuration.json_file")
        trainer = importlib.import_module("simpletuner.helpers.training.trainer")
    logging.disable(logging.CRITICAL)
    return parser, json_file, trainer


def run_simpletuner(text: str) -> dict[str, Any] | str:
    """Return the settings by our names (none: FSDP does not start), or how SimpleTuner stopped.

    Args:
        text: A ``config.json``, or the words behind ``simpletuner train``.
    """
    parser, json_file, trainer = _program()
    said = io.StringIO()
    with clean_environment(), warnings.catch_warnings(), contextlib.redirect_stderr(said), devices():
        warnings.simplefilter("ignore")
        try:
            if text.lstrip().startswith("{"):
                words = json_file.normalize_args({**REQUIRED, **json.loads(text)})
            else:
                given = shlex.split(text)
                words = [*json_file.normalize_args(REQUIRED), *given[2:]]
            config = parser.parse_cmdline_args(words, exit_on_error=True)
            return _settings(trainer, config)
        except SystemExit:
            return said.getvalue().strip()[-200:]
        except Exception as error:
            return f"{type(error).__name__}: {str(error).strip()[-200:]}"


def _settings(trainer: Any, config: Any) -> dict[str, Any]:
    """Build the plugin and the topology as ``Trainer.init_accelerator`` does."""
    made = trainer.Trainer.__new__(trainer.Trainer)
    made.config = config
    written = config.fsdp_transformer_layer_cls_to_wrap
    size = trainer.normalize_context_parallel_size(config.context_parallel_size)
    rotation = trainer.normalize_context_parallel_strategy(config.context_parallel_comm_strategy)
    plugin = made._load_fsdp_plugin()
    if size is not None and size > 1:
        trainer.build_context_parallel_topology(config, config.num_processes, size, rotation)
    if plugin is None:
        return {}
    made._prepare_fsdp_plugin_for_accelerator(plugin)
    settings = plugin_settings(plugin)
    # The plugin's own list is extended with the model's classes (and lacks those that the model has not).
    settings["wrap_classes"] = tuple(written or ())
    settings.update(cp=size or 1, cp_comm_strategy=rotation, mixed_precision=config.mixed_precision)
    settings.update(num_processes=config.num_processes, num_machines=config.num_machines)
    return settings
