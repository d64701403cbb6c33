"""The on-disk store of computed results, and the digests of code that keep an entry from going stale.

Layout: ``<folder>/v1/<kind>/<key>.json``. The first line of a file is a JSON header, the rest the
payload. Writers hold the lock of the store, write a ``.part`` file and rename it, so a reader sees
a whole entry or none, and any ``.part`` found under the lock was left by a writer that died.
Nothing here raises for a store that cannot be used: the answer matters more than keeping it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
import zlib
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.files.text import private_folder
from fsdptool.records.diagnostic import Diagnostic, digest

if TYPE_CHECKING:
    from fsdptool.records.command_documents import CacheEntry, CacheReport

_VERSION = "v1"
_SUFFIX = ".json"
_ASIDE = ".corrupt"
_PART = ".part"
_LOCK_SECONDS = 10.0
_COMPRESS_FROM = 16 * 1024

UNUSABLE = "CACHE001"
CORRUPT = "CACHE002"


def cache_folder() -> Path:
    """Return the folder answers are kept in.

    ``FSDPTOOL_CACHE`` wins, then ``XDG_CACHE_HOME/fsdptool``, then ``~/.cache/fsdptool``.
    """
    if named := os.environ.get("FSDPTOOL_CACHE"):
        return Path(named).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "fsdptool"


class _CorruptError(Exception):
    """An entry whose bytes are not what was written."""


class Store:
    """Answers by kind and key.

    Args:
        folder: Where to keep them; :func:`cache_folder` by default.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder if folder is not None else cache_folder()
        self._root = self.folder / _VERSION

    def key(self, parts: Any) -> str:
        """Return the key of an answer that was derived from ``parts`` (plain data)."""
        return digest(parts).removeprefix("sha256:")

    def get(self, kind: str, key: str) -> tuple[Any | None, tuple[Diagnostic, ...]]:
        """Return the stored value or None, and findings about the store.

        A corrupt entry is reported, set aside (``*.corrupt``) and counts as a miss.
        """
        path = self._path(kind, key)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None, ()
        except OSError as error:
            return None, (_unusable(path, error),)
        try:
            _, value = _decode(content, kind, key)
        except _CorruptError as error:
            return None, (self._set_aside(path, str(error), content),)
        return value, ()

    def put(self, kind: str, key: str, value: Any, *, about: str = "") -> tuple[Diagnostic, ...]:
        """Keep ``value`` (plain JSON data); return findings if that is not possible."""
        path = self._path(kind, key)
        content = _encode(kind, key, value, about)
        part = path.with_name(f".{key}.{os.getpid()}{_PART}")
        try:
            private_folder(self.folder)
            path.parent.mkdir(parents=True, exist_ok=True)
            with self._locked():
                try:
                    with part.open("wb") as stream:
                        stream.write(content)
                        stream.flush()
                        os.fsync(stream.fileno())
                    part.replace(path)
                finally:
                    part.unlink(missing_ok=True)
        except (OSError, TimeoutError) as error:
            return (_unusable(path, error),)
        return ()

    def entries(self) -> tuple[CacheEntry, ...]:
        """Return every readable entry, newest first. Corrupt ones are left to :meth:`verify`."""
        from fsdptool.records.command_documents import CacheEntry

        entries = []
        for path in self._files(_SUFFIX):
            try:
                with path.open("rb") as stream:
                    header = _header(stream.readline())
                entries.append(
                    CacheEntry(
                        kind=str(header["kind"]),
                        key=str(header["key"]),
                        about=str(header["about"]),
                        created=float(header["created"]),
                        bytes=path.stat().st_size,
                        path=str(path),
                    )
                )
            except (OSError, _CorruptError, KeyError, TypeError, ValueError):
                continue
        return tuple(sorted(entries, key=lambda entry: (-entry.created, entry.key)))

    def verify(self) -> CacheReport:
        """Check every entry against its checksum; changes nothing."""
        from fsdptool.records.command_documents import CacheReport, PathProblem

        good, bad = 0, list[PathProblem]()
        for path in self._files(_SUFFIX):
            try:
                _decode(path.read_bytes(), path.parent.name, path.name.removesuffix(_SUFFIX))
                good += 1
            except _CorruptError as error:
                bad.append(PathProblem(str(path), str(error)))
            except OSError as error:
                bad.append(PathProblem(str(path), _words(error)))
        bad += [PathProblem(str(path), "set aside earlier") for path in self._files(_ASIDE)]
        return CacheReport(str(self.folder), good=good, bad=tuple(bad))

    def prune(self, *, older_than_days: float | None = None, max_bytes: int | None = None) -> CacheReport:
        """Remove leftovers of dead writers, corrupt entries, old entries, and the oldest beyond a size."""
        doomed = [*self._files(_ASIDE), *self._files(_PART)]
        entries = self.entries()
        limit = time.time() - older_than_days * 86400 if older_than_days is not None else None
        kept = 0
        for entry in entries:
            kept += entry.bytes
            too_old = limit is not None and entry.created < limit
            if too_old or (max_bytes is not None and kept > max_bytes):
                doomed.append(Path(entry.path))
                kept -= entry.bytes
        return self._remove(doomed)

    def clear(self) -> CacheReport:
        """Remove everything the store wrote, and report what could not be removed."""
        return self._remove(path for path in self._files("") if path.name != ".lock")

    def _remove(self, paths: Iterator[Path] | list[Path]) -> CacheReport:
        from fsdptool.records.command_documents import CacheReport, PathProblem

        removed, freed, failed = 0, 0, dict[Path, str]()
        paths = list(paths)
        try:
            with self._locked() if paths else nullcontext():
                for path in paths:
                    try:
                        size = path.stat().st_size
                        path.unlink()
                    except FileNotFoundError:
                        continue
                    except OSError as error:
                        failed[path] = _words(error)
                    else:
                        removed, freed = removed + 1, freed + size
        except (OSError, TimeoutError) as error:
            failed |= {path: _words(error) for path in paths if path not in failed and path.exists()}
        problems = tuple(PathProblem(str(path), reason) for path, reason in failed.items())
        return CacheReport(str(self.folder), removed=removed, bytes=freed, failed=problems)

    def _files(self, suffix: str) -> list[Path]:
        if not self._root.is_dir():
            return []
        return sorted(path for path in self._root.rglob("*") if path.name.endswith(suffix) and path.is_file())

    def _path(self, kind: str, key: str) -> Path:
        return self._root / kind / f"{key}{_SUFFIX}"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        from filelock import FileLock, Timeout

        private_folder(self.folder)
        self._root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self._root / ".lock", timeout=_LOCK_SECONDS)
        try:
            lock.acquire()
        except Timeout as error:
            raise TimeoutError(
                f"another process has locked {self._root / '.lock'} for more than {_LOCK_SECONDS:g} s"
            ) from error
        try:
            yield
        finally:
            lock.release()

    def _set_aside(self, path: Path, why: str, seen: bytes) -> Diagnostic:
        try:
            with self._locked():
                # Another process may have rebuilt it since it was read: only move what was seen bad.
                if path.read_bytes() == seen:
                    path.replace(path.with_name(path.name + _ASIDE))
            outcome = "it was set aside, and the answer is computed again"
        except (OSError, TimeoutError) as error:
            outcome = f"it is ignored (it cannot be set aside: {_words(error)})"
        return Diagnostic(
            code=CORRUPT,
            severity="warning",
            message=f"cache entry {path} is corrupt ({why}); {outcome}",
            help="`fsdptool cache prune` removes entries that were set aside",
        )


