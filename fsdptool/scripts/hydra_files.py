"""The settings that Hydra composes for a script: files, the defaults that they list, and overrides.

Read in hydra-core 1.3 ``_internal/defaults_list.py`` and ``core/override_parser``, omegaconf 2.3 ``grammar``.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fsdptool.scripts.known_values import LONGEST, typed

Load = Callable[[str], object]
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_OVERRIDE = re.compile(r"(\+{0,2})([\w./@]+)=(.*)", re.DOTALL)
_GLOBAL = ("experiment", "exp", "experiments")
"""Groups whose files say by their first comment that they are merged at the root."""
_DEEPEST, _MOST_FILES = 12, 60
_MOST_VALUES = 20_000
"""Values that are resolved: each reference may name several others."""


class Composer:
    """Composes the files of one folder.

    Args:
        load: Returns a file as plain data, or None.
        folder: Where the files lie.
        words: The arguments of the script.
    """

    def __init__(self, load: Load, folder: str, words: Sequence[str]) -> None:
        self._load = load
        self._folder = folder
        self._given = [found.groups() for word in words if (found := _OVERRIDE.fullmatch(word)) is not None]
        self._read = 0
        self.missing: list[str] = []

    def composed(self, name: str) -> dict[str, Any] | None:
        """Return the settings of a file with all that it lists, or None where it is not there."""
        made = self._merged("", name, 0)
        if made is None:
            return None
        for sign, key, value in self._given:
            if not self._is_group(key):
                _put(made, key.split("."), _value(value))
            elif sign:
                _merge(made, self._in_package(key, value, 0))
        return resolved(made)

    def _is_group(self, key: str) -> bool:
        """Say whether an override chooses a file: the group has a folder that holds it."""
        value = next((value for _, name, value in self._given if name == key), "")
        return "." not in key and self._data(key.partition("@")[0], value) is not None

    def _data(self, group: str, name: str) -> dict[str, Any] | None:
        if self._read >= _MOST_FILES or not name:
            return None
        self._read += 1
        path = posixpath.normpath(posixpath.join(self._folder, group, name))
        data = self._load(path if path.endswith((".yaml", ".yml")) else f"{path}.yaml")
        return {str(key): value for key, value in data.items()} if isinstance(data, dict) else None

    def _merged(self, group: str, name: str, depth: int) -> dict[str, Any] | None:
        """Return a file merged with its defaults; what it says itself comes last unless it says where."""
        data = self._data(group, name)
        if data is None or depth > _DEEPEST:
            return None
        listed = data.pop("defaults", None) or []
        listed = listed if isinstance(listed, list) else []
        made: dict[str, Any] = {}
        if "_self_" not in listed:
            listed = [*listed, "_self_"]
        for item in listed:
            if item == "_self_":
                _merge(made, data)
            elif isinstance(item, str):
                _merge(made, self._merged(group, item, depth + 1) or self._lacking(item))
            elif isinstance(item, dict):
                for key, option in item.items():
                    words = str(key).split()
                    if words and words[0] != "override" and not words[-1].startswith("hydra"):
                        _merge(made, self._chosen(group, words[-1], option, depth))
        return made

    def _chosen(self, above: str, key: str, option: object, depth: int) -> dict[str, Any]:
        inside = key.lstrip("/") if key.startswith("/") or not above else f"{above}/{key}"
        given = next((value for _, name, value in self._given if name == inside.partition("@")[0]), option)
        names = given if isinstance(given, list) else [given]
        made: dict[str, Any] = {}
        for name in names:
            if name not in (None, "null", "none"):
                relative = inside.removeprefix(f"{above}/") if above else inside
                _merge(made, self._in_package(inside, str(name), depth, relative))
        return made

    def _in_package(self, key: str, name: str, depth: int, relative: str | None = None) -> dict[str, Any]:
        """Return a file of a group below the name of the group, or of the package that is said."""
        group, at, package = key.partition("@")
        found = self._merged(group, name, depth + 1)
        if found is None:
            return self._lacking(f"{group}/{name}")
        where = package if at else (relative or group).replace("/", ".")
        if where in ("_global_", "") or group in _GLOBAL:
            return found
        made: dict[str, Any] = {}
        _put(made, where.split("."), found)
        return made

    def _lacking(self, name: str) -> dict[str, Any]:
        self.missing.append(name)
        return {}


def _merge(into: dict[str, Any], other: Mapping[str, Any]) -> None:
    for key, value in other.items():
        old = into.get(key)
        if isinstance(old, dict) and isinstance(value, dict):
            _merge(old, value)
        else:
            into[key] = dict(value) if isinstance(value, dict) else value


def _put(data: dict[str, Any], path: Sequence[str], value: object) -> None:
    made: Any = value
    for name in reversed(path):
        made = {name: made}
    _merge(data, made)


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
            value = value.get(name) if isinstance(value, dict) else None
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
            return whole(found(only[1]), depth + 1)
        return _REFERENCE.sub(lambda item: str(whole(found(item[1]), depth + 1))[:LONGEST], value)[:LONGEST]

    return {key: whole(value) for key, value in data.items()}
