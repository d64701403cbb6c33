"""The shard files of a checkpoint: one per rank, written and read through DCP.

A safetensors file names each tensor once; further chunks of one tensor get numbered names.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from fsdptool.distributed.session import LongWait
from fsdptool.files.safetensors_writer import Entry, Written, write_stream
from fsdptool.runs.manifest import SHARDING_KEY, shard_name, stored_name, tensor_name


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


def _entry(name: str, item: WriteItem, planner: SavePlanner, pace: LongWait) -> Entry:
    data = item.tensor_data
    assert data is not None
    dtype = data.properties.dtype
    return Entry(name, dtype, tuple(data.chunk.sizes), partial(_resolve, planner, item, pace))


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
