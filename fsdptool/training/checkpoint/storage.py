"""A DCP storage writer: one safetensors file per rank, read back by torch's own reader.

torch's ``FileSystemWriter`` pickles its metadata. This one keeps everything in safetensors headers,
in the form ``torch.distributed.checkpoint.HuggingFaceStorageReader`` expects (torch 2.13,
checkpoint/_hf_utils.py: ``DCP_SHARDING_INFO`` with each chunk's offsets), so reading runs no code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from fsdptool.files.safetensors_writer import Entry, Written, write_stream


class ShardWriter(StorageWriter):
    """Writes this rank's chunks to ``shard-<rank>.safetensors``; rank 0 then calls ``commit``.

    Args:
        folder: Where to write; exists.
        rank: Names the file.
        commit: Called on the coordinator once every rank has written, with file name to digest.
    """

    def __init__(self, folder: Path, rank: int, commit: Callable[[dict[str, Written]], None]) -> None:
        self._folder = folder
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
        items = {item.index.fqn: item for item in plan.items}
        if len(items) != len(plan.items):
            raise ValueError("a rank holds two chunks of one tensor, which a safetensors file cannot name")
        written = write_stream(self._folder / name, [_entry(i, planner) for i in plan.items], _metadata(plan))
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


def shard_name(rank: int) -> str:
    """Return the file name of a rank's share."""
    return f"shard-{rank:05d}.safetensors"


def _metadata(plan: SavePlan) -> dict[str, str]:
    offsets = {}
    for item in plan.items:
        if item.tensor_data is None:
            raise ValueError(f"{item.index.fqn} is not a tensor; checkpoints hold tensors and JSON only")
        offsets[item.index.fqn] = {"saved_offsets": list(item.tensor_data.chunk.offsets)}
    return {"DCP_SHARDING_INFO": json.dumps(offsets), "DCP_VERSION": "1.0", "format": "pt"}


def _entry(item: WriteItem, planner: SavePlanner) -> Entry:
    data = item.tensor_data
    assert data is not None
    dtype = data.properties.dtype
    return Entry(item.index.fqn, dtype, tuple(data.chunk.sizes), partial(_resolve, planner, item))


def _resolve(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    value = planner.resolve_data(item)
    assert isinstance(value, torch.Tensor)
    return value


def _size(item: WriteItem) -> int:
    data = item.tensor_data
    assert data is not None
    return data.chunk.sizes.numel() * data.properties.dtype.itemsize
