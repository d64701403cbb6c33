"""Tensors that a tensor-parallel group divides, as checkpoints hold them: chunks of the whole tensor.

A fused projection is cut part by part, so a rank holds several chunks of it. DCP asks a value for its chunks
where it offers them (torch 2.13, ``distributed/_checkpointable.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.tensor import DTensor

from fsdptool.distributed.materialize import held_range
from fsdptool.distributed.shard import local
from fsdptool.modeling.tensor_group import ALONE, TensorGroup
from fsdptool.records.tensor_plan import Placement


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A part of a whole tensor: where it begins, and its values, live."""

    offsets: tuple[int, ...]
    values: torch.Tensor


class SplitTensor(torch.Tensor):
    """What one rank holds of a tensor: rows of the tensor-parallel rank's part, with the shape of the whole.

    A tensor, because DCP looks up chunks of tensors only; no operator runs on it.

    Args:
        value: The local part; a DTensor over the ranks that FSDP shards over, or whole there.
        placement: How the group divides the whole tensor.
        group: This rank's place.
    """

    value: torch.Tensor
    placement: Placement
    group: TensorGroup
    chunks: tuple[TensorChunk, ...]

    @staticmethod
    def __new__(cls, value: torch.Tensor, placement: Placement, group: TensorGroup) -> SplitTensor:
        make: Any = torch.Tensor._make_wrapper_subclass
        self: SplitTensor = make(
            cls, placement.shape, dtype=value.dtype, device=local(value).device, storage_size=0
        )
        self.value, self.placement, self.group = value, placement, group
        self.chunks = tuple(self._chunks())
        return self

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError(f"{func} on a tensor that is divided over ranks")

    def _chunks(self) -> list[TensorChunk]:
        part, (cut, first, last) = local(self.value), held_range(self.value)
        dim = self.placement.dim
        assert dim is not None
        chunks = []
        for inside, whole, length in self.placement.pieces(self.group.size, self.group.rank):
            offsets = [0] * part.dim()
            if cut != 0:
                # Fused experts: whole ones of a group, and a part of each.
                assert dim == 0
                offsets[0], offsets[cut] = whole, first
                chunks.append(TensorChunk(tuple(offsets), part.narrow(0, inside, length)))
            elif dim == 0:
                begin, end = max(first, inside), min(last, inside + length)
                if begin >= end:
                    continue
                offsets[0] = begin - inside + whole
                chunks.append(TensorChunk(tuple(offsets), part[begin - first : end - first]))
            elif last > first:
                offsets[0], offsets[dim] = first, whole
                chunks.append(TensorChunk(tuple(offsets), part.narrow(dim, inside, length)))
        return chunks

    def whole(self) -> torch.Tensor:
        """Return the whole tensor; a collective of all ranks."""
        value = self.value.full_tensor() if isinstance(self.value, DTensor) else self.value
        parts = [torch.empty_like(value) for _ in range(self.group.size)]
        dist.all_gather(parts, value.contiguous(), group=self.group.process_group)
        dim = self.placement.dim
        assert dim is not None
        result = torch.empty(self.placement.shape, dtype=value.dtype, device=value.device)
        for rank, part in enumerate(parts):
            for inside, whole, length in self.placement.pieces(self.group.size, rank):
                result.narrow(dim, whole, length).copy_(part.narrow(dim, inside, length))
        return result

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        properties = TensorProperties.create_from_tensor(local(self.value))
        return [
            WriteItem(
                index=MetadataIndex(fqn, torch.Size(chunk.offsets), number),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(_chunk_metadata(chunk), properties, self.size()),
            )
            for number, chunk in enumerate(self.chunks)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [_chunk_metadata(chunk) for chunk in self.chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        wanted = tuple(index.offset or ())
        return next(chunk.values for chunk in self.chunks if chunk.offsets == wanted)


def _chunk_metadata(chunk: TensorChunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(offsets=torch.Size(chunk.offsets), sizes=chunk.values.shape)


@dataclass(frozen=True, slots=True)
class Division:
    """How a run's tensors are divided over a tensor-parallel group, by parameter name."""

    group: TensorGroup = ALONE
    placements: Mapping[str, Placement] = field(default_factory=dict)

    def wrap(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Return ``tensors`` of a run (``model/<fqn>``, ``optimizer/<fqn>/<state>``, ``ema/<fqn>``) with the
        divided ones as :class:`SplitTensor`."""
        return {name: self._wrapped(name, value) for name, value in tensors.items()}

    def _wrapped(self, name: str, value: torch.Tensor) -> Any:
        kind, _, rest = name.partition("/")
        placement = self.placements.get(rest.rpartition("/")[0] if kind == "optimizer" else rest)
        if placement is None or placement.dim is None or value.dim() == 0:
            return value
        return SplitTensor(value, placement, self.group.of(placement))


UNDIVIDED = Division()
