"""A project's own settings for ``validate``: which rules count in which files (``[tool.fsdptool]``)."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from fsdptool import spelling
from fsdptool.config.result import Reading
from fsdptool.config.rules import RULES
from fsdptool.errors import ConfigError
from fsdptool.files.text import UnreadableError, read_source
from fsdptool.records.diagnostic import Diagnostic

ALL = "ALL"
"""What selects every rule."""

_FILES = ("fsdptool.toml", "pyproject.toml")


@dataclass(frozen=True, slots=True)
class LintSettings:
    """Which findings count, and where.

    Attributes:
        select: Codes or their beginnings (``FSD3``) that are reported; ``ALL`` for every rule.
        ignore: Codes or their beginnings that are not. Of ``select`` and ``ignore`` the longer match
            decides, and ``ignore`` between equals.
        exclude: Patterns of files and folders that are not read, relative to ``root``. A pattern without
            a slash is compared with every part of the path.
        per_file_ignores: Pattern of files to codes that are not reported in them.
        baseline: File of accepted old findings, relative to ``root``, or None.
        strict: Whether warnings fail the command.
        skip_unknown: Whether files of unknown kinds are skipped although they were named.
        root: Folder that patterns are relative to: the one of ``file``.
        file: Where the settings come from, or None.
    """

    select: tuple[str, ...] = (ALL,)
    ignore: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    per_file_ignores: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    baseline: str | None = None
    strict: bool = False
    skip_unknown: bool = False
    root: Path = Path()
    file: Path | None = None

    def excludes(self, path: Path) -> bool:
        """Whether a file, or a folder above it within ``root``, is excluded."""
        if not self.exclude:
            return False
        inside = self.relative(path)
        above = [inside, *(parent.as_posix() for parent in PurePosixPath(inside).parents)]
        return any(_matches(pattern, place) for pattern in self.exclude for place in above if place != ".")

    def reports(self, item: Diagnostic, path: Path | None) -> bool:
        """Whether a finding counts. What keeps a file from being judged does unless it is ignored."""
        ignored = list(self.ignore)
        if path is not None and self.per_file_ignores:
            inside = self.relative(path)
            for pattern, codes in self.per_file_ignores.items():
                if _matches(pattern, inside):
                    ignored.extend(codes)
        unwanted = max((_length(prefix, item.code) for prefix in ignored), default=-1)
        wanted = max((_length(prefix, item.code) for prefix in self.select), default=-1)
        if item.code in _UNJUDGED and item.severity == "error":
            wanted = max(wanted, 0)
        return wanted > unwanted

    def relative(self, path: Path) -> str:
        """Return a path as the patterns see it: from ``root`` where it lies inside, with slashes."""
        whole = path.absolute()
        try:
            return whole.relative_to(self.root.absolute()).as_posix()
        except ValueError:
            return whole.as_posix()

    def but(
        self,
        *,
        select: Iterable[str] | None = None,
        ignore: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
    ) -> LintSettings:
        """Return the settings with what the command line says.

        What it selects takes the place of the project's ``select`` and ``ignore``; what it ignores and
        excludes is added.

        Raises:
            ConfigError: A code is not the beginning of any rule's.
        """
        return replace(
            self,
            select=check_codes(select, "--select") if select else self.select,
            ignore=(*(() if select else self.ignore), *check_codes(ignore or (), "--ignore")),
            exclude=(*self.exclude, *(exclude or ())),
        )


_UNJUDGED = frozenset(f"FSD{number}" for number in (*range(101, 108), 109, 110, 111, 114))


def _length(prefix: str, code: str) -> int:
    if prefix == ALL:
        return 0
    return len(prefix) if code.startswith(prefix) else -1


def _matches(pattern: str, path: str) -> bool:
    """Whether a pattern is about a path: from the root with a slash in it, else about any part's name."""
    wanted = pattern.removeprefix("./").rstrip("/")
    if "/" in wanted:
        return fnmatchcase(path, wanted) or fnmatchcase(path, f"{wanted}/*")
    return any(fnmatchcase(part, wanted) for part in PurePosixPath(path).parts)


