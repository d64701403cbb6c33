"""What this machine offers a run: its GPUs, and which of them other runs use."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from errno import EACCES, EAGAIN
from pathlib import Path
from stat import S_ISDIR

from fsdptool.distributed.devices import count_gpus, gpu_name, local_ids, split_ids, uuids_of, visible_ids
from fsdptool.errors import ConfigError, StorageError
from fsdptool.files.text import UnreadableError
from fsdptool.files.values import read_json
from fsdptool.launch.processes import ProcessIdentity, identify, is_alive
from fsdptool.records.cluster import ALLOCATOR_VARIABLES, EXPANDABLE, Cluster
from fsdptool.records.sharding import FsdpSettings
from fsdptool.runs.folder import write_json


def visible_gpus(settings: FsdpSettings) -> int:
    """Return how many GPUs of this machine the file lets a run use."""
    total = count_gpus()
    if settings.gpu_ids and settings.gpu_ids != "all":
        return min(len(gpu_set(settings.gpu_ids)), total)
    return total


def gpu_set(text: str) -> frozenset[str]:
    """Return the GPU ids in a comma list; ``1,0`` equals ``0,1``."""
    return frozenset(split_ids(text))


def registry_folders() -> tuple[Path, ...]:
    """Return the folders in which the runs of this machine and user register their GPUs.

    ``FSDPTOOL_LOCKS`` names one. By default it is one in ``XDG_RUNTIME_DIR``, which only this user can
    write, and one in the temporary folder: not every session has the first, and it goes with the last one.
    """
    if base := os.environ.get("FSDPTOOL_LOCKS"):
        return (Path(base),)
    own = os.environ.get("XDG_RUNTIME_DIR")
    temporary = Path(tempfile.gettempdir()) / f"fsdptool-gpus-{os.getuid()}"
    return (Path(own) / "fsdptool-gpus", temporary) if own else (temporary,)


def _is_ours(folder: Path) -> bool:
    """Say whether nobody else can put files into a registry: others may have made it before this user."""
    if os.environ.get("FSDPTOOL_LOCKS"):
        return folder.is_dir()
    try:
        state = folder.lstat()
    except OSError:
        return False
    return S_ISDIR(state.st_mode) and state.st_uid == os.getuid() and not state.st_mode & 0o077


def requested_gpus(settings: FsdpSettings) -> frozenset[str]:
    """Return the ids of the GPUs a run on this machine would use."""
    if settings.gpu_ids and settings.gpu_ids != "all":
        return gpu_set(settings.gpu_ids)
    everything = visible_ids()
    processes = (settings.num_processes or len(everything)) // max(settings.num_machines, 1)
    return frozenset(everything[:processes])


@contextmanager
def claim_gpus(settings: FsdpSettings, device: str, folder: Path) -> Iterator[frozenset[str]]:
    """Register a run and its GPUs while it is running; CPU runs use none.

    Raises:
        ConfigError: A live run uses one of them.
    """
    requested = requested_gpus(settings) if device == "cuda" else frozenset()
    with register_claim(requested, folder):
        yield requested


@contextmanager
def register_claim(requested: frozenset[str], folder: Path) -> Iterator[None]:
    """Register ``requested`` for this process, refusing any overlap with a live claim.

    Raises:
        ConfigError: See :func:`claim_gpus`.
        StorageError: There is no place to register GPUs in that only this user can write.
    """
    claims: list[Path] = []
    try:
        _write_claims(claims, requested, folder)
    except OSError as error:
        # Without GPUs the entry only lets `fsdptool runs` find the run.
        if requested:
            raise StorageError(
                f"the GPUs cannot be registered in {error.filename}: {error.strerror or error}",
                help="set FSDPTOOL_LOCKS to a folder that only you can write",
            ) from error
    try:
        yield
    finally:
        for claim in claims:
            with suppress(OSError):
                claim.unlink(missing_ok=True)


_LOCK_SECONDS = 60.0
"""How long a registry may be locked: others hold the lock while they read some small files."""


def _write_claims(claims: list[Path], requested: frozenset[str], folder: Path) -> None:
    """Write this process's claim into every registry, and add the files to ``claims``."""
    from filelock import FileLock, Timeout

    own = identify(os.getpid())
    if own is None:
        return  # Systems without /proc do not tell processes with one id apart.
    registries = registry_folders()
    for registry in registries:
        with suppress(OSError):
            registry.mkdir(mode=0o700, parents="FSDPTOOL_LOCKS" in os.environ, exist_ok=True)
    ours = [registry for registry in registries if _is_ours(registry)]
    if not ours:
        raise OSError(EACCES, "another user can write this folder, or it cannot be made", str(registries[-1]))
    claim = Claim(uuids_of(sorted(requested)), str(folder))
    document = {"gpus": claim.gpus, "run": claim.run, "start": own.start, "boot": own.boot}
    with ExitStack() as stack:
        for registry in ours:
            try:
                stack.enter_context(FileLock(registry / ".lock", timeout=_LOCK_SECONDS))
            except Timeout:
                raise OSError(EAGAIN, "another process keeps it locked", str(registry)) from None
        for other in (path for registry in ours for path in sorted(registry.glob("*.json"))):
            taken = _read_claim(other)
            if taken is None:
                with suppress(OSError):
                    other.unlink(missing_ok=True)
                continue
            if shared := claim.shared_with(taken):
                told = "choose other gpu_ids, or wait for that run"
                if None in claim.gpus.values() or None in taken.gpus.values():
                    told += (
                        "; nothing tells the UUIDs of these GPUs, so they are compared by number: set "
                        "FSDPTOOL_LOCKS to a folder for each job if jobs number their own GPUs from 0"
                    )
                raise ConfigError(
                    f"GPU {', '.join(shared)} is in use by the run in {taken.run} (process {other.stem})",
                    help=told,
                )
        for registry in ours:
            # Written aside and renamed: a link of that name is replaced, not followed.
            write_json(registry / f"{own.pid}.json", document)
            claims.append(registry / f"{own.pid}.json")


