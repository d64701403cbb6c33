"""The advisories, and whether versions of packages are affected.

Each is a file in ``entries/``; a wheel holds all of them in one (``hatch_build.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from fsdptool.files.values import read_data
from fsdptool.records.advisory import Advisory
from fsdptool.records.codec import from_json

ENTRIES = Path(__file__).with_name("entries")

Versions = Mapping[str, tuple[Version, ...]]
"""Versions of packages by their normalised names; a lock file may hold several for several platforms."""


@cache
def advisories() -> tuple[Advisory, ...]:
    """Return every advisory, in the order of the names."""
    files = sorted(ENTRIES.glob("*.json"))
    found = [read_data(path) for path in files] or read_data(ENTRIES.with_suffix(".json"))
    return tuple(from_json(Advisory, entry, where=f"{entry['id']}.json") for entry in found)


@cache
def named_packages() -> frozenset[str]:
    """Return the packages whose versions decide about some advisory."""
    packages = {advisory.package for advisory in advisories()}
    return frozenset(packages.union(*(advisory.database_specific.also or () for advisory in advisories())))


def affected_version(advisory: Advisory, versions: Versions) -> Version | None:
    """Return the version of the advisory's package that is affected, or None.

    The further packages of the advisory must have affected versions, too. A local label (``2.9.1+cu128``)
    does not count.
    """
    for package, specifiers in (advisory.database_specific.also or {}).items():
        known = versions.get(package, ())
        if not any(_matches(version, specifiers) for version in known):
            return None
    known = versions.get(advisory.package, ())
    return next((version for version in known if _is_within(version, advisory)), None)


def _matches(version: Version, specifiers: Iterable[str]) -> bool:
    return any(SpecifierSet(item).contains(version.public, prereleases=True) for item in specifiers)


def _is_within(version: Version, advisory: Advisory) -> bool:
    return any(begin <= version and (end is None or version < end) for begin, end in ranges(advisory))


def fixed_in(advisory: Advisory, version: Version) -> str | None:
    """Return the first version after an affected one that is not affected, or None where none is known."""
    ends = (end for begin, end in ranges(advisory) if begin <= version and (end is None or version < end))
    return next((str(end) for end in ends if end is not None), None)


@cache
def _bounds(introduced: str, fixed: str | None) -> tuple[Version, Version | None]:
    # The first pre-release of a version comes before it: 0 stands for every release.
    return Version(introduced), Version(fixed) if fixed is not None else None


def ranges(advisory: Advisory) -> list[tuple[Version, Version | None]]:
    """Return where the affected ranges begin and end; an end that is None is not known.

    Raises:
        ValueError: The events of a range do not alternate, or are not versions in ascending order.
    """
    found = []
    for entry in advisory.affected:
        for item in entry.ranges:
            events = list(item.events)
            while events:
                begin = events.pop(0)
                end = events.pop(0) if events else None
                ends = end.fixed if end is not None else None
                if begin.introduced is None or begin.fixed is not None or (end is not None and ends is None):
                    raise ValueError(f"{advisory.id}: introduced and fixed must alternate")
                found.append(_bounds(begin.introduced, ends))
    if any(end is not None and end <= begin for begin, end in found):
        raise ValueError(f"{advisory.id}: a range ends before it begins")
    return found
