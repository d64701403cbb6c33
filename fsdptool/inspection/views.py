"""Views of an anatomy: its parts, its leaves, its tree, where its classes are defined. Torch-free."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from fsdptool.inspection.census import CONTAINERS, Census
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.detection import Branch, LeafClass, Part, Place


def parts(anatomy: Anatomy, census: Census) -> tuple[Part, ...]:
    """Split the model into the subtrees that contain its lists of blocks, and the modules next to them."""
    blocks = {path for name in anatomy.wrap.classes for path in census.by_class.get(name, ())}
    subtrees = []
    counted: set[str] = set()
    for path in _split(census, "", blocks):
        names = [
            name for name in (census.below(path) if path in census.modules else ()) if name not in counted
        ]
        counted.update(names)
        sizes = [census.parameters[name] for name in names]
        total = sum(parameter.numel for parameter in sizes)
        if total:
            trainable = sum(parameter.numel for parameter in sizes if parameter.trainable)
            kind = census.modules[path].class_name
            subtrees.append(Part(path, kind, total, trainable, total / max(census.total, 1)))
    rest = [p for name, p in census.parameters.items() if name not in counted]
    if rest:
        total = sum(parameter.numel for parameter in rest)
        trainable = sum(parameter.numel for parameter in rest if parameter.trainable)
        root = census.modules[""].class_name
        subtrees.append(Part("", root, total, trainable, total / max(census.total, 1)))
    return tuple(subtrees)


def _split(census: Census, path: str, blocks: set[str]) -> list[str]:
    """Open a module as long as several of its branches hold lists of blocks; the root always."""
    holders = _holders(census, path, blocks)
    if not holders or not (path == "" or _branches(census, path, blocks)):
        return [path]
    return [
        part
        for child in census.inner(path)
        for part in (_split(census, child, blocks) if child in holders else [child])
    ]


def _holders(census: Census, path: str, blocks: set[str]) -> list[str]:
    """Return the children below which blocks lie; none if ``path`` holds a list of blocks itself."""
    children = census.inner(path)
    inner = [child for child in children if any(block.startswith(f"{child}.") for block in blocks)]
    bare = any(census.modules[child].class_name in CONTAINERS for child in inner)
    return [] if bare else inner


def _branches(census: Census, path: str, blocks: set[str]) -> bool:
    holders = _holders(census, path, blocks)
    return len(holders) > 1 or (len(holders) == 1 and _branches(census, holders[0], blocks))


def leaves(census: Census) -> tuple[LeafClass, ...]:
    """Return the classes that own parameters directly, the largest first."""
    by_class: dict[str, list[str]] = defaultdict(list)
    for path, module in census.modules.items():
        if census.owned.get(path):
            by_class[module.class_name].append(path)
    leaves = []
    for name, paths in by_class.items():
        owned = {fqn for path in paths for fqn in census.owned[path]}
        total = sum(census.parameters[fqn].numel for fqn in owned)
        leaves.append(LeafClass(name, len(paths), total, total / max(census.total, 1), tuple(paths[:5])))
    return tuple(sorted(leaves, key=lambda leaf: (-leaf.parameters_total, leaf.name)))


def tree(anatomy: Anatomy, census: Census) -> Branch:
    """Return the module tree with equal neighbours folded together."""
    return _branch(census, "", "(root)", 1, set(anatomy.wrap.classes))


def _branch(census: Census, path: str, name: str, count: int, wrapped: set[str]) -> Branch:
    kind = census.modules[path].class_name
    runs: list[tuple[list[str], object]] = []
    for child in census.inner(path):
        shape = (census.modules[child].class_name, census.signature(child))
        if runs and runs[-1][1] == shape and census.modules[child].listed:
            runs[-1][0].append(child)
        else:
            runs.append(([child], shape))
    children = []
    for same, _ in runs:
        first, last = same[0].rpartition(".")[2], same[-1].rpartition(".")[2]
        label = first if len(same) == 1 else f"{first}-{last}"
        children.append(_branch(census, same[0], label, len(same), wrapped))
    return Branch(name, kind, count, census.size(path), bool(path) and kind in wrapped, tuple(children))


def places(anatomy: Anatomy, names: Iterable[str]) -> tuple[Place, ...]:
    """Return where classes are defined, found in the sources as text: nothing is imported."""
    places = []
    for name in names:
        module = anatomy.class_modules.get(name, "")
        file = _source(module)
        places.append(Place(name, module, str(file) if file else None, _line(file, name) if file else None))
    return tuple(places)


def _source(module: str) -> Path | None:
    top, *rest = module.split(".")
    try:
        spec = find_spec(top) if top else None
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    if not rest:
        return Path(spec.origin) if spec.origin else None
    for folder in spec.submodule_search_locations or ():
        base = Path(folder).joinpath(*rest)
        for candidate in (base.with_suffix(".py"), base / "__init__.py"):
            if candidate.is_file():
                return candidate
    return None


def _line(file: Path, name: str) -> int | None:
    pattern = re.compile(rf"class {re.escape(name)}\b")
    try:
        with file.open(encoding="utf-8") as stream:
            return next((number for number, line in enumerate(stream, 1) if pattern.match(line)), None)
    except OSError:
        return None
