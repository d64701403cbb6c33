"""Counts parameters under every module, and what the wrap choice means in units. Torch-free."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cached_property

from fsdptool.records.anatomy import Anatomy, Module, Parameter, WrapConcern
from fsdptool.records.detection import Uneven
from fsdptool.records.sharding import FsdpSettings, Unit, UnitPlan

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


DOMINANT = 0.35
"""A unit of this share of the parameters bounds what wrapping can save."""

_BYTES = {
    "float64": 8, "int64": 8, "complex64": 8, "float32": 4, "int32": 4,
    "float16": 2, "bfloat16": 2, "int16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


def item_bytes(dtype: str) -> int:
    """Return the size of one element of a torch dtype name."""
    return _BYTES.get(dtype, 4)


def uneven(parameters: Sequence[Parameter], ranks: int) -> tuple[Uneven, ...]:
    """Return the parameters that ``ranks`` do not shard evenly.

    FSDP2 shards dimension 0 like ``torch.chunk`` and pads every shard to the first one's size
    (torch 2.13, ``_fsdp_param.py:_init_sharded_param``).
    """
    listed = []
    for parameter in parameters:
        dim0 = parameter.shape[0] if parameter.shape else 1
        if dim0 == 0 or dim0 % ranks == 0:
            continue
        chunk = -(-dim0 // ranks)
        row = parameter.numel // dim0
        padding = (chunk * ranks - dim0) * row * item_bytes(parameter.dtype)
        listed.append(Uneven(parameter.fqn, dim0, padding, ranks - -(-dim0 // chunk)))
    return tuple(listed)


def unit_plan(anatomy: Anatomy, *, layout: str = "native") -> UnitPlan:
    """Return the units of the wrap choice under default settings.

    Raises:
        ConfigError: The layout does not support this model (accelerate's, mostly).
    """
    from fsdptool.layout import group, resolve_sharding

    classes = anatomy.wrap.classes
    settings = FsdpSettings(wrap_policy="transformer" if classes else "none", wrap_classes=classes)
    return group(
        anatomy, resolve_sharding(settings, layout="accelerate" if layout == "accelerate" else "native")
    )


def with_concern(anatomy: Anatomy, census: Census) -> Anatomy:
    """Return the anatomy with the reason why one unit dominates, if one does."""
    units = unit_plan(anatomy).units
    total = max(anatomy.total_parameters, 1)
    largest = max(units, key=lambda unit: unit.numel)
    if largest.numel / total < DOMINANT:
        return anatomy
    code = _concern(anatomy, census, units, largest)
    text = f"unit {largest.id} holds {largest.numel / total:.0%} of the parameters"
    return replace(anatomy, wrap=replace(anatomy.wrap, concern_code=code, concern=text))


def _concern(anatomy: Anatomy, census: Census, units: Sequence[Unit], largest: Unit) -> WrapConcern:
    owned = {parameter.fqn: parameter for parameter in largest.parameters}
    tables = {
        name
        for path, module in census.modules.items()
        if module.embedding
        for name in census.below(path)
        if name in owned
    }
    if sum(owned[name].numel for name in tables) * 2 >= largest.numel:
        return "mostly_embedding"
    if largest.kind == "shared":
        return "shared_parameters"
    if largest.kind == "block":
        alike = sum(1 for unit in units if unit.kind == "block" and unit.signature == largest.signature)
        return "few_blocks" if alike >= 2 or sum(u.kind == "block" for u in units) < 4 else "uneven_blocks"
    if not anatomy.wrap.classes:
        return _unwrapped(anatomy, census)
    biggest = max(owned.values(), key=lambda parameter: parameter.numel)
    if biggest.numel * 2 >= largest.numel:
        return "large_head"
    return _convolutional(owned.values()) or "many_parts"


def _unwrapped(anatomy: Anatomy, census: Census) -> WrapConcern:
    singles = [c for c in anatomy.wrap.candidates if c.reason_code == "once" and "Layer" in c.name]
    listed = [item for item in singles if census.modules[item.paths[0]].listed and item.share >= 0.05]
    if listed:
        return "shared_block"
    return _convolutional(anatomy.parameters) or "no_repeated_block"


def _convolutional(parameters: Iterable[Parameter]) -> WrapConcern | None:
    kernels = total = 0
    for parameter in parameters:
        total += parameter.numel
        kernels += parameter.numel if len(parameter.shape) in (3, 4, 5) else 0
    return "convolutional_stages" if kernels * 2 >= max(total, 1) else None
