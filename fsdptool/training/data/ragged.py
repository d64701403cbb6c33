"""A table of integer rows of unequal length on disk: written once, then read memory-mapped.

A folder holds, per column, ``NAME.bin`` (the values end to end) and ``NAME.ends.npy`` (where each
row ends), ``hashes.npy`` (one per row), and ``table.json``, written last. A folder without it was
never finished.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from fsdptool.errors import StorageError
from fsdptool.files.text import private_folder

_DIGEST_BYTES = 20


class RaggedWriter:
    """Writes a table row by row. Use it as a context manager; :meth:`close` finishes it."""

    def __init__(self, folder: Path, columns: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._types = {name: np.dtype(kind) for name, kind in columns.items()}
        self._files: dict[str, BinaryIO] = {name: (folder / f"{name}.bin").open("wb") for name in columns}
        self._ends: dict[str, list[int]] = {name: [] for name in columns}
        self._lengths = dict.fromkeys(columns, 0)
        self._digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        self._row = hashlib.blake2b(digest_size=8)
        self._hashes: list[int] = []

    def __enter__(self) -> RaggedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files.values():
            file.close()

    def extend(self, values: Mapping[str, Any]) -> None:
        """Append values to the row in progress."""
        for name, items in values.items():
            array = np.asarray(items, dtype=self._types[name])
            data = array.tobytes()
            self._files[name].write(data)
            self._digest.update(data)
            self._row.update(data)
            self._lengths[name] += len(array)

    def end(self) -> None:
        """End the row in progress."""
        for name, length in self._lengths.items():
            self._ends[name].append(length)
            self._digest.update(b"%d;" % length)
        self._hashes.append(int.from_bytes(self._row.digest(), "big") >> 1)
        self._row = hashlib.blake2b(digest_size=8)

    def add(self, values: Mapping[str, Any]) -> None:
        """Append one whole row."""
        self.extend(values)
        self.end()

    def close(self, facts: Mapping[str, Any]) -> None:
        """Finish the table; ``facts`` (plain JSON data) are kept with it."""
        for name, file in self._files.items():
            file.flush()
            os.fsync(file.fileno())
            file.close()
            np.save(self._folder / f"{name}.ends.npy", np.asarray(self._ends[name], dtype=np.int64))
        np.save(self._folder / "hashes.npy", np.asarray(self._hashes, dtype=np.int64))
        document = {
            "columns": {name: kind.str for name, kind in self._types.items()},
            "digest": self._digest.hexdigest(),
            "facts": dict(facts),
        }
        (self._folder / "table.json").write_text(json.dumps(document, indent=1), encoding="utf-8")


class Ragged:
    """A finished table. Picklable: a loading process maps the files again by itself."""

    def __init__(self, folder: Path) -> None:
        document = json.loads((folder / "table.json").read_text(encoding="utf-8"))
        self.folder = folder
        self.digest: str = document["digest"]
        self.facts: dict[str, Any] = document["facts"]
        self._types: dict[str, str] = document["columns"]
        self._values: dict[str, NDArray[Any]] = {}
        self._ends: dict[str, NDArray[np.int64]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"])  # type: ignore[misc]

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self._types)

    def values(self, name: str) -> NDArray[Any]:
        """Return all values of a column end to end (memory-mapped, read-only)."""
        if name not in self._values:
            path = self.folder / f"{name}.bin"
            if path.stat().st_size == 0:
                self._values[name] = np.empty(0, dtype=self._types[name])
            else:
                self._values[name] = np.memmap(path, dtype=self._types[name], mode="r")
        return self._values[name]

    def ends(self, name: str) -> NDArray[np.int64]:
        """Return where each row of a column ends."""
        if name not in self._ends:
            self._ends[name] = np.load(self.folder / f"{name}.ends.npy", mmap_mode="r")
        return self._ends[name]

    def __len__(self) -> int:
        return len(self.ends(next(iter(self._types))))

    def lengths(self, name: str) -> NDArray[np.int64]:
        """Return the length of each row of a column."""
        return np.diff(self.ends(name), prepend=0)

    def hashes(self) -> NDArray[np.int64]:
        """Return 63 bits of each row's content: they decide what is held out."""
        hashes: NDArray[np.int64] = np.load(self.folder / "hashes.npy", mmap_mode="r")
        return hashes

    def row(self, name: str, index: int) -> NDArray[Any]:
        """Return one row of one column (a view)."""
        ends = self.ends(name)
        start = int(ends[index - 1]) if index else 0
        return self.values(name)[start : int(ends[index])]


def made_once(folder: Path, make: Callable[[Path], None], *, finished: str) -> None:
    """Make ``folder`` by ``make(aside)`` unless it is there: once per machine, whole or not at all.

    Every rank may call this; one works, the others wait for it (a file lock beside the folder).

    Args:
        folder: Where the result goes.
        make: Fills an empty folder beside it, which is then renamed.
        finished: File whose presence says that the folder is whole.

    Raises:
        StorageError: The place cannot be written.
    """
    from filelock import FileLock

    if (folder / finished).exists():
        return
    aside = folder.with_name(f".{folder.name}.part")
    try:
        private_folder(folder.parent.parent)
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{folder.name}.lock")):
            if (folder / finished).exists():
                return
            for leftover in (aside, folder):
                if leftover.exists():
                    shutil.rmtree(leftover)
            aside.mkdir()
            try:
                make(aside)
                aside.rename(folder)
            except BaseException:
                shutil.rmtree(aside, ignore_errors=True)
                raise
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written: {error.strerror or error}",
            help="free space there or set FSDPTOOL_CACHE to another folder",
        ) from error
