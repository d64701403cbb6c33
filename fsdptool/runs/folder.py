"""The run folder: names, what the workers read, and how files in it are written. Torch-free.

Layout (docs/reference/run-folder.md)::

    run.json          what was started: command line, processes, device, what to resume from
    recipe.json, settings.json, spec.json, units.json, prediction.json, environment.json
    recipe.yaml, accelerate.yaml   the files as given
    metrics.jsonl, summary.json    the contract with outside scripts
    events/, logs/                 per rank
    checkpoints/, export/
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fsdptool.errors import ConfigError, StorageError
from fsdptool.files import values
from fsdptool.files.text import UnreadableError, exists
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.codec import from_json, to_json
from fsdptool.records.diagnostic import envelope, library_versions, tool_version
from fsdptool.records.recipe import Recipe
from fsdptool.records.run import Start
from fsdptool.records.sharding import FsdpSettings, UnitPlan

if TYPE_CHECKING:
    from fsdptool.records.plan import Candidate

RUN = "run.json"
LOCK = ".lock"
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
PREDICTION = "prediction.json"
ENVIRONMENT = "environment.json"
EVENTS = "events"
LOGS = "logs"
FLIGHT_RECORD = "nccl-trace-rank-"
"""Beginning of the names of NCCL's flight records in :data:`LOGS`; the rank follows."""
CHECKPOINTS = "checkpoints"
EXPORT = "export"
RECIPE = "recipe.yaml"
ACCELERATE = "accelerate.yaml"
MAX_WORLD = 1 << 20
"""Ranks of the largest run: code that reads a run loops over them."""

# fmt: off
_RECORDED = frozenset((
    "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING",
    "CUDA_VISIBLE_DEVICES", "FSDPTOOL_CACHE", "FSDPTOOL_COLLECTIVE_TIMEOUT_SECONDS", "FSDPTOOL_DATA_CACHE",
    "FSDPTOOL_LOCKS", "GLOO_SOCKET_IFNAME", "HF_HOME", "HF_HUB_OFFLINE", "KMP_AFFINITY", "MASTER_ADDR",
    "MKL_NUM_THREADS", "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_CROSS_NIC", "NCCL_CUMEM_ENABLE", "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS", "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "NCCL_IB_TIMEOUT",
    "NCCL_MAX_NCHANNELS", "NCCL_MIN_NCHANNELS", "NCCL_NET", "NCCL_NET_GDR_LEVEL", "NCCL_NSOCKS_PERTHREAD",
    "NCCL_NTHREADS", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO",
    "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME", "NCCL_SOCKET_NTHREADS", "OMP_NUM_THREADS", "OMP_PLACES",
    "OMP_PROC_BIND", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "SLURM_JOB_ID", "SLURM_JOB_NODELIST",
    "SLURM_JOB_NUM_NODES", "SLURM_JOB_PARTITION", "TORCH_COMPILE_DISABLE",
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "TORCH_DISTRIBUTED_DEBUG", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
    "TORCH_FR_BUFFER_SIZE", "TORCH_LOGS", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_BLOCKING_WAIT", "TORCH_NCCL_DUMP_ON_TIMEOUT",
    "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
))
# fmt: on
"""Variables that change a run, each by its whole name: ``NCCL_`` and a word may be somebody's secret."""


def write_start(folder: Path, start: Start, inputs: Any) -> None:
    """Write ``run.json`` last: a folder that has one is complete (raises ``OSError``)."""
    write_json(folder / RUN, envelope("run", inputs, start))


def read_start(folder: Path) -> Start:
    """Read ``run.json``.

    Raises:
        ConfigError: The folder is not a run folder, or the file is damaged.
    """
    document = values.read_own_json(folder / RUN)
    if not isinstance(document, dict):
        raise ConfigError(f"{folder / RUN} is not the description of a run")
    names = Start.__dataclass_fields__
    start = from_json(Start, {name: document[name] for name in names if name in document}, where=RUN)
    if not 1 <= start.world_size <= MAX_WORLD or start.number < 0:
        raise ConfigError(f"{folder / RUN}: no run has {start.world_size} ranks and {start.number} restarts")
    return replace(start, started=values.moment(start.started))


