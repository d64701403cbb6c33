"""Settings that a script loads: from files, by Hydra, and as OmegaConf merges them."""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Mapping, Sequence
from typing import Any

from fsdptool.scripts.hydra_files import Composer, assigned, resolved
from fsdptool.scripts.imports import Imports
from fsdptool.scripts.known_values import as_value, path_of
from fsdptool.scripts.values import Class, Function, Items, Table, Value, constant

_LOADERS = (
    *("yaml.safe_load", "yaml.full_load", "yaml.load", "json.load", "json.loads", "tomllib.load"),
    *("toml.load", "tomli.load", "omegaconf.OmegaConf.load", "OmegaConf.load"),
)
"""Functions that read a file of settings."""
_SETTINGS = (".yaml", ".yml", ".json", ".toml")
_MOST_FILES = 20
_OMEGACONF = ("omegaconf.OmegaConf.", "OmegaConf.")


class LoadedSettings(Imports):
    """Follows a script through the settings that it loads."""

    problems: list[str]
    _words: Sequence[str]
    _flags: dict[str, str | list[str]]
    _used: set[str]
    _files: dict[str, Value | None]
    _composed: dict[tuple[str, str], dict[str, Any] | None]

    def enter(
        self,
        function: Function,
        args: Sequence[Value],
        keywords: Mapping[str, Value],
        node: ast.AST,
        partly: bool = False,
    ) -> Value:
        """Run a function of the script for a call; decorators may give it arguments."""
        if not args and not keywords and (given := self._of_hydra(function)) is not None:
            args = (given,)
        if not args and keywords.keys() <= {"standalone_mode", "obj", "prog_name"}:  # of click itself
            keywords = self.of_options(function) or keywords
        return super().enter(function, args, keywords, node, partly)

    def _of_hydra(self, function: Function) -> Value | None:
        for item in getattr(function.node, "decorator_list", ()):
            named = isinstance(item, ast.Call) and ast.unparse(item.func)
            if self._load is None or not isinstance(item, ast.Call) or named != "hydra.main":
                continue
            given = dict(zip(("config_path", "config_name"), item.args, strict=False))
            given |= {word.arg: word.value for word in item.keywords if word.arg is not None}
            folder, name = (
                constant(self._value_in(function.scope, given[key])) if key in given else None
                for key in ("config_path", "config_name")
            )
            name = _first(self._flags.get("config_name", self._flags.get("cn"))) or name
            folder = _first(self._flags.get("config_path", self._flags.get("cp"))) or folder
            base = str(self.folder_of(function.scope))
            path = posixpath.normpath(posixpath.join(base, str(folder or ".")))
            data = self._settings(path, name, str(folder)) if isinstance(name, str) else None
            self._used |= {"config_name", "cn", "config_path", "cp", "config_dir", "cd"}
            if data is not None:
                return as_value(data, f"{name}.yaml", item)
        return None

    def _settings(self, path: str, name: str, folder: str) -> dict[str, Any] | None:
        """Return the settings that Hydra composes of a folder, each only once."""
        if (path, name) in self._composed:  # a call makes all the values anew
            for _ in range(_size(self._composed[path, name])):
                self.count()
        else:
            composer = Composer(self._load, path, self._words)  # type: ignore[arg-type]
            self._composed[path, name] = composer.composed(name)
            self.problems += [f"{lacking} is not found in {folder}" for lacking in composer.missing]
            if composer.full:
                self.problems.append(f"{folder} holds too many files: some are not read")
        return self._composed[path, name]

    def _loaded(self, source: Value | None, node: ast.AST, *, resolves: bool) -> Value | None:
        """Return the file of settings that a value was opened from, or None where it cannot be read."""
        path = path_of(source)
        if path is None or self._load is None or not path.lower().endswith(_SETTINGS):
            return None
        if path not in self._files and len(self._files) < _MOST_FILES:
            data = self._load(path)
            known = resolved(data) if resolves and isinstance(data, dict) else data
            self._files[path] = as_value(known, path, node) if isinstance(known, dict) else None
        return self._files.get(path)

    def of_options(self, function: Function) -> dict[str, Value]:
        """Return the arguments that decorators of a command give to a function."""
        del function
        return {}

    def settings_of(self, name: str, args: Sequence[Value], node: ast.AST) -> Value | None:
        """Return what a function yields that loads or merges settings, or None."""
        first = args[0] if args else None
        if name in _LOADERS:
            return self._loaded(first, node, resolves=name.endswith("OmegaConf.load"))
        if not name.startswith(_OMEGACONF):
            return None
        last = name.rpartition(".")[2]
        if last == "from_cli":
            return as_value(assigned(self._words), "the command line", node)
        if last == "from_dotlist" and isinstance(first, Items):
            words = [constant(item) for item in first.values]
            return as_value(assigned([word for word in words if isinstance(word, str)]), "a list", node)
        if last == "update" and isinstance(first, Table):
            self._changed(first, args[1:], node)
            return None
        if last == "structured" and first is not None:
            return self.table_of(
                self.call(first, (), {}, {}, False, node) if isinstance(first, Class) else first, node
            )
        if last not in ("merge", "unsafe_merge") or (made := self._united(args, node)) is None:
            return None
        return self.copied("deepcopy", (made,), {}, node)

    def _changed(self, table: Table, args: Sequence[Value], node: ast.AST) -> None:
        """Set ``OmegaConf.update(config, "training.rows", 4)``; else leave open what may be set."""
        key = constant(args[0]) if len(args) > 1 else None
        *sections, last = key.split(".") if isinstance(key, str) else [None]
        for section in sections:
            inner = table.items.get(section)
            if not isinstance(inner, Table):
                last = None
                break
            table = inner
        if last is None:
            self.unsure(table, node)
        else:
            self.store_item(table, last, args[1], node)

    def _united(self, parts: Sequence[Value], node: ast.AST) -> Value | None:
        """Return settings merged with others, which replace theirs; None where one of them is not known."""
        tables = [self.table_of(part, node) for part in parts]
        made = Table({}, {})
        for table in tables:
            if table is None:
                return None
            made.whole = made.whole and table.whole
            for key, value in table.items.items():
                old = made.items.get(key)
                both = old is not None and isinstance(value, Table) and self.table_of(old, node) is not None
                inner = self._united((old, value), node) if both and old is not None else None
                made.items[key], made.nodes[key] = inner or value, table.nodes.get(key, node)
        return made


def _first(word: str | list[str] | None) -> str | None:
    """Return the value of a flag that takes one; what follows it stands by itself."""
    return word[0] if isinstance(word, list) else word


def _size(data: object) -> int:
    """Return how many values settings hold."""
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return 1 + sum(map(_size, inner))
