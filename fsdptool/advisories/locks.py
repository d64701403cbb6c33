"""Versions of installed libraries: from lock files, from ``--target``, or from this environment."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from fsdptool.advisories.catalogue import Versions, named_packages
from fsdptool.errors import ConfigError
from fsdptool.files.text import UnreadableError, read_source
from fsdptool.files.values import read_yaml

_LIMIT = 16 << 20
"""Bytes of the largest lock file that is read: one with hashes for every platform has some megabytes."""

_DEPTH = 8
"""Requirements files that name each other are followed this far."""

_COMMENT = re.compile(r"(?:^|\s)#.*$")
_HASHES = re.compile(r"\s+--(?:hash|config-settings|global-option)[= ]\S+")
_CONDA = re.compile(r"^(?:[\w.-]+::)?([\w.-]+)\s*(?:(==?)\s*([\w.!+*]+)(?:=[\w.*]+)?)?(.*)$")
_FROM_CONDA = {"pytorch": "torch", "pytorch-gpu": "torch", "pytorch-cpu": "torch"}
"""Packages that conda calls otherwise than PyPI."""


@dataclass(slots=True)
class _Found:
    versions: dict[str, set[Version]] = field(default_factory=dict)
    loose: set[str] = field(default_factory=set)

    def take(self, name: str, version: str | None) -> None:
        package = canonicalize_name(name)
        if package not in named_packages():
            return
        try:
            exact = Version(version) if version is not None else None
        except InvalidVersion:
            exact = None
        if exact is None:
            self.loose.add(package)
        else:
            self.versions.setdefault(package, set()).add(exact)


def read_lock(path: Path) -> tuple[Versions, tuple[str, ...]]:
    """Return the exact versions of a lock file, and the packages that it names without one.

    Packages that no advisory names are left out. uv.lock, poetry.lock, pylock.toml, requirements files and
    environment files of conda are read; the last two pin what ``==`` (or conda's ``=``) pins.

    Raises:
        ConfigError: The file cannot be read, or is not a lock file; the message is one line.
    """
    found = _Found()
    try:
        if path.suffix == ".toml" or path.suffix == ".lock":
            _take_table(_toml(path), path, found)
        elif path.suffix in (".yml", ".yaml"):
            _take_environment(read_yaml(path), path, found)
        else:
            _take_requirements(path, found, {path.absolute()}, _DEPTH)
    except UnreadableError as error:
        raise ConfigError(f"{path}: {error.message}") from error
    loose = found.loose - found.versions.keys()
    return {name: tuple(sorted(items)) for name, items in found.versions.items()}, tuple(sorted(loose))


def _toml(path: Path) -> Any:
    try:
        return tomllib.loads(read_source(path, limit=_LIMIT).text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _take_table(data: Any, path: Path, found: _Found) -> None:
    """Take the packages of a lock file in TOML: ``package`` of uv and Poetry, ``packages`` of PEP 751."""
    entries = data.get("package", data.get("packages"))
    if not isinstance(entries, list):
        raise ConfigError(
            f"{path} holds no list of packages",
            help="give uv.lock, poetry.lock, pylock.toml, requirements.txt or environment.yml",
        )
    for entry in entries:
        if isinstance(entry, dict) and isinstance(entry.get("name"), str):
            version = entry.get("version")
            found.take(entry["name"], version if isinstance(version, str) else None)


def _take_requirements(path: Path, found: _Found, seen: set[Path], depth: int) -> None:
    text = read_source(path, limit=_LIMIT).text
    for line in _requirement_lines(text):
        named = re.match(r"(?:-r|--requirement|-c|--constraint)[= ]\s*(\S+)", line)
        if named is not None:
            other = path.parent / named.group(1)
            if depth and "://" not in named.group(1) and other.absolute() not in seen:
                seen.add(other.absolute())
                _take_requirements(other, found, seen, depth - 1)
        elif not line.startswith("-"):
            _take_requirement(line, found)


def _requirement_lines(text: str) -> Iterator[str]:
    for line in text.replace("\\\r\n", " ").replace("\\\n", " ").splitlines():
        plain = _HASHES.sub("", _COMMENT.sub("", line)).strip()
        if plain:
            yield plain


def _take_requirement(line: str, found: _Found) -> None:
    """Take a requirement; what is none (a path, an address) is of no package that is known by name."""
    try:
        requirement = Requirement(line)
    except InvalidRequirement:
        return
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return
    exact = [item.version for item in requirement.specifier if item.operator in ("==", "===")]
    found.take(requirement.name, exact[0] if exact else None)


def _take_environment(data: Any, path: Path, found: _Found) -> None:
    entries = data.get("dependencies") if isinstance(data, dict) else None
    if not isinstance(entries, list):
        raise ConfigError(
            f"{path} holds no list of dependencies",
            help="give the environment file of conda as --lock, and the configuration as FILE",
        )
    for entry in entries:
        if isinstance(entry, dict):
            for line in entry.get("pip") or ():
                _take_requirement(str(line), found)
        elif (match := _CONDA.match(str(entry))) is not None:
            name, operator, version, rest = match.groups()
            # conda's single sign takes any version that begins so: 2.6 is 2.6.0 or later.
            whole = operator == "==" or (operator == "=" and version.count(".") > 1)
            exact = version if whole and "*" not in version and not rest.strip() else None
            found.take(_FROM_CONDA.get(name, name), exact)


def read_targets(targets: Iterable[str]) -> Versions:
    """Return the versions that options name, as ``accelerate==1.13.0``; several may stand between commas.

    Raises:
        ConfigError: One does not name a package with an exact version.
    """
    versions: dict[str, tuple[Version, ...]] = {}
    for target in (part.strip() for item in targets for part in item.split(",")):
        name, equals, version = target.partition("==")
        try:
            versions[canonicalize_name(name.strip())] = (Version(version),)
        except InvalidVersion:
            equals = ""
        if not equals or not name.strip():
            raise ConfigError(f"{target!r} names no version", help="write --target accelerate==1.13.0")
    return versions


def installed() -> Versions:
    """Return the installed versions of the packages that advisories name."""
    versions = {}
    for package in named_packages():
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return exact_versions(versions)


def exact_versions(written: Mapping[str, Any]) -> Versions:
    """Return the versions of packages that are written as PEP 440 has them; others are left out."""
    versions = {}
    for package, version in written.items():
        with suppress(InvalidVersion, TypeError):
            versions[package] = (Version(version),)
    return versions
