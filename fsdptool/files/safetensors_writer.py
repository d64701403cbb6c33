"""Writes safetensors files tensor by tensor, digesting on the way.

``safetensors.torch.save`` and torch's own DCP writer (torch 2.13, checkpoint/filesystem.py) first
build the whole file in memory; for a rank's share of a large model that doubles the host memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its name, dtype, shape, and how to get its value on the CPU when due."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    value: Callable[[], torch.Tensor | None]

    @property
    def bytes(self) -> int:
        """Size of the data."""
        count = self.dtype.itemsize
        for size in self.shape:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Written:
    """A finished file: size in bytes and SHA-256 in hex."""

    bytes: int
    sha256: str


def write_stream(path: Path, entries: Iterable[Entry], metadata: Mapping[str, str]) -> Written:
    """Write one safetensors file and flush it to the disk.

    Only one tensor's value is in memory at any time. Values are requested in order.

    Raises:
        OSError: The file cannot be written (full disk).
        ValueError: A dtype has no safetensors name.
    """
    listed = list(entries)
    digest = hashlib.sha256()
    written = 0
    with path.open("wb", buffering=0) as stream:

        def put(data: Any) -> None:
            nonlocal written
            view = memoryview(data)
            digest.update(view)
            while view:
                count = stream.write(view)
                written += count or 0
                view = view[count:]

        put(_header(listed, metadata))
        for entry in listed:
            value = entry.value()
            if value is not None and entry.bytes:
                put(_bytes_of(value))
            # Otherwise the next value would be gathered while this one is still in memory.
            del value
        os.fsync(stream.fileno())
    return Written(written, digest.hexdigest())


def _header(entries: list[Entry], metadata: Mapping[str, str]) -> bytes:
    table: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for entry in entries:
        name = str(entry.dtype).removeprefix("torch.")
        if name not in _DTYPES:
            raise ValueError(f"{entry.name}: safetensors has no dtype {name}")
        end = offset + entry.bytes
        table[entry.name] = {
            "dtype": _DTYPES[name],
            "shape": list(entry.shape),
            "data_offsets": [offset, end],
        }
        offset = end
    text = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _bytes_of(tensor: torch.Tensor) -> Any:
    import torch

    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()


def digest_file(path: Path) -> Written:
    """Return size and SHA-256 of a file on disk."""
    with path.open("rb") as stream:
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
    return Written(path.stat().st_size, sha256)
