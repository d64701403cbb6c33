"""Modules of a project that its script imports: they are followed as Python runs them."""

from __future__ import annotations

import ast
import posixpath
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import cast

from fsdptool.scripts.containers import Containers
from fsdptool.scripts.interpreter import is_equal, is_main
from fsdptool.scripts.names import KNOWN, LIGHTNING, library
from fsdptool.scripts.values import Event, Library, Scope, Thing, Value, constant, outermost

_MOST_MODULES, _MOST_MISSING, _MOST_DOTS = 24, 1200, 20
_ABOVE = ("", "..", "../..")
"""Folders, from that of the script, in which its project may keep packages."""
_INSTALLED = KNOWN | {
    *LIGHTNING, "unsloth", "deepspeed", "hydra", "omegaconf", "yaml", "toml", "tomli", "fire", "typer",
    "click", "rich_click", "asyncclick", "tyro", "jsonargparse", "modal", "pydantic", "ml_collections",
    "easydict", "addict", "munch", "box", "multiprocessing", "io", "apex", "ray", "vllm",
    "liger_kernel", "flash_attn", "xformers", "timm",
}  # fmt: skip
"""Libraries whose meaning is known here: a folder of the same name is not looked into."""


class Imports(Containers):
    """Follows the modules that lie in the project of a script.

    Whatever such a module says stands, for the script, in the line that imports it.
    """

    _load: Callable[[str], object] | None
    _importing = False

    def __init__(self, tree: ast.Module, folder: str = "", *, follows: bool = True) -> None:
        super().__init__(tree)
        self.script_folder = PurePosixPath(folder)
        self._follows = follows
        self._modules: dict[str, Thing] = {}
        self._packages: dict[str, Thing] = {}
        self._folders: dict[Scope, PurePosixPath] = {}
        self._inserted: list[str] = []
        self._missing: set[str] = set()
        self._imports: list[tuple[int, int]] = []

    def folder_of(self, scope: Scope) -> PurePosixPath:
        """Return the folder of the module that names belong to."""
        return self._folders.get(outermost(scope), self.script_folder)

    def is_of_import(self, event: Event) -> bool:
        """Say whether something happens while a module of the project is imported."""
        return any(first < event.order <= last for first, last in self._imports)

    def _do_importfrom(self, node: ast.ImportFrom) -> None:
        super()._do_importfrom(node)
        dotted = node.module or ""
        module = self._module(dotted, node.level, node)
        for item in node.names:
            self.count()
            if item.name == "*":
                for name in list(module.parts) if module is not None else ():
                    self.count()
                    value = _held(module, name)
                    if isinstance(name, str) and not name.startswith("_") and value is not None:
                        self.store(self.scope.names, name, value)
                continue
            found = _held(module, item.name)
            if found is None:
                found = self._module(f"{dotted}.{item.name}".lstrip("."), node.level, node)
            if found is not None:
                self.assign(ast.copy_location(ast.Name(item.asname or item.name, ast.Store()), node), found)

    def _do_import(self, node: ast.Import) -> None:
        super()._do_import(node)
        for item in node.names:
            self.count()
            found = self._module(item.name, 0, node)
            if found is None:
                continue
            if item.asname:
                self.store(self.scope.names, item.asname, found)
                continue
            names, where = item.name.split("."), self.scope.names
            for index, name in enumerate(names[:-1]):
                dotted = ".".join(names[: index + 1])
                package = self._module(dotted, 0, node) or self._packages.get(dotted)
                if package is None:
                    package = self._packages[dotted] = Thing("module", label=dotted, node=node)
                self.store(where, name, package)
                where = cast("dict[str, Value]", package.parts)
            self.store(where, names[-1], found)

    def _do_if(self, node: ast.If) -> bool:
        if self._importing and is_main(node.test):
            return self.block(node.orelse if is_equal(node.test) else node.body)
        return super()._do_if(node)

    def attribute(self, value: Value, name: str, node: ast.AST) -> Value:
        """Return an attribute of a value; those of a module are its names."""
        if isinstance(value, Thing) and value.kind == "module":
            unknown = Thing("attribute", label=name, node=node, parent=value, outside=True)
            return _held(value, name) or unknown
        return super().attribute(value, name, node)

    def _made(
        self,
        name: str,
        function: Library,
        args: Sequence[Value],
        keywords: Mapping[str, Value],
        node: ast.AST,
    ) -> Value:
        if name == "sys.path.insert" and len(args) > 1 and isinstance(folder := constant(args[1]), str):
            self._inserted.insert(0, folder)
        return super()._made(name, function, args, keywords, node)

    def _module(self, dotted: str, level: int, node: ast.stmt) -> Thing | None:
        """Return a module of the project, or None where the project has no such module."""
        if self._load is None or not self._follows or not dotted or level > _MOST_DOTS:
            return None
        if not level and library(dotted) in _INSTALLED:
            return None
        for path in self._paths(dotted, level):
            if path in self._modules:
                return self._modules[path]
            if path in self._missing or len(self._modules) >= _MOST_MODULES:
                continue
            if len(self._missing) >= _MOST_MISSING:
                return None
            tree = self._load(path)
            if isinstance(tree, ast.Module):
                return self._followed(path, dotted, tree, node)
            self._missing.add(path)
        return None

    def _paths(self, dotted: str, level: int) -> Iterator[str]:
        inside = PurePosixPath(*dotted.split("."))
        if level:
            bases = [PurePosixPath(self.folder_of(self.scope), *[".."] * (level - 1))]
        else:
            above = _ABOVE[:1] if library(dotted) in sys.stdlib_module_names else _ABOVE
            bases = [
                PurePosixPath(self.script_folder, up, folder) for folder in self._inserted for up in above
            ]
            bases += [PurePosixPath(self.script_folder, up) for up in above]
        for base in bases:
            for path in (str(inside / "__init__.py"), f"{inside}.py"):
                yield posixpath.normpath(base / path)

    def _followed(self, path: str, dotted: str, tree: ast.Module, node: ast.stmt) -> Thing:
        names: dict[str, Value] = {}
        made = Thing("module", label=dotted, node=node, parts=cast("dict[object, Value]", names))
        self._modules[path] = made  # before it is followed: modules import each other
        for item in ast.walk(tree):
            if isinstance(item, ast.expr | ast.stmt | ast.keyword | ast.arg | ast.excepthandler):
                item.lineno = item.end_lineno = node.lineno
        kept = (self.scope, self.module, self._importing, self._journal)
        roots, guards, first = len(self.roots), len(self.guards), self._order
        self.module = self.scope = Scope(names)
        self._folders[self.scope] = PurePosixPath(path).parent
        # What a module binds stays, even where one branch of two imports it.
        self._importing, self._journal = True, []
        try:
            self.block(tree.body)
        finally:
            self.scope, self.module, self._importing, self._journal = kept
            del self.roots[roots:], self.guards[guards:]
            self._imports.append((first, self._order))
        return made


def _held(module: Thing | None, name: object) -> Value | None:
    """Return what a name of a module stands for; None where the module imports it from elsewhere."""
    value = module.parts.get(name) if module is not None else None
    return None if isinstance(value, Library) and value.name.startswith(".") else value
