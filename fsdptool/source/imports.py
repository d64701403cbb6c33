"""References to code on the Python path, ``package.module:Class``: recognised and located, never imported."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from fsdptool.errors import ReferenceError  # noqa: A004 - a reference names a model here
from fsdptool.files.text import UnreadableError, read_bytes
from fsdptool.records.anatomy import ModelSpec, Reference

IMPORT_FLAG = "--allow-import"
"""Another name of ``--trust-remote-code`` (``cli/options.py``): one consent, to code that is not ours."""

_NAMES = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*"
_IMPORT = re.compile(rf"({_NAMES}):{_NAMES}")


def is_import(text: str) -> bool:
    """Say whether a reference names code: its module has a package, or is on the Python path or here."""
    if _IMPORT.fullmatch(text) is None:
        return False
    module = text.partition(":")[0]
    return "." in module or _find(module) is not None


def import_spec(text: str, *, trust_remote_code: bool) -> ModelSpec:
    """Return the model that a reference to code means. It is not imported here.

    Raises:
        ReferenceError: The code may not be imported.
    """
    if not trust_remote_code:
        raise ReferenceError(
            f"{text} names code on the Python path, which is imported only with {IMPORT_FLAG}",
            help=f"read that code, then give {IMPORT_FLAG} (in Python: trust_remote_code=True)",
        )
    here = Path.cwd()
    return ModelSpec(
        reference=Reference("import", text),
        family="python",
        flavour=None,
        library="torch",
        model_class=text,
        config={},
        objective="module",
        folder=str(here) if _lies_in(text, here) else None,
        trust_remote_code=True,
    )


def _lies_in(text: str, folder: Path) -> bool:
    """Say whether the top package of a reference's module is in ``folder``."""
    found = _find(text.partition(":")[0], str(folder))
    places = [*(found.submodule_search_locations or ()), found.origin] if found is not None else []
    return any(place is not None and Path(place).resolve().parent == folder.resolve() for place in places)


_LARGEST_MODULE = 16 << 20
"""Bytes of a module that a model may bring along."""


def own_code_digest(spec: ModelSpec) -> str | None:
    """Return a digest of the source files that a model brings along, if they may run; else None.

    Raises:
        ReferenceError: One of them cannot be read.
    """
    if not spec.trust_remote_code:
        return None
    digest = hashlib.sha256()
    for path in sorted(_sources(spec)):
        digest.update(path.name.encode())
        try:
            digest.update(read_bytes(path, limit=_LARGEST_MODULE))
        except UnreadableError as error:
            raise ReferenceError(
                f"{path}: {error.message}", help="take it out of the model's folder"
            ) from error
    return digest.hexdigest()


def _sources(spec: ModelSpec) -> Iterator[Path]:
    if spec.reference.kind != "import":
        yield from Path(spec.folder).glob("*.py") if spec.folder is not None else ()
        return
    found = _find(spec.model_class.partition(":")[0], spec.folder)
    if found is None:
        return
    if found.submodule_search_locations is None:
        yield from (Path(found.origin),) if found.origin else ()
    for folder in found.submodule_search_locations or ():
        yield from Path(folder).rglob("*.py")


def _find(module: str, folder: str | None = None) -> ModuleSpec | None:
    """Find the top package of a module by its name: on the path, then in a folder. This runs no code."""
    top = module.partition(".")[0]
    try:
        found = find_spec(top)
    except (ImportError, ValueError):  # it is half imported, or has no specification (__main__)
        found = None
    return found or PathFinder.find_spec(top, [folder or str(Path.cwd())])
