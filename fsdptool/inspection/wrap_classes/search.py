"""The structural search for blocks: classes that repeat, and stages and wrappers around them. Torch-free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

from fsdptool.inspection.census import CONTAINERS, Census
from fsdptool.records.anatomy import WrapReason

STAGE_SHARE = 0.80
"""A class is stepped through if the blocks inside it hold at least this share of it."""
LOOSE_STAGE_SHARE = 0.50
"""The same for a class of which no two instances are alike: the blocks inside it are preferred."""
LEAST_SHARE = 0.005
"""Blocks below this share of the model are not worth a collective of their own."""
LIST_SHARE = 0.20
"""A list of one class counts as repetition without two alike if it holds this share of the model."""
HELPER_SHARE = 0.05
"""Repeated classes without inner structure below this share are helpers beside real blocks."""


@dataclass(slots=True)
class BlockSearch:
    """The classes that repeat, and which instances of them are blocks."""

    census: Census
    candidates: dict[str, float]
    """Class to the share that blocks inside it must hold to make it a stage."""
    attributes: Collection[str]
    """Those of them that repeat as attributes only."""
    chosen: dict[str, list[str]] = field(default_factory=dict)
    """Class to the outermost instances found by descending from the root."""
    through: set[str] = field(default_factory=set)
    """Classes that were stepped through."""
    after_stage: set[str] = field(default_factory=set)


def find_blocks(census: Census, barred: Collection[str]) -> BlockSearch:
    """Return what descending from the root finds, classes in ``barred`` apart."""
    shares = {name: share for name, share in _candidates(census).items() if name not in barred}
    attributes = _attribute_candidates(census) - shares.keys() - set(barred)
    search = BlockSearch(census, shares | dict.fromkeys(attributes, STAGE_SHARE), attributes)
    _descend(search, "", False)
    return search


def _candidates(census: Census) -> dict[str, float]:
    """Return the classes that repeat side by side, with the share at which each is a stage."""
    shares: dict[str, float] = {}
    for name, paths in census.by_class.items():
        if name in CONTAINERS:
            continue
        listed = [
            path
            for path in paths
            if census.modules[path].listed and not census.is_leaf(path) and not among_experts(path)
        ]
        if len(listed) < 2:
            continue
        signatures = Counter(census.signature(path) for path in listed)
        if max(signatures.values()) >= 2:
            shares[name] = STAGE_SHARE
        elif _fills_a_list(census, listed):
            shares[name] = LOOSE_STAGE_SHARE
    return shares


def _fills_a_list(census: Census, listed: list[str]) -> bool:
    """Whether a list of one class, no two alike, is a large part of the model.

    A hybrid of few layers (Nemotron-H by default) has one layer of each kind, all of one class.
    """
    if census.union(listed) < LIST_SHARE * census.total:
        return False
    lists = {census.parent(path) for path in listed}
    return any(
        len(census.inner(path)) >= 2
        and {census.modules[item].class_name for item in census.inner(path)}
        == {census.modules[listed[0]].class_name}
        for path in lists
    )


def _attribute_candidates(census: Census) -> set[str]:
    """Return the classes of which a module holds several as attributes, at least two of them alike.

    ``self.block0 = Block()``, ``self.block1 = Block()`` repeat as a list of them does.
    """
    return {
        name
        for name, paths in census.by_class.items()
        if name not in CONTAINERS
        for parent in {census.parent(path) for path in paths if not among_experts(path)}
        if _attributes(census, parent, name)
    }


def _attributes(census: Census, parent: str, name: str) -> list[str]:
    """Return the instances of a class that one module holds as attributes, if two of them are alike."""
    if name in CONTAINERS or census.modules[parent].class_name in CONTAINERS:
        return []
    siblings = [
        path
        for path in census.inner(parent)
        if census.modules[path].class_name == name and not census.is_leaf(path)
    ]
    signatures = Counter(census.signature(path) for path in siblings)
    return siblings if max(signatures.values(), default=0) >= 2 else []


def among_experts(path: str) -> bool:
    """Return whether a module is one of a list of experts."""
    return "expert" in path.rpartition(".")[0].rpartition(".")[2].lower()


def _descend(search: BlockSearch, path: str, stepped: bool) -> None:
    census = search.census
    for child in census.inner(path):
        name = census.modules[child].class_name
        if name in search.candidates and not among_experts(child):
            if name in search.attributes and _holds_blocks(search, child):
                search.through.add(name)
                _descend(search, child, True)
            elif only := _wrapped(search, child):
                search.through.add(name)
                inner = census.modules[only].class_name
                search.chosen.setdefault(inner, []).append(only)
                search.after_stage.add(inner)
            elif _is_stage(search, child):
                search.through.add(name)
                _descend(search, child, True)
            else:
                search.chosen.setdefault(name, []).append(child)
                if stepped:
                    search.after_stage.add(name)
        elif not among_experts(child):
            _descend(search, child, stepped)


def _wrapped(search: BlockSearch, path: str) -> str | None:
    """Return the one child that is all of ``path``, if it is a block and not a list."""
    census = search.census
    inner = census.inner(path)
    if len(inner) != 1 or census.owned.get(path) or census.is_leaf(inner[0]) or census.is_flat(inner[0]):
        return None
    return inner[0] if census.modules[inner[0]].class_name not in CONTAINERS else None


def _is_stage(search: BlockSearch, path: str) -> bool:
    census = search.census
    share = search.candidates[census.modules[path].class_name]
    blocks: list[str] = []
    for child in census.inner(path):
        if census.modules[child].class_name not in CONTAINERS:
            continue
        items = census.inner(child)
        names = {census.modules[item].class_name for item in items}
        if len(names) == 1 and names <= search.candidates.keys() and not any(among_experts(i) for i in items):
            blocks += items
    for child in census.inner(path):
        if child in _numbered(census, path, census.modules[child].class_name):
            blocks.append(child)
    return bool(blocks) and census.union(blocks) >= share * census.size(path)


def _holds_blocks(search: BlockSearch, path: str) -> bool:
    """Say whether an attribute is a stage or a tower: blocks, however deep, are half of it, tables apart."""
    census = search.census
    tables = [
        item for item, module in census.modules.items() if module.embedding and item.startswith(f"{path}.")
    ]
    blocks = census.union(_blocks_below(search, path))
    return blocks > 0 and blocks >= LOOSE_STAGE_SHARE * (census.size(path) - census.union(tables))


def _blocks_below(search: BlockSearch, path: str) -> list[str]:
    """Return the outermost repetitions inside a module: in lists, or as numbered attributes."""
    census = search.census
    blocks: list[str] = []
    for child in census.inner(path):
        module = census.modules[child]
        listed = module.listed and module.class_name in search.candidates and not census.is_leaf(child)
        if listed or child in _numbered(census, path, module.class_name):
            blocks.append(child)
        elif not among_experts(child):
            blocks += _blocks_below(search, child)
    return blocks


def _numbered(census: Census, parent: str, name: str) -> list[str]:
    """Return attributes that only a number tells apart, three or more: not the two attentions of a layer."""
    siblings = _attributes(census, parent, name)
    stems = {path.rpartition(".")[2].rstrip("0123456789") for path in siblings}
    return siblings if len(siblings) >= 3 and len(stems) == 1 else []


def kept_classes(search: BlockSearch) -> tuple[list[str], dict[str, WrapReason]]:
    """Return the classes worth wrapping, the largest first, and why others were dropped."""
    census = search.census
    shares = {name: census.union(paths) / max(census.total, 1) for name, paths in search.chosen.items()}
    largest = max(shares.values(), default=0.0)
    structured = any(
        not census.is_flat(paths[0]) and shares[name] >= HELPER_SHARE for name, paths in search.chosen.items()
    )
    dropped: dict[str, WrapReason] = {}
    for name, paths in search.chosen.items():
        if len(paths) < 2:
            dropped[name] = "once"
        elif shares[name] < LEAST_SHARE:
            dropped[name] = "too_small"
        elif shares[name] < largest and census.is_flat(paths[0]):
            small = shares[name] < HELPER_SHARE and (structured or shares[name] < largest / 10)
            if small or len(census.parts(paths[0])) == 1:
                dropped[name] = "helper"
    kept = [name for name in search.chosen if name not in dropped]
    return sorted(kept, key=lambda name: (-shares[name], name)), dropped