def live_claims() -> list[tuple[frozenset[str], str]]:
    """Return the GPUs and the run folder of every live run on this machine.

    GPUs have the ids that this process would give them, those that it cannot see their UUIDs.
    """
    found: dict[tuple[frozenset[str], str], None] = {}
    for registry in filter(_is_ours, registry_folders()):
        for path in sorted(registry.glob("*.json")):
            if (claim := _read_claim(path)) is not None:
                found[local_ids(claim.gpus), claim.run] = None
    return list(found)


@dataclass(frozen=True, slots=True)
class Claim:
    """The GPUs that a run uses.

    Attributes:
        gpus: UUIDs by the ids that the run gives them: jobs of one machine may each number theirs from 0.
            None is a GPU whose UUID nothing tells.
        run: The run folder.
    """

    gpus: Mapping[str, str | None]
    run: str

    def shared_with(self, other: Claim) -> tuple[str, ...]:
        """Return the ids, as this claim gives them, of GPUs that both use."""
        return tuple(
            ours
            for ours, uuid in self.gpus.items()
            for theirs, known in other.gpus.items()
            if (ours == theirs if uuid is None or known is None else uuid == known)
        )


def _read_claim(path: Path) -> Claim | None:
    """Return the claim in a file, or None if its process has ended or is another user's than the file."""
    try:
        owner = path.lstat().st_uid
        data = read_json(path, limit=_CLAIM_BYTES)
        process = ProcessIdentity(int(path.stem), int(data["start"]), str(data["boot"]))
        # A list has ids alone.
        gpus = dict.fromkeys(data["gpus"]) if isinstance(data["gpus"], list) else dict(data["gpus"])
        texts = (*gpus, *(uuid for uuid in gpus.values() if uuid is not None), run := data["run"])
        known = all(isinstance(text, str) for text in texts) and "\0" not in run
        alive = is_alive(process) and Path(f"/proc/{process.pid}").stat().st_uid == owner
        return Claim(gpus, run) if known and alive else None
    except (OSError, ValueError, KeyError, TypeError, UnreadableError):
        return None


_CLAIM_BYTES = 1 << 16


def local_cluster(settings: FsdpSettings) -> Cluster | None:
    """Return the cluster this machine's GPUs make, from the catalogue, or None if the GPU is not in it."""
    from fsdptool.errors import FsdptoolError
    from fsdptool.planning import load_gpu

    name = gpu_name()
    per_machine = (settings.num_processes or 1) // max(settings.num_machines, 1)
    try:
        gpu = load_gpu(name) if name else None
    except FsdptoolError:
        gpu = None
    if gpu is None:
        return None
    environment = {key: os.environ[key] for key in _PLANNED_VARIABLES if key in os.environ}
    if not {*ALLOCATOR_VARIABLES} & environment.keys():
        environment |= EXPANDABLE  # as the workers get it (``launch/command.py``)
    return Cluster(gpu, per_machine, max(settings.num_machines, 1), environment=environment)


_PLANNED_VARIABLES = (*ALLOCATOR_VARIABLES, "CUBLAS_WORKSPACE_CONFIG")
"""Variables that workers inherit and that change the memory of a run (``planning/hardware.py``)."""
