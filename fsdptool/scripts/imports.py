"""Modules of a project that its script imports: they are followed as Python runs them."""

from __future__ import annotations

import ast
import posixpath
from collections.abc import Callable, Iterator
from pathlib import PurePosixPath

from fsdptool.scripts.containers import Containers
from fsdptool.scripts.interpreter import is_main
from fsdptool.scripts.names import KNOWN, library
from fsdptool.scripts.values import Library, Scope, Thing, Value

_MOST_MODULES = 24
_ABOVE = ("", "..", "../..")
"""Folders, from that of the script, in which its project may keep packages."""


class Imports(Containers):
    """Follows the modules that lie in the project of a script.

    Whatever such a module says stands, for the script, in the line that imports it.
    """

    _load: Callable[[str], object] | None
    _folder = PurePosixPath()
    _importing = False

    def __init__(self, tree: ast.Module, folder: str = "", *, follows: bool = True) -> None:
        super().__init__(tree)
        self._folder = self.script_folder = PurePosixPath(folder)
        self._follows = follows
        self._modules: dict[str, dict[str, Value]] = {}
        self._missing: set[str] = set()

    def _do_importfrom(self, node: ast.ImportFrom) -> None:
        super()._do_importfrom(node)
        dotted = node.module or ""
        held = self._module(dotted, node.level, node) or {}
        for item in node.names:
            if item.name == "*":
                for name, value in list(held.items()):
                    if not name.startswith("_"):
                        self.store(self.scope.names, name, value)
                continue
            found = held.get(item.name)
            if found is None:
                found = self._as_object(f"{dotted}.{item.name}".lstrip("."), node.level, node)
            if found is not None:
                self.store(self.scope.names, item.asname or item.name, found)

    def _do_import(self, node: ast.Import) -> None:
        super()._do_import(node)
        for item in node.names:
            found = self._as_object(item.name, 0, node)
            if found is None:
                continue
            first, *inner = [item.asname] if item.asname else item.name.split(".")
            for name in reversed(inner):
                parts: dict[object, Value] = {name: found}
                found = Thing("module", label=name, node=node, parts=parts)
            self.store(self.scope.names, first, found)

    def _do_if(self, node: ast.If) -> bool:
        if self._importing and is_main(node.test):
            return self.block(node.orelse)
        return super()._do_if(node)

    def _as_object(self, dotted: str, level: int, node: ast.stmt) -> Thing | None:
        held = self._module(dotted, level, node)
        if held is None:
            return None
        made = Thing("module", label=dotted, node=node)
        made.parts.update(held.items())
        return made

    def _module(self, dotted: str, level: int, node: ast.stmt) -> dict[str, Value] | None:
        """Return the names of a module of the project, or None where it is none."""
        if self._load is None or not self._follows or not dotted or (not level and library(dotted) in KNOWN):
            return None
        for path in self._paths(dotted, level):
            if path in self._modules:
                return self._modules[path]
            if path in self._missing or len(self._modules) >= _MOST_MODULES:
                continue
            tree = self._load(path)
            if isinstance(tree, ast.Module):
                return self._followed(path, tree, node)
            self._missing.add(path)
        return None

    def _paths(self, dotted: str, level: int) -> Iterator[str]:
        inside = PurePosixPath(*dotted.split("."))
        if level:
            bases = [PurePosixPath(self._folder, *[".."] * (level - 1))]
        else:
            bases = [PurePosixPath(self.script_folder, above) for above in _ABOVE]
        for base in bases:
            for path in (f"{inside}.py", str(inside / "__init__.py")):
                yield posixpath.normpath(base / path)

    def _followed(self, path: str, tree: ast.Module, node: ast.stmt) -> dict[str, Value]:
        names: dict[str, Value] = {}
        self._modules[path] = names  # before it is followed: modules import each other
        for item in ast.walk(tree):
            if isinstance(item, ast.expr | ast.stmt | ast.keyword | ast.arg | ast.excepthandler):
                item.lineno = item.end_lineno = node.lineno
        kept = (self.scope, self.module, self._folder, self._importing, self._journal)
        roots, guards = len(self.roots), len(self.guards)
        self.module = self.scope = Scope(names)
        # What a module binds stays, even where one branch of two imports it.
        self._folder, self._importing, self._journal = PurePosixPath(path).parent, True, []
        try:
            self.block(tree.body)
        finally:
            self.scope, self.module, self._folder, self._importing, self._journal = kept
            del self.roots[roots:], self.guards[guards:]
        return {name: value for name, value in names.items() if not _is_of_itself(value)}


def _is_of_itself(value: Value) -> bool:
    return isinstance(value, Library) and value.name.startswith(".")
