"""A project's settings (``[tool.fsdptool]``): findings that count, hardware of its training files."""

from __future__ import annotations

import json
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from fsdptool import spelling
from fsdptool.config.result import Reading
from fsdptool.config.rules import file_rules
from fsdptool.errors import ConfigError
from fsdptool.files.text import UnreadableError, read_source, replace_file
from fsdptool.files.values import read_json
from fsdptool.records.diagnostic import Diagnostic

ALL = "ALL"
"""What selects every rule."""

_FILES = ("fsdptool.toml", "pyproject.toml")


@dataclass(frozen=True, slots=True)
class FileHardware:
    """The hardware that some training files are for.

    Attributes:
        gpu: Name of the GPU, as ``--gpu`` takes it.
        gpus: GPUs of a node; None leaves it to the file.
        nodes: Number of nodes; None leaves it to the file.
        host_memory: Host memory of a node, as ``512 GiB``.
        cluster: Cluster file instead of all of these, relative to the folder of the settings.
        model: What to take for the model of the file: a size of the catalogue, or a ``config.json`` relative
            to the folder of the settings.
    """

    gpu: str | None = None
    gpus: int | None = None
    nodes: int | None = None
    host_memory: str | None = None
    cluster: str | None = None
    model: str | None = None


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
        hardware: Pattern of training files to the hardware that they are for; the first that matches counts.
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
    hardware: Mapping[str, FileHardware] = field(default_factory=dict)
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

    def hardware_of(self, path: Path) -> FileHardware | None:
        """Return the hardware that a training file is for, or None."""
        inside = self.relative(path)
        return next((item for pattern, item in self.hardware.items() if _matches(pattern, inside)), None)

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
            if code != ALL and not any(known.startswith(code) for known in file_rules()):
                near = spelling.nearest(code, file_rules(), cutoff=0.6)
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
    _check_keys(table, _KEYS, f"{file}: {section}")
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


def _hardware_by_file(value: Any, where: str) -> dict[str, FileHardware]:
    if not isinstance(value, dict) or not all(isinstance(item, dict) for item in value.values()):
        raise ConfigError(f"{where} must be a table of patterns with tables of hardware")
    return {pattern: _hardware(item, f"{where} {pattern!r}") for pattern, item in value.items()}


def _hardware(table: Mapping[str, Any], where: str) -> FileHardware:
    known = {item.name.replace("_", "-"): item.name for item in fields(FileHardware)}
    _check_keys(table, known, f"{where} ")
    for key, value in table.items():
        number = key in ("gpus", "nodes")
        if number and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{where} {key} must be a number, 1 or more")
        if not number and (not isinstance(value, str) or not value):
            raise ConfigError(f"{where} {key} must be a string")
    others = [key for key in table if key not in ("cluster", "model")]
    if ("cluster" in table) == ("gpu" in table) or ("cluster" in table and others):
        raise ConfigError(
            f"{where} must name a gpu or a cluster",
            help="a cluster file says everything itself but the model",
        )
    return FileHardware(**{known[key]: value for key, value in table.items()})


def _check_keys(table: Mapping[str, Any], known: Mapping[str, str], where: str) -> None:
    unknown = [str(key) for key in table if key not in known]
    if unknown:
        near = spelling.nearest(unknown[0], known, cutoff=0.6)
        raise ConfigError(
            f"{where}does not know {', '.join(unknown)}",
            help=f"did you mean {near}?" if near else f"the keys are {', '.join(known)}",
        )


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
    "hardware": _hardware_by_file,
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


_FORM = re.compile(r"(?P<code>[A-Za-z0-9]+)(?::(?P<line>[1-9]\d{0,8})(?::(?P<column>[1-9]\d{0,8}))?)?")


@dataclass(frozen=True, slots=True)
class FindingSelector:
    """Findings of a code, in a whole file or at one place.

    Attributes:
        code: Code or its beginning.
        line, column: 1-based place; None stands for any.
    """

    code: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.code, self.line, self.column) if part is not None)

    def matches(self, item: Diagnostic) -> bool:
        """Return whether a finding is meant."""
        return (
            item.code.startswith(self.code)
            and self.line in (None, item.line)
            and self.column in (None, item.column)
        )


def selector_of(item: Diagnostic) -> FindingSelector:
    """Return what names a finding."""
    return FindingSelector(item.code, item.line, item.column)


