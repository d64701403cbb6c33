"""The module tree of an anatomy, walked the way ``fully_shard`` walks the live one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from fsdptool.records.anatomy import Anatomy, Module, Parameter


class ModuleTree:
    """Parents, children and directly owned parameters by module path."""

    def __init__(self, anatomy: Anatomy) -> None:
        self.parameters = anatomy.parameters
        self.modules: dict[str, Module] = {module.path: module for module in anatomy.modules}
        self._canonical = {alias: m.path for m in anatomy.modules for alias in (m.path, *m.aliases)}
        self._children: dict[str, list[str]] = defaultdict(list)
        for module in anatomy.modules:
            for path in (module.path, *module.aliases):
                if path:
                    parent = self._canonical.get(path.rpartition(".")[0])
                    if parent is not None and module.path not in self._children[parent]:
                        self._children[parent].append(module.path)
        self._owned: dict[str, list[Parameter]] = defaultdict(list)
        for parameter in anatomy.parameters:
            for owner in self.owners(parameter):
                self._owned[owner].append(parameter)

    def canonical(self, path: str) -> str:
        """Return the first path of the module that ``path`` names (modules can have several)."""
        return self._canonical[path]

    def owners(self, parameter: Parameter) -> tuple[str, ...]:
        """Return the paths of the modules that hold ``parameter`` directly, each once, in name order."""
        return tuple(dict.fromkeys(self._canonical[name.rpartition(".")[0]] for name in parameter.names))

    def postorder(self, start: str = "", *, stop: Iterable[str] = ()) -> Iterator[str]:
        """Yield paths below and including ``start``, children first, not entering ``stop``.

        The order is that of ``_get_managed_modules`` (torch 2.13,
        ``torch/distributed/fsdp/_fully_shard/_fsdp_init.py``).
        """
        blocked = set(stop)
        seen: set[str] = set()

        def visit(path: str) -> Iterator[str]:
            seen.add(path)
            for child in self._children[path]:
                if child not in seen and child not in blocked:
                    yield from visit(child)
            yield path

        yield from visit(start)

    def claim(self, roots: Iterable[str], taken: set[str]) -> tuple[Parameter, ...]:
        """Return the parameters that ``fully_shard(roots)`` manages, in its order.

        Args:
            roots: Module paths given in one call.
            taken: Modules that are units already; they are not entered.
        """
        claimed: dict[str, Parameter] = {}
        seen: set[str] = set()
        for root in roots:
            for path in self.postorder(root, stop=taken - set(roots)):
                if path not in seen:
                    seen.add(path)
                    claimed.update((parameter.fqn, parameter) for parameter in self._owned[path])
        return tuple(claimed.values())

    def subtree(self, path: str) -> tuple[Parameter, ...]:
        """Return every parameter below and including ``path``, each once."""
        return self.claim([path], set())

    def ancestors(self, path: str) -> Iterator[str]:
        """Yield the paths above ``path``, nearest first; the root's ``""`` is last."""
        while path:
            path = path.rpartition(".")[0]
            yield path

    def instances(self, classes: Iterable[str]) -> list[str]:
        """Return paths of instances of ``classes`` or of subclasses, children first, without the root.

        accelerate 1.15 matches with ``isinstance`` (``fsdp2_prepare_auto_wrap_policy``).
        """
        names = set(classes)
        return [
            path
            for path in self.postorder()
            if path and not names.isdisjoint((self.modules[path].class_name, *self.modules[path].bases))
        ]