def check_codes(codes: Iterable[str], where: str) -> tuple[str, ...]:
    """Return codes in capitals; commas separate several in one text.

    Raises:
        ConfigError: One is not the beginning of any rule's code.
    """
    chosen = []
    for text in codes:
        for code in filter(None, (piece.strip().upper() for piece in text.split(","))):
            if code != ALL and not any(known.startswith(code) for known in RULES):
                near = spelling.nearest(code, RULES, cutoff=0.6)
                advice = f"did you mean {near}?" if near else "`fsdptool rule` lists them"
                raise ConfigError(f"{where}: {code} is not a rule, nor the beginning of one", help=advice)
            chosen.append(code)
    return tuple(chosen)


def find_settings(folder: Path, known: dict[Path, LintSettings]) -> LintSettings:
    """Return the settings of the nearest ``fsdptool.toml`` or ``pyproject.toml`` at or above a folder.

    A ``pyproject.toml`` without ``[tool.fsdptool]`` does not count.

    Args:
        folder: Where to begin.
        known: What was found so far, by folder; it is added to, so that no file is read twice.

    Raises:
        ConfigError: The file does not parse, has an unknown key or a value of a wrong type.
    """
    place = folder.absolute()
    if place not in known:
        files = (place / name for name in _FILES)
        found = (read_lint_settings(file) for file in files if file.is_file())
        own = next((settings for settings in found if settings is not None), None)
        if own is None:
            own = LintSettings() if place.parent == place else find_settings(place.parent, known)
        known[place] = own
    return known[place]


def read_lint_settings(file: Path) -> LintSettings | None:
    """Return the settings in a file, or None for a ``pyproject.toml`` without ``[tool.fsdptool]``.

    Raises:
        ConfigError: As :func:`find_settings`.
    """
    project = file.name == "pyproject.toml"
    try:
        text = read_source(file).text
        table: Any = tomllib.loads(text)
    except UnreadableError as error:
        raise ConfigError(f"{file}: {error.message}") from error
    except tomllib.TOMLDecodeError as error:
        if project and "fsdptool" not in text:
            return None
        raise ConfigError(f"{file} is not TOML: {error}") from error
    if project:
        tools = table.get("tool")
        table = tools.get("fsdptool") if isinstance(tools, dict) else None
        if table is None:
            return None
    return _settings(file, table, "[tool.fsdptool] " if project else "")


_KEYS = {
    item.name.replace("_", "-"): item.name
    for item in fields(LintSettings)
    if item.name not in ("root", "file")
}


def _settings(file: Path, table: Any, section: str) -> LintSettings:
    if not isinstance(table, dict):
        raise ConfigError(f"{file}: {section}must be a table")
    unknown = [str(key) for key in table if key not in _KEYS]
    if unknown:
        near = spelling.nearest(unknown[0], _KEYS, cutoff=0.6)
        raise ConfigError(
            f"{file}: {section}does not know {', '.join(unknown)}",
            help=f"did you mean {near}?" if near else f"the keys are {', '.join(_KEYS)}",
        )
    values: dict[str, Any] = {"root": file.parent, "file": file}
    for key, value in table.items():
        where = f"{file}: {section}{key}"
        values[_KEYS[key]] = _READ[key](value, where)
    return LintSettings(**values)


def _texts(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ConfigError(f"{where} must be a list of strings")
    return tuple(value)


def _codes(value: Any, where: str) -> tuple[str, ...]:
    return check_codes(_texts(value, where), where)


def _codes_by_file(value: Any, where: str) -> dict[str, tuple[str, ...]]:
    if not isinstance(value, dict):
        raise ConfigError(f"{where} must be a table of patterns with lists of codes")
    return {pattern: _codes(codes, f"{where} {pattern!r}") for pattern, codes in value.items()}


def _truth(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{where} must be true or false")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"{where} must be the name of a file")
    return value


_READ: dict[str, Callable[[Any, str], Any]] = {
    "select": _codes,
    "ignore": _codes,
    "exclude": _texts,
    "per-file-ignores": _codes_by_file,
    "baseline": _text,
    "strict": _truth,
    "skip-unknown": _truth,
}


def keep(reading: Reading, wanted: Callable[[Diagnostic], bool]) -> Reading:
    """Return a reading with the findings that are wanted; the others are suppressed."""
    kept = [index for index, item in enumerate(reading.diagnostics) if wanted(item)]
    if len(kept) == len(reading.diagnostics):
        return reading
    left_out = tuple(item for index, item in enumerate(reading.diagnostics) if index not in kept)
    return replace(
        reading,
        diagnostics=tuple(reading.diagnostics[index] for index in kept),
        changes=tuple(reading.changes[index] for index in kept if index < len(reading.changes)),
        suppressed=(*reading.suppressed, *left_out),
    )
