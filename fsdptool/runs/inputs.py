"""What the parent process put into the run folder for its workers."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fsdptool.errors import ConfigError, StorageError
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.model import ModelSpec
from fsdptool.records.recipe import Recipe
from fsdptool.records.settings import FsdpSettings
from fsdptool.records.units import UnitPlan
from fsdptool.runs.folder import write_json

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RunInputs:
    """Everything that defines a run. The teacher's spec and units only under distillation.

    Files of a run folder: ``recipe.json``, ``settings.json``, ``spec.json``, ``units.json`` and
    ``teacher_spec.json``, ``teacher_units.json``.
    """

    folder: Path
    recipe: Recipe
    settings: FsdpSettings
    spec: ModelSpec
    units: UnitPlan
    teacher_spec: ModelSpec | None = None
    teacher_units: UnitPlan | None = None


_FILES: dict[str, type] = {
    "recipe": Recipe,
    "settings": FsdpSettings,
    "spec": ModelSpec,
    "units": UnitPlan,
    "teacher_spec": ModelSpec,
    "teacher_units": UnitPlan,
}


def read_inputs(folder: Path) -> RunInputs:
    """Read a run folder.

    Raises:
        StorageError: A file cannot be read.
        ConfigError: A file is not what it should be, or distillation lacks its teacher.
    """
    found: dict[str, Any] = {}
    for name, record in _FILES.items():
        if name.startswith("teacher") and not (folder / f"{name}.json").exists():
            continue
        found[name] = _read(folder / f"{name}.json", record)
    inputs = RunInputs(folder, **found)
    if inputs.recipe.method.name == "distillation" and inputs.teacher_units is None:
        raise ConfigError(f"{folder} has no teacher_units.json", help="start the run with fsdptool train")
    return inputs


def _read(path: Path, record: type[T]) -> T:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return from_json(record, data, where=path.name)


def write_inputs(inputs: RunInputs) -> None:
    """Write the files :func:`read_inputs` reads into ``inputs.folder``, each whole or not at all."""
    for name in _FILES:
        value = getattr(inputs, name)
        if value is not None:
            write_json(inputs.folder / f"{name}.json", to_json(value))
