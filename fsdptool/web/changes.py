"""Changes to files that a page has shown: what is written is exactly what was on the screen."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import dataclass
from pathlib import Path

from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.files.text import UnreadableError, create_file, exists, is_folder, read_bytes, replace_file
from fsdptool.web.roots import Roots

SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".env", ".sh", ".txt")
"""Endings of the files that pages write; other files (scripts of a shell's start, keys) stay untouched."""

_LOCK = threading.Lock()


class ConflictError(FsdptoolError):
    """A file is no longer what a page has shown."""


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file as it is, and as it would be.

    Attributes:
        path: The file, resolved.
        before: Its bytes; None if it does not exist.
        after: The bytes that would be written.
    """

    path: Path
    before: bytes | None
    after: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of the path and of both contents; a form sends it back with the order to write."""
        value = hashlib.sha256(f"{self.path}\0{self.before is None}\0".encode("utf-8", "surrogatepass"))
        for part in (self.before or b"", self.after):
            value.update(len(part).to_bytes(8, "big") + part)
        return value.hexdigest()

    def write(self, shown: str) -> None:
        """Write the file whole or not at all.

        Args:
            shown: The digest of the change that was on the screen.

        Raises:
            ConflictError: The file, or what would be written, is not what was shown.
            StorageError: The file cannot be written.
        """
        with _LOCK:
            if self.digest != shown:
                raise ConflictError(
                    f"{self.path.name} has changed since this page was loaded, and was not overwritten",
                    help="look at the difference below, and write again",
                )
            if self.before is None:
                create_file(self.path, self.after)
            else:
                replace_file(self.path, self.after, before=self.before)


def target_of(roots: Roots, name: str) -> Path:
    """Return the file that a page may write.

    Args:
        roots: The folders that pages may write.
        name: From a page.

    Raises:
        ConfigError: It is outside of the folders, is hidden or has another ending, or is a folder.
    """
    path = roots.resolve(name, exists=False)
    inside = roots.name_of(path).split("/")[1:]
    if any(part.startswith(".") for part in inside) or path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"pages do not write files like {path.name}",
            help=f"choose a name that does not begin with a dot and ends in {', '.join(SUFFIXES)}",
        )
    if is_folder(path):
        raise ConfigError(f"{name} is a folder", help="name a file in it")
    return path


def content_of(path: Path) -> bytes | None:
    """Return the bytes of a file, or None if it does not exist.

    Raises:
        ConfigError: It cannot be read, or is too large for a configuration.
    """
    if not exists(path):
        return None
    try:
        return read_bytes(path)
    except UnreadableError as error:
        raise ConfigError(f"{path.name}: {error.message}", help="choose another file") from error
