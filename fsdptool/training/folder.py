"""The run folder: what a run was asked to do, written whole before a process starts. Torch-free.

Layout (docs/runs.md)::

    run.json          what it is: id, command line, attempts
    recipe.json, settings.json, spec.json, units.json, prediction.json, environment.json
    recipe.yaml, accelerate.yaml   the files as given
    metrics.jsonl, summary.json    the contract with outside scripts
    events/, logs/                 per rank
    checkpoints/, export/
"""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from fsdptool.errors import ConfigError, StorageError
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.model import ModelSpec
from fsdptool.records.plan import Candidate
from fsdptool.records.recipe import Recipe
from fsdptool.records.settings import FsdpSettings
from fsdptool.records.units import UnitPlan

T = TypeVar("T")

RUN = "run.json"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
EVENTS = "events"
LOGS = "logs"
CHECKPOINTS = "checkpoints"
EXPORT = "export"
ACCELERATE = "accelerate.yaml"

_PARTS: dict[str, type] = {
    "recipe": Recipe,
    "settings": FsdpSettings,
    "spec": ModelSpec,
    "units": UnitPlan,
}

_ENVIRONMENT_PREFIXES = ("NCCL_", "TORCH_", "TORCHELASTIC_", "CUDA_", "GLOO_", "OMP_", "FSDPTOOL_", "SLURM_JOB")
_ENVIRONMENT_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "HF_HUB_OFFLINE", "HF_HOME", "MASTER_ADDR")


@dataclass(frozen=True, slots=True)
class RunInputs:
    """Everything a worker needs to know, as plain records.

    Attributes:
        recipe, settings, spec, units: What to train and how it is sharded.
        world_size: Processes of this attempt.
        device: ``cpu`` or ``cuda``.
        prediction: The plan's verdict for these settings, or None if it could not be derived.
        resume: Checkpoint folder to continue from, ``auto`` for the newest good one, or None.
        attempt: How often the run was started before.
        timeout_seconds: How long a collective may take before the rank gives up.
    """

    recipe: Recipe
    settings: FsdpSettings
    spec: ModelSpec
    units: UnitPlan
    world_size: int
    device: str
    prediction: Candidate | None = None
    resume: str | None = None
    attempt: int = 0
    timeout_seconds: float = 600.0


def write_inputs(
    folder: Path, inputs: RunInputs, *, files: Mapping[str, str], argv: Iterable[str] = ()
) -> None:
    """Write every input of a run into ``folder``.

    Args:
        folder: Existing folder.
        inputs: The records.
        files: File name to text of what the person gave (``recipe.yaml``, ``accelerate.yaml``).
        argv: The command line, for posterity.

    Raises:
        StorageError: The folder cannot be written.
    """
    try:
        for sub in (EVENTS, LOGS, CHECKPOINTS):
            (folder / sub).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_text(folder / name, text)
        for name in _PARTS:
            write_json(folder / f"{name}.json", to_json(getattr(inputs, name)))
        write_json(folder / "prediction.json", to_json(inputs.prediction))
        write_json(folder / "environment.json", environment())
        write_json(folder / RUN, _run_document(inputs, list(argv)))
    except OSError as error:
        raise StorageError(
            f"the run folder {folder} cannot be written: {error.strerror or error}",
            help="free space or choose another folder with --output",
        ) from error


def read_inputs(folder: Path) -> RunInputs:
    """Read what :func:`write_inputs` wrote.

    Raises:
        ConfigError: The folder is no run folder, or a file in it is damaged; the message names it.
    """
    run = read_json(folder / RUN)
    parts = {name: _read_part(folder, name, record) for name, record in _PARTS.items()}
    raw = read_json(folder / "prediction.json")
    prediction = None if raw is None else from_json(Candidate, raw, where="prediction.json")
    return RunInputs(
        **parts,
        world_size=int(run["world_size"]),
        device=str(run["device"]),
        prediction=prediction,
        resume=run["resume"],
        attempt=int(run["attempt"]),
        timeout_seconds=float(run["timeout_seconds"]),
    )


def read_spec(folder: Path) -> ModelSpec:
    """Read the model of a run alone."""
    return _read_part(folder, "spec", ModelSpec)


def read_recipe_record(folder: Path) -> Recipe:
    """Read the recipe of a run alone, as the record the workers saw."""
    return _read_part(folder, "recipe", Recipe)


def _read_part(folder: Path, name: str, record: type[T]) -> T:
    return from_json(record, read_json(folder / f"{name}.json"), where=f"{name}.json")


def _run_document(inputs: RunInputs, argv: list[str]) -> dict[str, Any]:
    from fsdptool.records.document import envelope

    parts = {name: getattr(inputs, name) for name in _PARTS}
    body = {
        "world_size": inputs.world_size,
        "device": inputs.device,
        "resume": inputs.resume,
        "attempt": inputs.attempt,
        "timeout_seconds": inputs.timeout_seconds,
        "argv": argv,
    }
    return envelope("run", parts, body)


def environment() -> dict[str, Any]:
    """Return the interpreter, machine and the environment variables that change a run (never secrets)."""
    from fsdptool.records.document import library_versions, tool_version

    chosen = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_ENVIRONMENT_PREFIXES) or name in _ENVIRONMENT_NAMES
    }
    return {
        "fsdptool": tool_version(),
        "libraries": library_versions(),
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "machine": platform.node(),
        "cpus": os.cpu_count(),
        "variables": chosen,
    }


def read_json(path: Path) -> Any:
    """Return the JSON document at ``path``.

    Raises:
        ConfigError: It is missing, unreadable or no JSON; the message is one line.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(
            f"{path.parent} is not a run folder: {path.name} is missing",
            help="give a folder that fsdptool train wrote",
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, whole or not at all (raises ``OSError``)."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` aside, flush it to the disk and rename it (raises ``OSError``)."""
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with aside.open("w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
