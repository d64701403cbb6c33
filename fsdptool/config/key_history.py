"""Which versions of accelerate, transformers, TRL and axolotl have which keys, with which defaults.

``benchmarks/config/keys_by_version.py`` reads the table from the releases' own sources. Each minor version is
known by its newest release.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from fsdptool.config.programs import is_before
from fsdptool.files.values import read_data

TABLE = Path(__file__).with_name("keys_by_version.json")


@cache
def known_versions(package: str) -> tuple[str, ...]:
    """Return the minor versions of a package that the table knows, the oldest first; empty: none."""
    return tuple(map(_minor, _table().get(package, {}).get("releases", ())))


def is_known(package: str, version: str) -> bool:
    """Whether the table has the minor version that a version belongs to."""
    return _minor(version) in known_versions(package)


def groups(package: str) -> tuple[str, ...]:
    """Return the groups of keys of a package: its classes of settings, or the blocks of its files."""
    return tuple(_table()[package]["keys"])


def has_key(package: str, names: Iterable[str], key: str, version: str) -> bool | None:
    """Return whether a version has a key in one of several groups.

    A version outside the table is taken for the nearest one in it. None: the table does not know the key, or
    none of the groups in that version.
    """
    place = _place(package, version)
    spans = list(_spans(package, names, key))
    there = any(first <= place <= last for name in names for first, last in [_span_of(package, name)])
    return any(first <= place <= last for first, last, _ in spans) if spans and there else None


def versions_with(package: str, names: Iterable[str], key: str) -> tuple[str, str]:
    """Return the oldest and the newest known version that has a key in one of several groups.

    Raises:
        ValueError: No known version has the key.
    """
    spans = list(_spans(package, names, key))
    known = known_versions(package)
    return known[min(first for first, _, _ in spans)], known[max(last for _, last, _ in spans)]


def default_of(package: str, group: str, key: str, version: str) -> Any:
    """Return a key's default in a version: a plain value, or a mapping with the ``code`` that computes it.

    Raises:
        LookupError: The version does not have the key.
    """
    place = _place(package, version)
    for first, last, value in _spans(package, (group,), key):
        if first <= place <= last:
            return value
    raise LookupError(f"{package} {version} has no {group}.{key}")


@cache
def _table() -> dict[str, Any]:
    table: dict[str, Any] = read_data(TABLE)
    return table


def _minor(version: str) -> str:
    return ".".join([*version.split("."), "0"][:2])


def _place(package: str, version: str) -> int:
    """Return the place of the newest known version that is not newer, or the first."""
    older = [
        place for place, known in enumerate(known_versions(package)) if not is_before(version, *_parts(known))
    ]
    return older[-1] if older else 0


def _parts(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def _span_of(package: str, group: str) -> tuple[int, int]:
    """Return the places of the first and the last version that have a group."""
    known = known_versions(package)
    first, last = _table()[package]["groups"].get(group, (None, None))
    return (known.index(first) if first else 0, known.index(last) if last else len(known) - 1)


def _spans(package: str, names: Iterable[str], key: str) -> Iterator[tuple[int, int, Any]]:
    known = known_versions(package)
    for name in names:
        start, end = _span_of(package, name)
        for first, last, value in _table()[package]["keys"].get(name, {}).get(key, ()):
            yield (known.index(first) if first else start, known.index(last) if last else end, value)
