"""References to models as pages take them: inside the roots, and with the state of their files."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fsdptool.files.text import exists, is_file, is_folder
from fsdptool.web import uploads
from fsdptool.web.roots import Roots

_FILES = ("config.json", "model_index.json", "adapter_config.json")


def allowed(roots: Roots, text: str) -> str:
    """Return a reference that may be resolved: a name, a path below a root, or an upload as a path.

    Raises:
        ConfigError: It is a path outside of every root, or an upload that was removed.
    """
    path = uploads.path_of(text.strip())
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
