"""Writes safetensors files tensor by tensor, digesting on the way, and opens them for reading.

``safetensors.torch.save`` and torch's own DCP writer (torch 2.13, checkpoint/filesystem.py) first
build the whole file in memory; for a rank's share of a large model that doubles the host memory.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.files.text import UnreadableError, open_regular
from fsdptool.files.values import load_json

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


_WIDTHS = {
    name: 8 if name.endswith("64") else 4 if name.endswith("32") else 2 if name.endswith("16") else 1
    for name in _DTYPES.values()
}
"""Bytes of an element."""

HEADER_LIMIT = 100_000_000
"""What the safetensors library reads at most (0.6, ``MAX_HEADER_SIZE``)."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
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


def write_stream(path: Path, entries: Iterable[TensorEntry], metadata: Mapping[str, str]) -> Written:
    """Write one safetensors file and flush it to the disk.

    Only one tensor's value is in memory at any time. Values are requested in order.

    Raises:
        OSError: The file cannot be written (full disk).
        ValueError: A dtype has no safetensors name, or a value is not as its entry says.
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
            if value is not None and (tuple(value.shape), value.dtype) != (entry.shape, entry.dtype):
                what = f"{tuple(value.shape)} {value.dtype} instead of {entry.shape} {entry.dtype}"
                raise ValueError(f"{entry.name} is {what}")
            if value is not None and entry.bytes:
                put(_bytes_of(value))
            # Otherwise the next value would be gathered while this one is still in memory.
            del value
        os.fsync(stream.fileno())
    return Written(written, digest.hexdigest())


def _header(entries: list[TensorEntry], metadata: Mapping[str, str]) -> bytes:
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


def open_safetensors(path: Path | str) -> Any:
    """Open a safetensors file for reading, on the CPU.

    Raises:
        OSError: It cannot be opened, or is not a regular file: the library would wait for a FIFO for ever.
        SafetensorError: It is not a safetensors file.
    """
    from safetensors import safe_open

    try:
        open_regular(path).close()
    except UnreadableError as error:
        raise OSError(error.message) from error
    return safe_open(str(path), framework="pt", device="cpu")


@dataclass(frozen=True, slots=True)
class Stored:
    """One tensor as a file's header describes it."""

    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and the file's metadata.

    Nothing but the header is read, and nothing it says is believed: sizes must fit the dtype and the
    shape, and the tensors must fill the file without gap or overlap.

    Raises:
        ValueError: It is not such a file; the message is one line.
        OSError: It cannot be read.
    """
    with _opened(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, HEADER_LIMIT):
            raise ValueError("its header is longer than the file, or than any header")
        table = load_json(stream.read(length).decode("utf-8"))
    if not isinstance(table, dict):
        raise ValueError("its header is not an object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError("its metadata is not text")
    found: dict[str, Stored] = {}
    spans = []
    for name, entry in table.items():
        found[name], span = _stored(name, entry)
        spans.append(span)
    end = 0
    for start, stop in sorted(spans):
        if start != end:
            raise ValueError("its tensors overlap or leave a gap")
        end = stop
    if 8 + length + end != size:
        raise ValueError("its tensors do not end where the file ends")
    return found, metadata


def _stored(name: str, entry: Any) -> tuple[Stored, tuple[int, int]]:
    try:
        dtype, shape, (start, stop) = entry["dtype"], entry["shape"], entry["data_offsets"]
        numbers = [*shape, start, stop]
        width = _WIDTHS[dtype]
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"its header does not describe {name!r}") from None
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"{name!r} has sizes or offsets that are not counts")
    if stop - start != math.prod(shape) * width:
        raise ValueError(f"{name!r} does not have the size of its shape")
    return Stored(dtype, tuple(shape)), (start, stop)


def digest_file(path: Path) -> Written:
    """Return size and SHA-256 of a file on disk."""
    with _opened(path) as opened:
        # An unbuffered file reads into a buffer, which the type of binary files does not say.
        stream: Any = opened
        sha256 = hashlib.file_digest(stream, "sha256").hexdigest()
        return Written(os.fstat(stream.fileno()).st_size, sha256)


def _opened(path: Path) -> BufferedReader:
    """Open a file as :func:`open_regular`; anything else raises ``OSError``."""
    try:
        return open_regular(path)
    except UnreadableError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise OSError(errno.EINVAL, error.message, str(path)) from error
