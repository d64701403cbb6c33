"""Files as text with places: read once, bounded, never through newline translation, and replaced whole."""

from __future__ import annotations

import contextlib
import csv
import errno
import gzip
import hashlib
import io
import os
import re
import shutil
import tempfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from stat import S_ISREG
from typing import Any, BinaryIO, cast

from fsdptool.errors import StorageError

SIZE_LIMIT = 1 << 20
"""Larger files are refused unparsed: no configuration is this large, a bomb may be."""


LINE_LIMIT = 64 << 20
"""Characters of one row of a data set: a long document, not a file of zeros."""

CSV_LIMIT = 4 << 20
"""Characters of one row of a CSV file; Python's own reader limits a field to 128 Ki."""

_DESCRIPTORS = Path("/dev/fd")
"""Where a shell puts what it substitutes for ``<(command)``."""


class UnreadableError(Exception):
    """A file that cannot become text; ``code`` is the rule it breaks."""

    def __init__(self, code: str, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.index = index


@dataclass(frozen=True)
class SourceText:
    """Decoded text of one file, exactly as stored (line endings included, byte-order mark apart).

    Attributes:
        text: The characters after the byte-order mark, if there is one.
        path: As the user named it, or None for text from elsewhere.
        bom: Whether the file began with a UTF-8 byte-order mark.
        breaks: Characters that end a line besides those that end one everywhere.
    """

    text: str
    path: str | None = None
    bom: bool = False
    breaks: str = ""

    @cached_property
    def _starts(self) -> list[int]:
        if self.breaks:
            ends = re.finditer(rf"\r\n|[\r\n{self.breaks}]", self.text)
            return [0, *(match.end() for match in ends)]
        starts = [0]
        text = self.text
        index = 0
        while True:
            newline = text.find("\n", index)
            carriage = text.find("\r", index, newline if newline >= 0 else len(text))
            if carriage >= 0:
                index = carriage + (2 if text.startswith("\r\n", carriage) else 1)
            elif newline >= 0:
                index = newline + 1
            else:
                return starts
            starts.append(index)

    def place(self, index: int) -> tuple[int, int]:
        """Return the 1-based line and column of the character at ``index``."""
        index = max(0, min(index, len(self.text)))
        line = bisect_right(self._starts, index)
        return line, index - self._starts[line - 1] + 1

    def line(self, number: int) -> str:
        """Return line ``number`` (1-based) without its ending; empty beyond the end."""
        if not 1 <= number <= len(self._starts):
            return ""
        start = self._starts[number - 1]
        end = self._starts[number] if number < len(self._starts) else len(self.text)
        return self.text[start:end].rstrip("\r\n" + self.breaks)

    def line_start(self, number: int) -> int:
        """Return the index of the first character of line ``number`` (1-based)."""
        return self._starts[number - 1] if number <= len(self._starts) else len(self.text)

    @property
    def line_count(self) -> int:
        """Number of lines; a text without any newline has one."""
        return len(self._starts)

    @property
    def newline(self) -> str:
        """Return the line ending the file uses first, ``\\n`` when it has none."""
        at = self.text.find("\n")
        return "\r\n" if at > 0 and self.text[at - 1] == "\r" else "\n"

    @property
    def digest(self) -> str:
        """SHA-256 of the file's bytes, in hexadecimal."""
        return hashlib.sha256(self.encode()).hexdigest()

    def encode(self, text: str | None = None) -> bytes:
        """Return the bytes of ``text`` (default: this text) in this file's encoding."""
        data = (self.text if text is None else text).encode("utf-8")
        return _MARK + data if self.bom else data

    def with_text(self, text: str) -> SourceText:
        """Return the same file with other characters."""
        return replace(self, text=text)


_MARK = b"\xef\xbb\xbf"


def decode(data: bytes, path: str | None = None, *, limit: int = SIZE_LIMIT) -> SourceText:
    """Decode a file's bytes.

    Raises:
        UnreadableError: Too large, or not UTF-8.
    """
    if len(data) > limit:
        raise UnreadableError("FSD102", f"the file has {len(data):,} bytes; more than {limit:,} are not read")
    bom = data.startswith(_MARK)
    if bom:
        data = data[3:]
    try:
        return SourceText(data.decode("utf-8"), path, bom)
    except UnicodeDecodeError as error:
        raise UnreadableError(
            "FSD103",
            f"the file is not UTF-8 (byte {data[error.start]:#04x} at offset {error.start + 3 * bom})",
        ) from error


def read_source(path: str | Path, *, limit: int = SIZE_LIMIT) -> SourceText:
    """Read a file of at most ``limit`` bytes.

    Raises:
        UnreadableError: It cannot be opened, is not a regular file, is too large, or is not UTF-8.
    """
    return decode(read_bytes(path, limit=limit), str(path), limit=limit)


def read_lines(path: str | Path, *, limit: int = LINE_LIMIT, newline: str | None = None) -> Iterator[str]:
    """Yield the lines of a file that may be larger than memory, with their endings.

    Args:
        path: The file.
        limit: The most characters of a line.
        newline: As for ``open``; by default every line ending becomes ``\\n``.

    Raises:
        UnreadableError: It cannot be opened, is not a regular file, is not UTF-8, or has a line of more
            than ``limit`` characters.
    """
    number = 0
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8", newline=newline) as stream:
            while line := stream.readline(limit + 1):
                number += 1
                if len(line) > limit:
                    raise UnreadableError("FSD102", f"line {number} has more than {limit:,} characters")
                yield line
    except UnicodeDecodeError as error:
        raise UnreadableError(
            "FSD103", f"the file is not UTF-8 (byte {error.object[error.start]:#04x} after line {number})"
        ) from error
    except OSError as error:
        raise UnreadableError("FSD101", f"the file cannot be read: {error.strerror or error}") from error


def read_blocks(path: str | Path, *, size: int = 1 << 20) -> Iterator[str]:
    """Yield the text of a file that may be larger than memory in blocks of ``size`` characters.

    Raises:
        UnreadableError: It cannot be opened, is not a regular file, is not UTF-8, or has a block that holds
            nothing but zeros: a hole, which has any length and no text.
    """
    try:
        with io.TextIOWrapper(open_regular(path), encoding="utf-8") as stream:
            while block := stream.read(size):
                if len(block) == size and not block.strip("\0"):
                    raise UnreadableError("FSD103", "the file is not text: it has a block of zeros")
                yield block
    except UnicodeDecodeError as error:
        raise UnreadableError("FSD103", str(error)) from error
    except OSError as error:
        raise UnreadableError("FSD101", f"the file cannot be read: {error.strerror or error}") from error


def read_csv(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a CSV or TSV file by the names in its first one, each with its last line's number.

    Raises:
        UnreadableError: As :func:`read_lines`, or a row has more than :data:`CSV_LIMIT` characters.
        csv.Error: It is not CSV, or a field is longer than Python's limit.
    """
    held = 0

    def lines() -> Iterator[str]:
        nonlocal held
        for line in read_lines(path, limit=CSV_LIMIT, newline=""):
            held += len(line.strip("\r\n"))
            # A field in quotes may go over any number of lines, and a row may have any number of fields.
            if held > CSV_LIMIT:
                raise UnreadableError("FSD102", f"a row has more than {CSV_LIMIT:,} characters")
            yield line

    reader = csv.DictReader(lines(), delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
    for record in reader:
        held = 0
        yield reader.line_num, record


_confined: ContextVar[Callable[[Path], bool] | None] = ContextVar("_confined", default=None)


@contextlib.contextmanager
def confined(allowed: Callable[[Path], bool]) -> Iterator[None]:
    """Within the block, refuse to open files for which ``allowed`` is false; it resolves links itself."""
    token = _confined.set(allowed)
    try:
        yield
    finally:
        _confined.reset(token)


def reachable(path: Path) -> bool:
    """Say whether a file may be opened here: anywhere, unless the caller is :func:`confined`."""
    allowed = _confined.get()
    return allowed is None or allowed(path)


_given: bytes | None = None
"""What standard input holds, where a command line names it as ``-``."""


def take_standard_input(data: bytes | None) -> None:
    """Let the path ``-`` stand for standard input in this process, for as many readings as there are.

    Args:
        data: What it holds; None makes ``-`` a path again.
    """
    global _given
    _given = data


def _is_standard_input(path: str | Path) -> bool:
    return _given is not None and str(path) == "-"


def _open_given(data: bytes) -> io.BufferedReader:
    with tempfile.TemporaryFile() as file:
        file.write(data)
        file.seek(0)
        return os.fdopen(os.dup(file.fileno()), "rb")


def open_regular(path: str | Path) -> io.BufferedReader:
    """Open a regular file for reading: the one way in for every file that somebody else may have written.

    A pipe without a writer is not waited for, and a device without an end is refused; what a shell
    substitutes for ``<(command)`` is taken. It is the opened file that is looked at: a path can come to
    mean another one between a look and the opening.

    Args:
        path: The file; links are followed.

    Raises:
        UnreadableError: It cannot be opened, is not a regular file, or is outside of where the caller is
            :func:`confined`.
    """
    if _given is not None and _is_standard_input(path):
        return _open_given(_given)
    try:
        # Pages read hundreds of files: a path is not parsed twice.
        place = path if isinstance(path, Path) else Path(path)
        if not reachable(place):
            raise _outside()
        substituted = place.parent == _DESCRIPTORS
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
        try:
            if not (substituted or S_ISREG(os.fstat(descriptor).st_mode)):
                raise UnreadableError("FSD101", "the file cannot be read: it is not a regular file")
            if _confined.get() is not None and not reachable(_opened(descriptor, place)):
                raise _outside()
            if substituted:
                os.set_blocking(descriptor, True)
            return os.fdopen(descriptor, "rb")
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise UnreadableError("FSD101", f"the file cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # a NUL in the path
        raise UnreadableError("FSD101", f"the file cannot be read: {error}") from error


def _outside() -> UnreadableError:
    return UnreadableError("FSD101", "the file is outside the folders that may be read")


def _opened(descriptor: int, place: Path) -> Path:
    """Return where an opened file lies, whatever its path means by now (Linux; elsewhere its path)."""
    try:
        return Path(f"/proc/self/fd/{descriptor}").readlink()
    except OSError:
        return place


def read_bytes(path: str | Path, *, limit: int = SIZE_LIMIT) -> bytes:
    """Return what a regular file holds.

    Args:
        path: The file; links are followed.
        limit: The most bytes that are read.

    Raises:
        UnreadableError: As :func:`open_regular`, or it has more than ``limit`` bytes.
    """
    try:
        with open_regular(path) as stream:
            data = stream.read(limit + 1)
            size = max(os.fstat(stream.fileno()).st_size, len(data))
    except OSError as error:
        raise UnreadableError("FSD101", f"the file cannot be read: {error.strerror or error}") from error
    if len(data) > limit:
        raise UnreadableError("FSD102", f"the file has {size:,} bytes; more than {limit:,} are not read")
    return data


def unpacked(stream: io.BufferedReader) -> BinaryIO:
    """Return a stream of what gzip compressed; one that is not compressed as it is."""
    if stream.peek(2)[:2] != b"\x1f\x8b":
        return stream
    return cast("BinaryIO", gzip.GzipFile(fileobj=stream))


def read_beginning(path: str | Path, size: int) -> bytes:
    """Return the first ``size`` bytes of a file, or of what gzip compressed in it; empty if that is damaged.

    Raises:
        UnreadableError: As :func:`open_regular`.
    """
    try:
        with open_regular(path) as stream:
            return unpacked(stream).read(size)
    except (EOFError, zlib.error, gzip.BadGzipFile):
        return b""
    except OSError as error:
        raise UnreadableError("FSD101", f"the file cannot be read: {error.strerror or error}") from error


def read_ends(path: str | Path, *, head: int = 0, tail: int) -> tuple[bytes, bytes, int]:
    """Return the first ``head`` and the last ``tail`` bytes of a file, without overlap, and its size.

    Raises:
        UnreadableError: As :func:`open_regular`.
    """
    try:
        with open_regular(path) as stream:
            size = os.fstat(stream.fileno()).st_size
            first = stream.read(min(head, size))
            stream.seek(max(size - tail, len(first)))
            return first, stream.read(tail), size
    except OSError as error:
        raise UnreadableError("FSD101", f"the file cannot be read: {error.strerror or error}") from error


def open_for_writing(path: Path, *, append: bool = False) -> int:
    """Open or make a file of our own in a folder that somebody else may have prepared; return its descriptor.

    Raises:
        OSError: It cannot be opened, or what has its name is a link, a pipe or a device.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags | (os.O_APPEND if append else 0), 0o600)
    if not S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return descriptor


def exists(path: Path) -> bool:
    """Whether ``path`` exists, readable or not; a name that no file can have does not."""
    try:
        return _is_standard_input(path) or (reachable(path) and path.exists())
    except PermissionError:
        return True
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Whether ``path`` is a regular file; a name that no file can have is none."""
    try:
        return _is_standard_input(path) or path.is_file()
    except (OSError, ValueError):
        return False


def is_folder(path: Path) -> bool:
    """Whether ``path`` is a folder; a name that no folder can have is none."""
    try:
        return path.is_dir()
    except (OSError, ValueError):
        return False


def private_folder(path: Path) -> None:
    """Make a folder that only its owner can open; one that exists stays as it is.

    Raises:
        OSError: It cannot be made, or it would be in a home folder that does not exist: a service's
            ``/nonexistent`` is not ours to make.
    """
    home = Path.home()
    if path.is_relative_to(home) and not home.is_dir():
        raise FileNotFoundError(errno.ENOENT, "the home folder does not exist", str(home))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=0o700, exist_ok=True)


def replace_file(path: Path, data: bytes, *, before: bytes | None = None) -> None:
    """Replace ``path`` by ``data`` in one step; a link's target is replaced, not the link.

    The mode stays, and the owner where that may be set (a container's root must not take the files of
    the user whose folder it works in).

    Args:
        path: The file.
        data: Its new content.
        before: What was read from it; other content by now means that somebody else is writing.

    Raises:
        StorageError: It is read-only, was changed meanwhile, or cannot be written; the content is untouched.
    """
    target = path.resolve()
    aside: str | None = None
    try:
        if target.exists():
            # Root may write whatever the mode says, so the mode itself is checked.
            if not target.stat().st_mode & 0o222:
                raise StorageError(f"{path} is read-only", help="make it writable (chmod u+w)")
            # What another name of the same file (a link) was given already is what is wanted.
            if before is not None and not (holds(target, before) or holds(target, data)):
                raise StorageError(
                    f"{path} was changed by another program in the meantime", help="run the command again"
                )
        handle, aside = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        if target.exists():
            shutil.copymode(target, aside)
            with contextlib.suppress(OSError):
                os.chown(aside, target.stat().st_uid, target.stat().st_gid)
        Path(aside).replace(target)
        aside = None
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}", help="the file was not changed"
        ) from error
    finally:
        if aside is not None:
            with contextlib.suppress(OSError):
                Path(aside).unlink()


def holds(path: Path, data: bytes) -> bool:
    """Say whether a file is a regular one and holds ``data``, no more and no less."""
    try:
        return read_bytes(path, limit=len(data)) == data
    except UnreadableError:
        return False


_NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)
"""How file systems without hard links (FAT, some network folders) refuse one."""


def create_file(path: Path, data: bytes) -> None:
    """Write a file that does not exist yet, whole or not at all.

    Raises:
        StorageError: It exists, also if another program has just created it, or it cannot be written.
    """
    aside = path.with_name(f".{path.name}.{os.urandom(6).hex()}.part")
    try:
        with aside.open("xb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        try:
            # Unlike a rename, a link never replaces a file.
            os.link(aside, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # An empty file takes the name first, which fails if there is one; then it is replaced.
            path.open("xb").close()
            aside.replace(path)
    except FileExistsError:
        raise StorageError(f"{path} exists already", help="choose another name") from None
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}", help="nothing was written"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()