def is_run_folder(folder: Path) -> bool:
    """Say whether ``fsdptool train`` wrote a folder: other programs may have a ``run.json``, too."""
    try:
        document = values.read_json(folder / RUN)
    except UnreadableError:
        return False
    return isinstance(document, dict) and document.get("schema") == "run" and "inputs_digest" in document


def default_folder(recipe: Path, root: Path) -> Path:
    """Return the folder of a run whose recipe alone is given.

    It is named like the recipe. A folder that contains another recipe's run is passed over: the names of the
    folders above the recipe are put in front, one by one, until the folder is not in use.

    Args:
        recipe: The recipe (YAML).
        root: Folder of the run folders.
    """
    names = recipe.absolute().with_suffix("").parts[1:]
    folders = [(root / "-".join(names[-count:])).absolute() for count in range(1, len(names) + 1)]
    return next((folder for folder in folders if not _is_others(folder, recipe)), folders[0])


def _is_others(folder: Path, recipe: Path) -> bool:
    if not is_run_folder(folder):
        return False
    with contextlib.suppress(ConfigError, OSError):
        given = read_start(folder).recipe
        # A recipe that was renamed since may be this one.
        return given is not None and (folder / given).exists() and not (folder / given).samefile(recipe)
    return False


def read_prediction(folder: Path) -> Candidate | None:
    """Return what the plan said of this run, or None if nothing could be derived."""
    path = folder / PREDICTION
    raw = values.read_own_json(path) if exists(path) else None
    from fsdptool.records.plan import Candidate

    return None if raw is None else from_json(Candidate, raw, where=PREDICTION)


def environment() -> dict[str, Any]:
    """Return the interpreter, the machine and the variables that change a run (never secrets)."""
    chosen = {name: value for name, value in sorted(os.environ.items()) if name in _RECORDED}
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


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` as JSON, whole or not at all (raises ``OSError``)."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write ``text`` aside, flush it to the disk and rename it (raises ``OSError``)."""
    # A new file under a name that nobody knows: one that exists could be a link to any other.
    aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}.part")
    try:
        with aside.open("x", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise


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


def read_inputs(folder: Path, *, trust_remote_code: bool = False) -> RunInputs:
    """Read a run folder.

    Args:
        folder: The run folder.
        trust_remote_code: Whether the model's own code may run, if the folder says that it is needed.

    Raises:
        StorageError: A file cannot be read.
        ConfigError: A file is not what it should be, distillation lacks its teacher, or the folder asks
            to run the model's own code and ``trust_remote_code`` is not set.
    """
    # Here, because the commands that only look at runs start in a third of the time without them.
    from fsdptool.modeling.methods import method_of
    from fsdptool.source.config_checks import check_consent, consented

    records: dict[str, Any] = {}
    for name, record in _FILES.items():
        if name.startswith("teacher") and not (folder / f"{name}.json").exists():
            continue
        records[name] = _read(folder / f"{name}.json", record)
    inputs = RunInputs(folder, **records)
    if method_of(inputs.recipe).teacher_choice(inputs.recipe) is not None and inputs.teacher_units is None:
        raise ConfigError(f"{folder} has no teacher_units.json", help="start the run with `fsdptool train`")
    for spec in (inputs.spec, inputs.teacher_spec):
        check_consent(spec, folder, trust_remote_code=trust_remote_code)
    consented(inputs.recipe, folder, trust_remote_code=trust_remote_code)
    return inputs


def _read(path: Path, record: type[T]) -> T:
    try:
        data = values.read_json(path)
    except UnreadableError as error:
        kind = StorageError if error.code == "FSD101" else ConfigError
        raise kind(f"{path}: {error.message}") from error
    return from_json(record, data, where=path.name)


def write_inputs(inputs: RunInputs) -> None:
    """Write the files :func:`read_inputs` reads into ``inputs.folder``, each whole or not at all."""
    for name in _FILES:
        value = getattr(inputs, name)
        if value is not None:
            write_json(inputs.folder / f"{name}.json", to_json(value))
