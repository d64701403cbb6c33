"""The settings that Hydra composes for a script: files, the defaults that they list, and overrides.

Read in hydra-core 1.3 ``_internal/defaults_list.py``, ``core/default_element.py``,
``plugins/config_source.py`` and ``core/override_parser``, omegaconf 2.3 ``grammar``.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fsdptool.scripts.known_values import LONGEST, typed

Load = Callable[[str], object]
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_OVERRIDE = re.compile(r"(\+{0,2}|~)([\w/][\w./@-]*)=(.*)", re.DOTALL)
_DELETED = re.compile(r"~([\w/][\w./@-]*)")
_Part = tuple[str, dict[str, Any] | None]
_UNKNOWN = object()
_SELF, _ROOT = "_self_", "_global_"
_DEEPEST, _MOST_FILES, _MOST_ENTRIES = 12, 60, 400
_MOST_VALUES = 20_000
"""Values that are resolved: each reference may name several others."""


class Packaged(dict[str, Any]):
    """A file of settings, and where its first comment puts them (``# @package``)."""

    package: str | None = None


def package_of(text: str) -> str | None:
    """Return the package that the first comments of a file name, or None."""
    package = None
    for line in filter(None, map(str.strip, text.splitlines())):
        if not re.match(r"#\s*@", line):
            break
        words = line.lstrip("#").split()
        package = words[1] if words[0] == "@package" and len(words) == 2 else package
    return package


def has_content(text: str) -> bool:
    """Say whether a file holds more than comments."""
    return any(line.strip() and not line.lstrip().startswith("#") for line in text.splitlines())


@dataclass(slots=True)
class _Entry:
    """One entry of a list of defaults.

    Attributes:
        group: The group as it is written; of a single file, its path.
        value: The names that it chooses; None: none.
        package: What follows its ``@``, or None.
        single: Whether it names a file rather than a choice of a group.
        optional, override: Whether it says so.
        above, place: Group and package of the file that lists it.
    """

    group: str
    value: object = None
    package: str | None = None
    single: bool = False
    optional: bool = False
    override: bool = False
    above: str = ""
    place: str = ""

    @property
    def path(self) -> str:
        """Return the group or the file from the folder of all files."""
        return self.group[1:] if self.group.startswith("/") else f"{self.above}/{self.group}".lstrip("/")

    def put_at(self, header: str | None = None) -> str:
        """Return the package that its settings are put in."""
        written = self.group.lstrip("/")
        beside = posixpath.dirname(written) if self.single else written
        package = self.package
        if package is not None and "_group_" in package:
            own = posixpath.dirname(self.path) if self.single else self.path
            package = f"{_ROOT}.{package.replace('_group_', own.replace('/', '.'))}"
        elif package == "_here_":
            package = ""
        elif package is None and header not in (None, "_group_"):
            package = header if header == _ROOT else f"{_ROOT}.{header}"
        whole = ".".join(filter(None, (self.place, beside.replace("/", ".") if package is None else package)))
        return whole.rpartition(_ROOT)[2].lstrip(".")

    @property
    def key(self) -> str:
        """Return what an override calls the choice."""
        package = self.put_at()
        return self.path if package == self.path.replace("/", ".") else f"{self.path}@{package or _ROOT}"


class Composer:
    """Composes the files of one folder.

    Args:
        load: Returns a file as plain data, or None.
        folder: Where the files lie.
        words: The arguments of the script.

    Attributes:
        missing: Files that are listed, and that are not there.
        full: Whether there are more files than are read.
    """

    def __init__(self, load: Load, folder: str, words: Sequence[str]) -> None:
        self._load = load
        self._folder = folder
        self._words = words
        self._read = 0
        self._chosen: dict[str, object] = {}
        self._deleted: dict[str, str] = {}
        self._added: list[_Entry] = []
        self._seen: dict[str, object] = {}
        self.missing: dict[str, None] = {}
        self.full = False

    def composed(self, name: str) -> dict[str, Any] | None:
        """Return the settings of a file with all that it lists, or None where it is not there."""
        if self._data(name) is None:
            return None
        settings = [
            found.groups() for word in self._words if (found := _OVERRIDE.fullmatch(word)) is not None
        ]
        left = [(sign, key, value) for sign, key, value in settings if not self._takes(sign, key, value)]
        made: dict[str, Any] = {}
        files = self._listed(_Entry(name, single=True), None, 0, root=True)
        lacking = {key: _value(value) for sign, key, value in left if key in self._seen and not sign}
        if lacking:  # groups whose file does not exist
            self._chosen |= lacking
            files = self._listed(_Entry(name, single=True), None, 0, root=True)
        for package, data in files:
            place = package.split(".") if package else []
            if data is None:  # which may say anything else there
                _take_out(made, place)
            else:
                _put(made, place, data)
        for sign, key, value in left:
            if key not in self._seen and sign == "~":
                _take_out(made, key.split("."))
            elif key not in self._seen:
                _put(made, key.split("."), _value(value))
        for word in self._words:
            gone = _DELETED.fullmatch(word)
            if gone is not None and gone[1] not in self._seen:
                _take_out(made, gone[1].split("."))
        return resolved(made)

    def _takes(self, sign: str, key: str, word: str) -> bool:
        """Keep an override that chooses files of a group; say whether it certainly does."""
        group, at, package = key.partition("@")
        value = _value(word)
        names = value if isinstance(value, list) else [value]
        if "." in group:
            return False
        if sign == "~":
            self._deleted[key] = word
            return False
        same = package == group.replace("/", ".")
        known = any(name is not None and self._data(f"{group}/{name}") is not None for name in names)
        if sign and known:
            self._added.append(_Entry(group, value, package if at else None))
        elif known or value is None:
            self._chosen[group if same else key] = value
        return known

    def _data(self, name: str) -> Packaged | None:
        if self._read >= _MOST_FILES or not name:
            self.full = self.full or bool(name)
            return None
        self._read += 1
        path = posixpath.normpath(posixpath.join(self._folder, name))
        data = self._load(path if path.endswith((".yaml", ".yml")) else f"{path}.yaml")
        if not isinstance(data, dict):
            return None
        made = Packaged({str(key): value for key, value in data.items()})
        made.package = data.package if isinstance(data, Packaged) else None
        return made

    def _listed(self, entry: _Entry, name: str | None, depth: int, *, root: bool = False) -> list[_Part]:
        """Return the settings of a file and of those that it lists, in their order; None: one is missing."""
        path = entry.path if name is None else f"{entry.path}/{name}"
        data = self._data(path) if depth <= _DEEPEST else None
        if data is None:
            if not entry.optional and not self.full:
                self.missing[path] = None
            return [] if entry.optional else [(entry.put_at(), None)]
        place = entry.put_at(data.package)
        group = posixpath.dirname(entry.path) if entry.single else entry.path
        listed = [*_entries(data.pop("defaults", None), group, place)]
        if not any(item.group == _SELF for item in listed):
            listed.append(_Entry(_SELF))
        listed += self._added if root else []
        if len(listed) > _MOST_ENTRIES:
            self.full = True
            return [(place, None)]
        for item in listed:
            if item.override:
                self._chosen.setdefault(item.key, item.value)
        # The last ones come first: what they override is said before it is chosen.
        parts: list[list[_Part]] = [[] for _ in listed]
        waiting: list[int] = []
        for at in reversed(range(len(listed))):
            item = listed[at]
            if item.group == _SELF:
                parts[at] = [(place, data)]
            elif item.single:
                parts[at] = self._listed(item, None, depth + 1)
            elif not item.override:
                self._seen[item.key] = item.value = self._chosen.get(item.key, item.value)
                waiting += [at] * ("${" in str(item.value))
                parts[at] = [] if at in waiting else self._of_group(item, depth)
        for at in waiting:
            item = listed[at]
            item.value = _REFERENCE.sub(
                lambda found: str(self._seen.get(found[1], found[0])), str(item.value)
            )
            parts[at] = self._of_group(item, depth)
        return [part for several in parts for part in several]

    def _of_group(self, entry: _Entry, depth: int) -> list[_Part]:
        names = entry.value if isinstance(entry.value, list) else [entry.value]
        if self._deleted.get(entry.key) == names[0] or entry.key in self._words_deleted():
            return []
        kept = [str(name) for name in names if name not in (None, "null", "none", "???")]
        return [part for name in kept for part in self._listed(entry, name, depth + 1)]

    def _words_deleted(self) -> set[str]:
        return {found[1] for word in self._words if (found := _DELETED.fullmatch(word)) is not None}


def _entries(listed: object, group: str, place: str) -> Iterator[_Entry]:
    """Yield what a list of defaults names; Hydra's own groups lie elsewhere."""
    for item in listed if isinstance(listed, list) else []:
        if isinstance(item, str):
            path, at, package = item.partition("@")
            yield _Entry(path, None, package if at else None, single=path != _SELF, above=group, place=place)
        for key, value in item.items() if isinstance(item, dict) else ():
            words = str(key).split()
            name, at, package = (words[-1] if words else "").partition("@")
            if name.strip("/") and name.lstrip("/").partition("/")[0] != "hydra":
                yield _Entry(
                    name, value, package if at else None, optional="optional" in words[:-1],
                    override="override" in words[:-1], above=group, place=place,
                )  # fmt: skip


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        old = into.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _merge(old, value)
        else:
            into[key] = value
            if isinstance(value, dict):
                into[key] = {}
                _merge(into[key], value)


def _put(data: dict[str, Any], path: Sequence[str], value: object) -> None:
    made: Any = value
    for name in reversed(path):
        made = {name: made}
    _merge(data, made)


def _take_out(data: dict[str, Any], path: Sequence[str]) -> None:
    for name in path[:-1]:
        inner = data.get(name)
        if not isinstance(inner, dict):
            return
        data = inner
    if path:
        data.pop(path[-1], None)
    else:
        data.clear()


def assigned(words: Sequence[str]) -> dict[str, Any]:
    """Return what words like ``model.name=llama`` set."""
    made: dict[str, Any] = {}
    for word in words:
        if (found := _OVERRIDE.fullmatch(word)) is not None:
            _put(made, found[2].split("."), _value(found[3]))
    return made


def _value(word: str) -> object:
    word = word.strip()
    if len(word) > 1 and word[0] == word[-1] and word[0] in "'\"":
        return word[1:-1]
    if word.startswith("[") and word.endswith("]"):
        return [_value(item) for item in word[1:-1].split(",") if item.strip()]
    return None if word == "null" else typed(word)


def resolved(data: dict[str, Any]) -> dict[str, Any]:
    """Return settings in which values stand in the place of ``${other.key}``."""

    def found(path: str) -> object:
        value: Any = data
        for name in path.split("."):
            if not isinstance(value, dict) or name not in value:
                return _UNKNOWN
            value = value[name]
        return value

    room = iter(range(_MOST_VALUES))

    def whole(value: Any, depth: int = 0) -> Any:
        if depth > _DEEPEST or next(room, None) is None:
            return None if isinstance(value, str) and "${" in value else value
        if isinstance(value, dict):
            return {key: whole(item, depth + 1) for key, item in value.items()}
        if isinstance(value, list):
            return [whole(item, depth + 1) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        only = _REFERENCE.fullmatch(value)
        if only is not None:
            known = found(only[1])
            return value if known is _UNKNOWN else whole(known, depth + 1)

        texts: dict[str, str] = {}

        def said(item: re.Match[str]) -> str:
            if item[0] not in texts:
                known = found(item[1])
                texts[item[0]] = item[0] if known is _UNKNOWN else str(whole(known, depth + 1))[:LONGEST]
            return texts[item[0]]

        return _REFERENCE.sub(said, value)[:LONGEST]

    return {key: whole(value) for key, value in data.items()}