def read_selectors(texts: Iterable[str], where: str) -> tuple[FindingSelector, ...]:
    """Return selectors from ``CODE[:LINE[:COLUMN]]``; commas separate several in one text.

    Args:
        texts: The texts.
        where: The option that they come from, for the message.

    Raises:
        ConfigError: A text has another form, or its code is not the beginning of any rule's.
    """
    chosen = []
    for text in filter(None, (piece.strip() for given in texts for piece in given.split(","))):
        form = _FORM.fullmatch(text)
        if form is None:
            raise ConfigError(
                f"{where}: {text} does not name a finding",
                help="write a code and, for one place, its line and column: FSD203, FSD203:12 or FSD203:12:3",
            )
        (code,) = check_codes([form["code"]], where)
        place = (int(form[name]) if form[name] else None for name in ("line", "column"))
        chosen.append(FindingSelector(code, *place))
    return tuple(chosen)


BASELINE = "fsdptool-baseline.json"
"""The file that ``--write-baseline`` writes unless another is named."""

_BASELINE_VERSION = 1
_LINE = re.compile(r"\bline \d+")


@dataclass(slots=True)
class Baseline:
    """Accepted findings by file.

    A finding is known by its file, code and message, with line numbers taken out of the message: edits
    above it do not make it new, and a second one of the same kind is new.

    Attributes:
        file: Where it is stored; paths are relative to its folder.
        known: File to how often each finding was accepted, by code and message.
    """

    file: Path
    known: dict[str, Counter[tuple[str, str]]] = field(default_factory=dict)

    def without(self, reading: Reading) -> Reading:
        """Return a reading whose accepted findings are suppressed."""
        left = Counter(self.known.get(self._name(reading), {}))

        def new(item: Diagnostic) -> bool:
            if left[_mark(item)] <= 0:
                return True
            left[_mark(item)] -= 1
            return False

        return keep(reading, new) if left else reading

    def take(self, readings: Iterable[Reading]) -> int:
        """Accept what was found in files, in place of what was accepted in them; return its number."""
        count = 0
        for reading in readings:
            # A path that cannot be read is a mistake of the command line, not an old finding.
            marks = Counter(
                _mark(item)
                for item in reading.diagnostics
                if item.severity != "info" and item.code != "FSD101"
            )
            self.known.pop(self._name(reading), None)
            if marks:
                self.known[self._name(reading)] = marks
            count += marks.total()
        return count

    def save(self) -> None:
        """Write the file.

        Raises:
            StorageError: It cannot be written.
        """
        files = {
            name: [
                {"code": code, "message": message, "count": count}
                for (code, message), count in sorted(marks.items())
            ]
            for name, marks in sorted(self.known.items())
        }
        text = json.dumps({"version": _BASELINE_VERSION, "files": files}, indent=1, ensure_ascii=False) + "\n"
        replace_file(self.file, text.encode())

    def _name(self, reading: Reading) -> str:
        path = Path(reading.path or "-").absolute()
        try:
            return path.relative_to(self.file.parent.absolute()).as_posix()
        except ValueError:
            return path.as_posix()


def _mark(item: Diagnostic) -> tuple[str, str]:
    return item.code, _LINE.sub("line", item.message)


def read_baseline(file: Path) -> Baseline:
    """Read a baseline.

    Raises:
        ConfigError: The file does not exist, or ``--write-baseline`` did not write it.
    """
    if not file.exists():
        raise ConfigError(f"the baseline {file} does not exist", help="--write-baseline writes one")
    try:
        known = _known(read_json(file))
    except UnreadableError as error:
        raise ConfigError(f"{file}: {error.message}") from error
    if known is None:
        raise ConfigError(f"{file} is not a baseline of fsdptool", help="--write-baseline writes one")
    return Baseline(file, known)


def _known(data: Any) -> dict[str, Counter[tuple[str, str]]] | None:
    files = data.get("files") if isinstance(data, dict) and data.get("version") == _BASELINE_VERSION else None
    if not isinstance(files, dict):
        return None
    known: dict[str, Counter[tuple[str, str]]] = {}
    for name, items in files.items():
        marks: Counter[tuple[str, str]] = Counter()
        for item in items if isinstance(items, list) else [None]:
            if not isinstance(item, dict) or not isinstance(item.get("count"), int):
                return None
            marks[str(item.get("code")), str(item.get("message"))] += item["count"]
        known[name] = marks
    return known
