"""Counts parameters under every module of an anatomy's records. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import cached_property

from fsdptool.records.anatomy import Module, Parameter

CONTAINERS = frozenset({"ModuleList", "ModuleDict", "Sequential"})

Signature = tuple[tuple[str, tuple[int, ...]], ...]


class Census:
    """Parents, children and parameters by module path; every parameter counts once per subtree."""

    def __init__(self, modules: Sequence[Module], parameters: Sequence[Parameter]) -> None:
        self.modules = {module.path: module for module in modules}
        self.parameters = {parameter.fqn: parameter for parameter in parameters}
        canonical = {name: module.path for module in modules for name in (module.path, *module.aliases)}
        self.children: dict[str, list[str]] = defaultdict(list)
        for module in modules:
            if module.path:
                parent = canonical[module.path.rpartition(".")[0]]
                self.children[parent].append(module.path)
        self.by_class: dict[str, list[str]] = defaultdict(list)
        for module in modules:
            if module.path:
                self.by_class[module.class_name].append(module.path)
        self._below: dict[str, dict[str, None]] = defaultdict(dict)
        self.owned: dict[str, list[str]] = defaultdict(list)
        for parameter in parameters:
            for name in parameter.names:
                owner = canonical[name.rpartition(".")[0]]
                self.owned[owner].append(parameter.fqn)
                # Every path to the parameter counts, the aliases of shared modules included.
                path = name
                while path:
                    path = path.rpartition(".")[0]
                    self._below[canonical[path]][parameter.fqn] = None
        self._totals: dict[str, int] = {}

    @cached_property
    def total(self) -> int:
        """Unique parameters of the model."""
        return sum(parameter.numel for parameter in self.parameters.values())

    def below(self, path: str) -> Iterable[str]:
        """Return the names of the unique parameters in the subtree of ``path``."""
        return self._below.get(path, {})

    def size(self, path: str) -> int:
        """Return the number of unique parameters in the subtree of ``path``."""
        if path not in self._totals:
            self._totals[path] = sum(self.parameters[name].numel for name in self.below(path))
        return self._totals[path]

    def union(self, paths: Iterable[str]) -> int:
        """Return the number of unique parameters under all of ``paths`` together."""
        names = {name: None for path in paths for name in self.below(path)}
        return sum(self.parameters[name].numel for name in names)

    def signature(self, path: str) -> Signature:
        """Return the relative names and shapes below ``path``; equal for blocks that are alike."""
        cut = len(path) + 1 if path else 0
        parameters = []
        for name in self.below(path):
            parameter = self.parameters[name]
            inside = next((n for n in parameter.names if not path or n.startswith(f"{path}.")), name)
            parameters.append((inside[cut:], parameter.shape))
        return tuple(parameters)

    def parent(self, path: str) -> str:
        """Return the path of the module that first holds ``path``."""
        return path.rpartition(".")[0]

    def inner(self, path: str) -> list[str]:
        """Return the children of ``path`` that hold parameters."""
        return [child for child in self.children[path] if self.size(child)]

    def is_leaf(self, path: str) -> bool:
        """Whether no module below ``path`` holds parameters."""
        return not self.inner(path)

    def parts(self, path: str) -> list[str]:
        """Return the children of ``path`` that hold parameters, those inside bare containers included."""
        children = []
        for child in self.inner(path):
            bare = self.modules[child].class_name in CONTAINERS
            children += self.parts(child) if bare else [child]
        return children

    def is_flat(self, path: str) -> bool:
        """Whether every part of ``path`` is a leaf: no inner structure."""
        return all(self.is_leaf(part) for part in self.parts(path))