def _unusable(path: Path, error: BaseException) -> Diagnostic:
    return Diagnostic(
        code=UNUSABLE,
        severity="warning",
        message=f"the answer cannot be cached: {path}: {_words(error)}",
        help="free space, set FSDPTOOL_CACHE to a writable folder, or use --no-cache",
    )


def _words(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error)


def _encode(kind: str, key: str, value: Any, about: str) -> bytes:
    payload = json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    packed = len(payload) >= _COMPRESS_FROM
    if packed:
        payload = zlib.compress(payload, 1)
    header = {
        "kind": kind,
        "key": key,
        "about": about,
        "created": time.time(),
        "packed": packed,
        "sha256": hashlib.sha256(payload).hexdigest(),
    }
    return json.dumps(header).encode() + b"\n" + payload


def _header(line: bytes) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except ValueError as error:
        raise _CorruptError("unreadable header") from error
    if not isinstance(header, dict):
        raise _CorruptError("unreadable header")
    return header


def _decode(content: bytes, kind: str, key: str) -> tuple[dict[str, Any], Any]:
    line, _, payload = content.partition(b"\n")
    header = _header(line)
    if hashlib.sha256(payload).hexdigest() != header.get("sha256"):
        raise _CorruptError("the checksum does not match")
    if (header.get("kind"), header.get("key")) != (kind, key):
        raise _CorruptError("it belongs to another key")
    try:
        return header, json.loads(zlib.decompress(payload) if header.get("packed") else payload)
    except (ValueError, zlib.error) as error:
        raise _CorruptError("unreadable payload") from error


