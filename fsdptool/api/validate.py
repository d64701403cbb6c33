"""``fsdptool.validate``: judging files, alone or against a model and hardware."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.config.checks.model import Hardware
from fsdptool.config.reader import read_settings
from fsdptool.config.result import Reading, Verdict
from fsdptool.errors import ConfigError, PlanError
from fsdptool.records.recipe import Batch, Layout, ModelChoice, Recipe, Sharding

if TYPE_CHECKING:
    from fsdptool.records.anatomy import Anatomy
    from fsdptool.records.cluster import Gpu
    from fsdptool.records.sharding import FsdpSettings


def validate(
    files: str | PathLike[str] | Iterable[str | PathLike[str]],
    *,
    consumer: str | None = None,
    target: str | None = None,
    dialect: str | None = None,
    model: str | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    host_memory: str | None = None,
    trust_remote_code: bool = False,
) -> Verdict:
    """Judge configurations as the program that reads them will. Nothing is written.

    Args:
        files: A file or a folder, or several.
        consumer: Who reads them: ``accelerate``, ``fsdptool``, ``trainer``, ...; None: each file's own.
        target: Version to judge for, ``accelerate==1.15``.
        dialect: Force the dialect instead of detecting it from the content.
        model: Reference of a model to judge against, too.
        gpu, gpus, host_memory: Hardware to judge against, too; host memory per node (``512GiB``).
        trust_remote_code: Run the model's own code to inspect it.

    Returns:
        One reading per file: effective settings with their origins, what is ignored, and findings.
        ``document()`` gives the JSON document ``validate``, ``exit_code()`` the command's status.

    Raises:
        ConfigError: An argument names something unknown, or a folder holds no configuration. What is wrong
            with a file is a finding.
        ReferenceError, ModelError: The model cannot be resolved or built.
    """
    paths = [files] if isinstance(files, str | PathLike) else list(files)
    judged = conditions(model, gpu, gpus, host_memory, trust_remote_code=trust_remote_code)
    readings = []
    for path, named in expand(map(Path, paths)).items():
        reading = read_settings(path, dialect=dialect, consumer=consumer, target=target, **judged)
        readings.append(reading if named else as_folder_member(reading))
    return Verdict(tuple(readings))


def conditions(
    model: str | None, gpu: str | None, gpus: int | None, host_memory: str | None, *, trust_remote_code: bool
) -> dict[str, Any]:
    """Return what else a file is judged against, as arguments of ``read_settings``.

    Raises:
        PlanError: The GPU is not in the catalogue, the count is not positive, or a size cannot be read.
        ReferenceError, ModelError: The model cannot be resolved or built.
    """
    arguments: dict[str, Any] = {}
    hardware = None
    if gpu is not None or gpus is not None or host_memory is not None:
        from fsdptool.planning.clusters import parse_size
        from fsdptool.planning.hardware import load_gpu

        if gpus is not None and gpus < 1:
            raise PlanError(
                f"--gpus must be at least 1, not {gpus}", help="give the total number of GPUs, 1 or more"
            )
        device = load_gpu(gpu) if gpu is not None else None
        hardware = Hardware(device, gpus, parse_size(host_memory) if host_memory else None)
    if model is not None:
        from fsdptool.inspection import inspect
        from fsdptool.source import resolve

        arguments["model"] = inspect(resolve(model, trust_remote_code=trust_remote_code))
    if hardware is not None:
        arguments["hardware"] = with_model(hardware, arguments.get("model"))
    return arguments


def with_model(hardware: Hardware, anatomy: Anatomy | None) -> Hardware:
    """Return hardware on which the smallest run of a model can be predicted."""
    if anatomy is None or hardware.gpu is None:
        return replace(hardware, anatomy=anatomy)
    return replace(hardware, anatomy=anatomy, fit=partial(_smallest_run, anatomy, hardware.gpu))


def _smallest_run(
    anatomy: Anatomy, gpu: Gpu, settings: FsdpSettings, layout: Layout, gpus: int, machines: int
) -> tuple[int | None, int | None]:
    """Return needed and usable bytes per GPU at micro-batch 1."""
    from fsdptool.planning import predict
    from fsdptool.planning.clusters import make_cluster

    sharding = Sharding(layout="native") if layout == "native" else Sharding(layout, reduce_dtype=None)
    recipe = Recipe(
        ModelChoice(anatomy.spec.reference.id, revision=anatomy.spec.reference.revision),
        batch=Batch(micro_batch=1, sequence_length=_sequence(anatomy)),
        sharding=sharding,
    )
    bandwidth = 25e9 if machines > 1 else None
    cluster = make_cluster(gpu, gpus // machines, machines, inter_node_bandwidth=bandwidth)
    candidate = predict(anatomy.spec, anatomy, recipe, settings, cluster=cluster)
    return candidate.device_total_bytes, candidate.usable_bytes


def _sequence(anatomy: Anatomy) -> int | None:
    """Text models are judged at 2,048 tokens or what they have positions for."""
    config = anatomy.spec.config
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    positions = text.get("max_position_embeddings") or text.get("n_positions")
    if "vocab_size" not in text:
        return None
    return min(2048, positions) if isinstance(positions, int) else 2048


def expand(paths: Iterable[Path]) -> dict[Path, bool]:
    """Return the files to read, each once, and whether it was named itself (not found in a folder).

    A folder stands for its YAML and JSON files; names that begin with a dot are passed over, as are
    the folders of installed packages.

    Raises:
        ConfigError: A folder holds no such file.
    """
    files: dict[Path, bool] = {}
    for path in paths:
        if not path.is_dir():
            files[path] = True
            continue
        configurations = sorted(_configurations(path))
        if not configurations:
            raise ConfigError(f"there is no YAML or JSON file in {path}", help="name the files")
        for item in configurations:
            files.setdefault(item, False)
    return files


def _configurations(folder: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(folder):
        # Not entered at all: a repository's .git holds many times more files than the project.
        folders[:] = [name for name in folders if not name.startswith(".") and name not in _INSTALLED]
        for name in names:
            item = Path(place, name)
            known = not name.startswith(".") and item.suffix.lower() in (".yaml", ".yml", ".json")
            if known and item.is_file():
                yield item


_INSTALLED = ("node_modules", "site-packages")


def as_folder_member(reading: Reading) -> Reading:
    """Return the reading of a file that was found in a folder: an unknown format is a warning only."""
    if not any(item.code in _NOT_OURS for item in reading.diagnostics):
        return reading
    diagnostics = tuple(
        replace(item, severity="warning") if item.code in _NOT_OURS else item for item in reading.diagnostics
    )
    return replace(reading, diagnostics=diagnostics)


_NOT_OURS = ("FSD107", "FSD109", "FSD110")
