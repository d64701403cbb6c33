"""References to models as pages take them: inside the roots, or dropped on a page and kept by digest."""

from __future__ import annotations

import hashlib
import json
import re
from functools import cache
from pathlib import Path

from fsdptool.cache import cache_folder
from fsdptool.errors import ConfigError, StorageError
from fsdptool.files.text import exists, is_file, is_folder, private_folder, replace_file
from fsdptool.files.values import load_json
from fsdptool.web.roots import Roots

PREFIX = "upload:"
"""References to uploads begin with it; the rest is a digest."""
LARGEST_BYTES = 1 << 20
_KEPT = 64
_NAME = re.compile(r"upload:[0-9a-f]{16}")


def save(data: bytes) -> str:
    """Keep a ``config.json`` and return the reference to it.

    Raises:
        ConfigError: It is too large, or not a JSON object.
        StorageError: It cannot be written.
    """
    if len(data) > LARGEST_BYTES:
        raise ConfigError(f"the configuration is larger than {LARGEST_BYTES} bytes")
    try:
        value = load_json(data.decode("utf-8-sig"))
    except (UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            f"the configuration is not JSON: {error}", help="drop the config.json of a model"
        ) from None
    if not isinstance(value, dict):
        raise ConfigError("the configuration is not a JSON object", help="drop the config.json of a model")
    text = json.dumps(value, indent=2, ensure_ascii=False).encode("utf-8", "surrogatepass")
    name = hashlib.sha256(text).hexdigest()[:16]
    folder = uploads_folder() / name
    try:
        private_folder(folder)
        replace_file(folder / "config.json", text)
        _prune(folder)
    except OSError as error:
        raise StorageError(f"the configuration cannot be kept: {error.strerror or error}") from error
    return f"{PREFIX}{name}"


def path_of(reference: str) -> Path | None:
    """Return the file of a reference to an upload; None for any other reference.

    Raises:
        ConfigError: The upload was removed.
    """
    if not _NAME.fullmatch(reference):
        return None
    path = uploads_folder() / reference.removeprefix(PREFIX) / "config.json"
    if not is_file(path):
        raise ConfigError("this configuration is no longer stored", help="drop the file again")
    return path


def uploads_folder() -> Path:
    """Return the folder of the configurations that were dropped."""
    cache = cache_folder()
    return cache.with_name(f"{cache.name}-uploads")


def _prune(keep: Path) -> None:
    """Remove the oldest uploads above the limit."""
    folders = sorted(uploads_folder().iterdir(), key=lambda path: path.stat().st_mtime)
    for folder in folders[:-_KEPT]:
        if folder != keep:
            (folder / "config.json").unlink(missing_ok=True)
            folder.rmdir()


_FILES = ("config.json", "model_index.json", "adapter_config.json")


def allowed(roots: Roots, text: str) -> str:
    """Return a reference that may be resolved: a name, a path below a root, or an upload as a path.

    Raises:
        ConfigError: It is a path outside of every root, or an upload that was removed.
    """
    path = path_of(text.strip())
    return str(path) if path is not None else roots.reference(text)


def stamp(reference: str) -> list[list[int]]:
    """Return what tells whether the files of a local reference were changed; empty for names."""
    path = Path(reference)
    if not exists(path):
        return []
    candidates = [path / name for name in _FILES] if is_folder(path) else [path]
    states = [file.stat() for file in candidates if is_file(file)]
    return [[state.st_mtime_ns, state.st_size] for state in states]


@cache
def known() -> tuple[str, ...]:
    """Return every registered ``family:flavour``, for suggestions."""
    from fsdptool.families.registry import load_registry
    from fsdptool.formatting import by_size

    return tuple(
        f"{family.name}:{name}" for family in load_registry().all() for name in by_size(family.flavours())
    )