_PACKAGE = Path(__file__).parent
_NAME = rf"({_PACKAGE.name}[\w.]*)"
_IMPORT = re.compile(
    rf"^[ \t]*(?:from[ \t]+{_NAME}[ \t]+import[ \t]+(\([^)]*\)|[^\n#]+)|import[ \t]+{_NAME})", re.MULTILINE
)
"""Every import statement of this package's own modules, inside functions included. A line of a docstring
that looks like one only adds a file to the digest."""

_TYPES_ONLY = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t]+[^\n]*\n|\n)+", re.MULTILINE)
"""Imports that never run."""


@cache
def source_digest(module: str) -> str:
    """Return the SHA-256 of the source of ``module`` and of every module of this package it reaches.

    Args:
        module: Dotted name, ``fsdptool.inspection.api``.
    """
    return digest_of(reached_files(module))


def digest_of(files: Collection[Path]) -> str:
    """Return the SHA-256 of files of this package and of their names in it."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.relative_to(_PACKAGE).as_posix().encode())
        digest.update(_content(path))
    return digest.hexdigest()


@cache
def _content(path: Path) -> bytes:
    """Return a file of this package; several digests of a process cover it."""
    return path.read_bytes()


@cache
def reached_files(module: str) -> frozenset[Path]:
    """Return the files of ``module`` and of every module of this package that it imports, at any depth."""
    return _reached([module])


def files_imported_by(path: Path) -> frozenset[Path]:
    """Return the files of this package that a file of another one imports, at any depth."""
    return _reached(_imported(path))


def _reached(waiting: list[str]) -> frozenset[Path]:
    reached = set[Path]()
    while waiting:
        for path in _files_of(waiting.pop()):
            if path not in reached:
                reached.add(path)
                waiting += _imported(path)
    return frozenset(reached)


@cache
def _files_of(module: str) -> list[Path]:
    """Return the file of a module and the ``__init__`` of every package above it; none for a mere name."""
    parts = module.split(".")[1:]
    path = _PACKAGE.joinpath(*parts)
    # As Python does: a folder without an __init__ gives way to a module of the same name.
    files = (path / "__init__.py", path.with_suffix(".py"))
    file = next((item for item in files if item.is_file()), None)
    if file is None:
        return []
    above = [_PACKAGE.joinpath(*parts[:depth]) / "__init__.py" for depth in range(len(parts))]
    return [file, *(init for init in above if init.is_file())]


@cache
def _imported(path: Path) -> list[str]:
    """Return the dotted names a file imports; ``from package import name`` may name a module."""
    names = []
    code = _TYPES_ONLY.sub("", _content(path).decode())
    for package, listed, plain in _IMPORT.findall(code):
        names.append(package or plain)
        if package:
            items = (item.split(" as ")[0].strip() for item in listed.strip("()").split(","))
            names += [f"{package}.{item}" for item in items if item]
    return names
