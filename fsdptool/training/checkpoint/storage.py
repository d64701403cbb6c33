"""Writing and reading one checkpoint, on whatever number of ranks. Collective throughout.

Sharded checkpoints are written through DCP, one file per rank; full ones through rank 0. A safetensors file
names each tensor once; further chunks of one tensor get numbered names.
"""

from __future__ import annotations

import errno
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from fsdptool.distributed.session import LongWait
from fsdptool.errors import ConfigError, FsdptoolError, StorageError, WorkerError
from fsdptool.files.safetensors_writer import TensorEntry, Written, write_stream
from fsdptool.runs.manifest import (
    FULL_NAME,
    SHARDING_KEY,
    Manifest,
    check_contents,
    check_file,
    list_checkpoints,
    read_manifest,
    shard_name,
    step_of,
    stored_name,
    tensor_name,
)
from fsdptool.training.checkpoint.split_tensors import UNDIVIDED, Division, SplitTensor
from fsdptool.training.memory_snapshot import is_out_of_memory

if TYPE_CHECKING:
    from fsdptool.runs.events import EventLog


class ShardWriter(StorageWriter):
    """Writes this rank's chunks to ``shard-<rank>.safetensors``; rank 0 then calls ``commit``.

    Args:
        folder: Where to write; exists.
        rank: Names the file.
        commit: Called on the coordinator once every rank has written, with file name to digest.
        pace: Told of each tensor that is written; ranks that have written wait there for the others.
    """

    def __init__(
        self, folder: Path, rank: int, commit: Callable[[dict[str, Written]], None], pace: LongWait
    ) -> None:
        self._folder = folder
        self._pace = pace
        self._rank = rank
        self._commit = commit

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Nothing is kept between checkpoints."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        """Nothing to set up."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Return the plans as they are."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items; the first result carries the file's digest."""
        name = shard_name(self._rank)
        stored = _stored_names(plan)
        entries = [_entry(key, item, planner, self._pace) for key, item in stored.items()]
        self._pace.begin()
        try:
            written = write_stream(self._folder / name, entries, _metadata(stored))
        finally:
            # One that could not write is not waited for: what follows tells the others.
            self._pace.wait()
        results = [WriteResult(i.index, _size(i), (name, written)) for i in plan.items]
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit on the coordinator."""
        self._commit(dict(result.storage_data for group in results for result in group))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True


def _stored_names(plan: SavePlan) -> dict[str, WriteItem]:
    """Return this rank's chunks by the names they get in its file."""
    stored: dict[str, WriteItem] = {}
    chunks: Counter[str] = Counter()
    for item in plan.items:
        stored[stored_name(item.index.fqn, chunks[item.index.fqn])] = item
        chunks[item.index.fqn] += 1
    return stored


def _metadata(stored: Mapping[str, WriteItem]) -> dict[str, str]:
    offsets = {}
    for name, item in stored.items():
        if item.tensor_data is None:
            raise ValueError(f"{item.index.fqn} is not a tensor; checkpoints hold tensors and JSON only")
        offsets[name] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
    return {SHARDING_KEY: json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}


def _entry(name: str, item: WriteItem, planner: SavePlanner, pace: LongWait) -> TensorEntry:
    data = item.tensor_data
    assert data is not None
    dtype = data.properties.dtype
    return TensorEntry(name, dtype, tuple(data.chunk.sizes), partial(_resolve, planner, item, pace))


def _resolve(planner: SavePlanner, item: WriteItem, pace: LongWait) -> torch.Tensor:
    pace.report()
    value = planner.resolve_data(item)
    assert isinstance(value, torch.Tensor)
    return value.contiguous()


