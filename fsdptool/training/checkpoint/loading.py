"""Choosing the checkpoint to continue from, and reading it on whatever number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import load

from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.runs.manifest import (
    Manifest,
    check_contents,
    check_file,
    list_checkpoints,
    read_manifest,
    step_of,
)
from fsdptool.training.checkpoint.saving import own_name, translated
from fsdptool.training.memory_snapshot import is_out_of_memory

if TYPE_CHECKING:
    from fsdptool.training.interfaces import Events, TrainState


def choose(
    resume: str, folder: Path, group: dist.ProcessGroup | None, events: Events
) -> tuple[Path, Manifest] | None:
    """Agree on the checkpoint to load; ``auto`` passes over damaged ones.

    Each rank digests its share of the files. All ranks return the same answer.

    Raises:
        ConfigError: ``resume`` names a checkpoint that is missing or damaged, or there are checkpoints
            and every one is damaged: nobody decided to start over.
    """
    named = None if resume == "auto" else Path(resume)
    candidates = share([str(path) for path in ([named] if named else list_checkpoints(folder))], group)
    wrong: str | None = None
    for text in candidates:
        path = Path(text)
        manifest, wrong = _check(path, group)
        if wrong is None and manifest is not None:
            return path, manifest
        if named is not None:
            raise ConfigError(
                f"checkpoint {path} cannot be used: {wrong}",
                help="give another checkpoint, or --resume auto for the newest good one",
            )
        if _rank(group) == 0:
            events.emit("checkpoint_damaged", path=str(path), step=step_of(path), reason=wrong)
    if candidates:
        raise ConfigError(
            f"none of the {len(candidates)} checkpoints in {folder} can be used; the oldest: {wrong}",
            help="give one with --resume PATH, or start over with --force",
        )
    return None


def _check(path: Path, group: dist.ProcessGroup | None) -> tuple[Manifest | None, str | None]:
    manifest: Manifest | None = None
    wrong: str | None = None
    try:
        manifest = read_manifest(path)
    except ConfigError as error:
        wrong = error.message
    rank, world_size = _rank(group), dist.get_world_size(group) if dist.is_initialized() else 1
    for index, (name, expected) in enumerate(sorted(manifest.files.items()) if manifest else ()):
        if index % world_size == rank and wrong is None:
            wrong = check_file(path, name, expected)
    if rank == 0 and wrong is None and manifest is not None:
        wrong = check_contents(path, manifest)
    findings = [wrong]
    if dist.is_initialized():
        findings = [None] * world_size
        dist.all_gather_object(findings, wrong, group=group)
    return manifest, next((text for text in findings if text), None)


def load_into(state: TrainState, path: Path, manifest: Manifest, group: dist.ProcessGroup | None) -> None:
    """Copy a checked checkpoint into the live state and restore its progress.

    Raises:
        ConfigError: A tensor is missing from the checkpoint or has another shape.
        StorageError: A file cannot be read.
        WorkerError: A file could not be read, and might be at another time.
    """
    rank = _rank(group)
    same_ranks = manifest.world_size == (dist.get_world_size(group) if dist.is_initialized() else 1)
    own = (
        {name: torch.empty_like(value) for name, value in state.rank_tensors().items()} if same_ranks else {}
    )
    targets: dict[str, Any] = dict(state.tensors())
    targets.update({own_name(rank, name): value for name, value in own.items()})
    try:
        load(
            targets,
            storage_reader=HuggingFaceStorageReader(str(path)),
            process_group=group,
            no_dist=not dist.is_initialized(),
        )
    except CheckpointException as error:
        raise _unsuited(error, path) from error
    state.restore(manifest.progress, own if same_ranks else None)


def _unsuited(error: CheckpointException, path: Path) -> FsdptoolError:
    """Tell a checkpoint of another model from a file that cannot be read and from a lack of memory.

    The planner says what is missing or of another shape with ``RuntimeError`` and ``ValueError`` (torch
    2.13, checkpoint/default_planner.py, planner_helpers.py).
    """
    causes = [cause for cause, _ in error.failures.values()]
    if any(isinstance(cause, OSError) for cause in causes):
        return translated(error, f"checkpoint {path} cannot be read")
    for cause in causes:
        if is_out_of_memory(cause):
            raise cause
    return ConfigError(
        translated(error, f"checkpoint {path} does not match this run").message,
        help="resume with the recipe and model it was written with",
    )


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def share(value: list[str], group: dist.ProcessGroup | None) -> list[str]:
    """Return rank 0's ``value`` on every rank."""
    if not dist.is_initialized():
        return value
    shared: list[Any] = [value]
    dist.broadcast_object_list(shared, src=0, group=group)
    result: list[str] = shared[0]
    return result
