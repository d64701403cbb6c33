"""A digest of the code that an answer depends on: a module and all it imports, lazily or not.

An answer kept on disk is stale as soon as any of that code changes. A list of files kept by hand would
miss the next one, so the imports themselves say what counts.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).parent.parent
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
        digest.update(path.read_bytes())
    return digest.hexdigest()


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


def _files_of(module: str) -> list[Path]:
    """Return the file of a module and the ``__init__`` of every package above it; none for a mere name."""
    parts = module.split(".")[1:]
    path = _PACKAGE.joinpath(*parts)
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not file.is_file():
        return []
    above = [_PACKAGE.joinpath(*parts[:depth]) / "__init__.py" for depth in range(len(parts))]
    return [file, *(init for init in above if init.is_file())]


def _imported(path: Path) -> list[str]:
    """Return the dotted names a file imports; ``from package import name`` may name a module."""
    names = []
    code = _TYPES_ONLY.sub("", path.read_text(encoding="utf-8"))
    for package, listed, plain in _IMPORT.findall(code):
        names.append(package or plain)
        if package:
            items = (item.split(" as ")[0].strip() for item in listed.strip("()").split(","))
            names += [f"{package}.{item}" for item in items if item]
    return names