def _size(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize


class ShardReader(HuggingFaceStorageReader):
    """Reads checkpoints in which a file may hold several chunks of one tensor."""

    def read_metadata(self) -> Metadata:
        """Return what the files hold, numbered chunks under the name of their tensor."""
        metadata = super().read_metadata()
        self._stored: dict[MetadataIndex, str] = {}
        tensors: dict[str, Any] = {}
        for name, item in metadata.state_dict_metadata.items():
            known = tensors.get(tensor_name(name))
            tensors[tensor_name(name)] = item if known is None else _joined(known, item)
        storage: dict[MetadataIndex, Any] = {}
        for index, info in metadata.storage_data.items():
            moved = MetadataIndex(tensor_name(index.fqn), index.offset)
            self._stored[moved] = index.fqn
            storage[moved] = info
        metadata.state_dict_metadata, metadata.storage_data = tensors, storage
        return metadata

    def _process_read_request(self, f: Any, req: ReadItem, planner: LoadPlanner) -> None:
        slices = tuple(
            slice(offset, offset + length)
            for offset, length in zip(req.storage_offsets, req.lengths, strict=True)
        )
        index = MetadataIndex(req.storage_index.fqn, req.storage_index.offset)
        values = f.get_slice(self._stored[index])[slices] if slices else f.get_tensor(self._stored[index])
        target = planner.resolve_tensor(req).detach()
        target.copy_(values)
        planner.commit_tensor(req, target)


def _joined(first: Any, second: Any) -> TensorStorageMetadata:
    size = torch.Size(max(a, b) for a, b in zip(first.size, second.size, strict=True))
    return TensorStorageMetadata(first.properties, size, [*first.chunks, *second.chunks])


class TrainState(Protocol):
    """What a checkpoint holds: live state of the trainer (``training/state.py``), or of a test."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return every tensor by name, as live references that a load copies into.

        Names are ``model/<fqn>``, ``optimizer/<fqn>/<state>``, ``ema/<fqn>``. DTensors are sharded by their
        placements; any other tensor is the same on every rank and saved once. The optimizer's states exist
        already.
        """
        ...

    def progress(self) -> dict[str, Any]:
        """Return plain JSON data that is equal on all ranks; it has at least ``step``."""
        ...

    def rank_tensors(self) -> dict[str, torch.Tensor]:
        """Return this rank's own tensors (random generator states); they are never resharded."""
        ...

    def restore(self, progress: Mapping[str, Any], rank_tensors: Mapping[str, torch.Tensor] | None) -> None:
        """Continue from a checkpoint whose tensors are loaded already.

        Args:
            progress: What :meth:`progress` returned when it was saved, equal on all ranks.
            rank_tensors: What :meth:`rank_tensors` returned for this rank, or None when the run continues on
                another number of ranks (generators are then seeded from the step).
        """
        ...


@dataclass(frozen=True, slots=True)
class Staged:
    """A checkpoint's content, detached from the live training state.

    ``tensors`` are shared by all ranks (DTensors or replicas); ``own`` are this rank's alone.
    """

    tensors: dict[str, torch.Tensor]
    own: dict[str, torch.Tensor]


Commit = Callable[[dict[str, Written]], None]


def own_name(rank: int, name: str) -> str:
    """Return the name under which a rank's own tensor is stored."""
    return f"rank/{rank:05d}/{name}"


def save_sharded(
    staged: Staged, folder: Path, group: dist.ProcessGroup | None, commit: Commit, pace: LongWait
) -> None:
    """Write every rank's share into ``folder``; the coordinator commits when all are on disk.

    ``pace`` lets ranks that have written wait for the others.

    Raises:
        StorageError: Any rank failed; raised on every rank with the first failure's reason.
    """
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    state = {**staged.tensors, **{own_name(rank, name): value for name, value in staged.own.items()}}
    writer = ShardWriter(folder, rank, commit, pace)
    try:
        save(state, storage_writer=writer, process_group=group, no_dist=not dist.is_initialized())
    except CheckpointException as error:
        raise translated(error, "the checkpoint cannot be written") from error


_PASSING = frozenset(
    (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOTCONN, errno.ECONNRESET, errno.EBUSY)
)
"""What a file server that restarts answers with; a full disk or a missing right is none of these."""


def translated(error: CheckpointException, what: str) -> FsdptoolError:
    """Return DCP's exception in one line, as an error whose kind says whether another start could help.

    Args:
        error: Raised on every rank with what some of them met.
        what: What could not be done.

    Returns:
        A ``StorageError`` if every failure is the file system's and lasting, a ``WorkerError`` (retryable)
        otherwise.
    """
    rank, (reason, _) = min(error.failures.items(), key=lambda item: item[0])
    line = f"{what}: rank {rank}: {reason}".splitlines()[0]
    causes = [cause for cause, _ in error.failures.values()]
    lasting = all(isinstance(cause, OSError) and cause.errno not in _PASSING for cause in causes)
    return StorageError(line) if lasting else WorkerError(line)


def save_full(
    staged: Staged, folder: Path, group: dist.ProcessGroup | None, commit: Commit, pace: LongWait
) -> None:
    """Gather tensor by tensor and write one file on rank 0, beside every rank's own tensors.

    No rank holds more than one whole tensor at a time. ``pace`` lets the others wait for rank 0.

    Raises:
        StorageError: Any rank failed; raised on every rank.
    """
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    failure: OSError | None = None
    files: dict[str, Written] = {}
    gathering = _Gathering(sorted(staged.tensors), staged.tensors, pace)
    pace.begin()
    try:
        if rank == 0:
            entries = [_full_entry(name, staged.tensors[name], gathering) for name in gathering.names]
            files[FULL_NAME] = write_stream(folder / FULL_NAME, entries, {"format": "pt"})
        own = [
            TensorEntry(own_name(rank, name), value.dtype, tuple(value.shape), partial(_same, value))
            for name, value in staged.own.items()
        ]
        files[shard_name(rank)] = write_stream(folder / shard_name(rank), own, {"format": "pt"})
    except OSError as error:
        failure = error
    # A rank that could not write still takes part in every gather, or the others would wait for it.
    gathering.finish()
    pace.wait()
    _agree(failure, files, group, commit)


class _Gathering:
    """Gathers tensors in one order on all ranks, each when its turn comes."""

    def __init__(self, names: list[str], tensors: dict[str, torch.Tensor], pace: LongWait) -> None:
        self.names = names
        self._tensors = tensors
        self._pace = pace
        self._next = 0

    def take(self, name: str) -> torch.Tensor:
        assert self.names[self._next] == name
        self._next += 1
        self._pace.report()
        value = self._tensors[name]
        if isinstance(value, SplitTensor):
            return value.whole()
        return value.full_tensor() if isinstance(value, DTensor) else value

    def finish(self) -> None:
        while self._next < len(self.names):
            value = self.take(self.names[self._next])
            if value.is_cuda:
                # NCCL only enqueues: this rank would ask for all tensors at once, and the last request would
                # time out while rank 0 writes the first.
                torch.cuda.current_stream().synchronize()
            # Otherwise the next one would be gathered while this one is still in memory.
            del value


def _full_entry(name: str, value: torch.Tensor, gathering: _Gathering) -> TensorEntry:
    return TensorEntry(name, value.dtype, tuple(value.shape), partial(gathering.take, name))


def _same(value: torch.Tensor) -> torch.Tensor:
    return value


def _agree(
    failure: OSError | None,
    files: dict[str, Written],
    group: dist.ProcessGroup | None,
    commit: Commit,
) -> None:
    reports: list[Any] = [(str(failure) if failure else None, files)]
    if dist.is_initialized():
        reports = [None] * dist.get_world_size(group)
        dist.all_gather_object(reports, (str(failure) if failure else None, files), group=group)
    reason = next((f"rank {rank}: {text}" for rank, (text, _) in enumerate(reports) if text), None)
    if reason is None and (not dist.is_initialized() or dist.get_rank(group) == 0):
        try:
            commit({name: entry for _, part in reports for name, entry in part.items()})
        except OSError as error:
            reason = f"rank 0: {error}"
    if dist.is_initialized():
        shared = [reason]
        dist.broadcast_object_list(shared, src=0, group=group)
        reason = shared[0]
    if reason is not None:
        raise StorageError(f"the checkpoint cannot be written: {reason}")


def choose(
    resume: str, folder: Path, group: dist.ProcessGroup | None, events: EventLog
) -> tuple[Path, Manifest] | None:
    """Agree on the checkpoint to load; ``auto`` skips damaged ones.

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


def load_into(
    state: TrainState,
    path: Path,
    manifest: Manifest,
    group: dist.ProcessGroup | None,
    division: Division = UNDIVIDED,
) -> None:
    """Copy a checked checkpoint into the live state and restore its progress.

    Raises:
        ConfigError: A tensor is missing from the checkpoint or has another shape.
        StorageError: A file cannot be read.
        WorkerError: A file could not be read, and might be at another time.
    """
    rank = _rank(group)
    same_ranks = manifest.world_size == (dist.get_world_size(group) if dist.is_initialized() else 1)
    reader = ShardReader(str(path))
    own = (
        {name: torch.empty_like(value) for name, value in state.rank_tensors().items()} if same_ranks else {}
    )
    if "rng_cuda" in own and own_name(rank, "rng_cuda") not in reader.read_metadata().state_dict_metadata:
        # Written by a run on the CPU, which has no such generator.
        del own["rng_cuda"]
    targets: dict[str, Any] = division.wrap({k: v.detach() for k, v in state.tensors().items()})
    targets.update({own_name(rank, name): value for name, value in own.items()})
    try:
        load(
            targets,
            storage_reader=reader,
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
