"""Chooses wrap classes from structure: repetition first, names only as evidence. Torch-free.

The rule (evidence and its errors: docs/explanation/wrap-classes.md): a candidate is a class whose instances
lie side by side, in a ModuleList, Sequential or ModuleDict or as attributes of one module, at least two of
them with the same parameter names and shapes. The outermost candidates are blocks, except that stages
and wrappers are stepped through: a class is a stage if repetitions of one class inside it (experts
apart) hold 80 % of it, and a wrapper if its only child holds all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from fsdptool.errors import ModelError
from fsdptool.families.protocol import WrapHint
from fsdptool.inspection.census import CONTAINERS, Census
from fsdptool.records.anatomy import WrapCandidate, WrapChoice, WrapOrigin, WrapReason
from fsdptool.spelling import did_you_mean

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
class _Search:
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


def choose(
    census: Census,
    *,
    hint: WrapHint | None = None,
    hookless: Collection[str] = (),
) -> WrapChoice:
    """Return the wrap classes of a model and the reason for every class that was considered.

    Args:
        census: The model.
        hint: The family's choice, if it has one.
        hookless: Paths of modules that cannot be units (``Anatomy.hookless``).
    """
    barred = {census.modules[path].class_name for path in hookless}
    shares = {name: share for name, share in _candidates(census).items() if name not in barred}
    attributes = _attribute_candidates(census) - shares.keys() - barred
    search = _Search(census, shares | dict.fromkeys(attributes, STAGE_SHARE), attributes)
    _descend(search, "", False)
    classes, dropped = _keep(search)
    reasons = _structural_reasons(search, classes, dropped)
    for name in barred:
        reasons[name] = ("hookless", "the model runs it without FSDP2's hooks, so it would not be gathered")
    origin: WrapOrigin = "structure"
    if hint is not None and _present(census, hint.classes):
        origin = "hint"
        for name in classes:
            reasons[name] = ("passed_over", f"the family wraps {', '.join(hint.classes)}: {hint.reason}")
        classes = list(hint.classes)
        for name in classes:
            reasons[name] = ("hint", hint.reason)
    return WrapChoice(
        classes=tuple(classes),
        candidates=_describe(census, classes, reasons),
        origin=origin,
    )


def select(choice: WrapChoice, census: Census, wrap: Sequence[str], exclude: Sequence[str]) -> WrapChoice:
    """Return the choice with the user's ``--wrap`` and ``--exclude`` applied.

    Raises:
        ModelError: A class is not in the model, or nothing would be left of an explicit choice.
    """
    for name in (*wrap, *exclude):
        _must_be_live(census, name)
    if both := sorted(set(wrap) & set(exclude)):
        raise ModelError(f"{both[0]} is in both --wrap and --exclude", help="remove it from one of them")
    classes = tuple(dict.fromkeys(wrap)) if wrap else choice.classes
    classes = tuple(name for name in classes if name not in set(exclude))
    if not wrap and not exclude:
        return choice
    reasons = {item.name: (item.reason_code, item.reason) for item in choice.candidates}
    for name in choice.classes:
        if name not in classes:
            given = "excluded by --exclude" if name in exclude else "not selected by --wrap"
            reasons[name] = ("excluded" if name in exclude else "passed_over", given)
    for name in exclude:
        reasons[name] = ("excluded", "excluded by --exclude")
    for name in wrap:
        reasons[name] = ("person", "selected by --wrap")
    return WrapChoice(
        classes=classes,
        candidates=_describe(census, classes, reasons),
        no_split_modules=choice.no_split_modules,
        origin="person",
    )


def _must_be_live(census: Census, name: str) -> None:
    if name in census.by_class:
        if name in CONTAINERS:
            raise ModelError(
                f"{name} cannot be wrapped: fully_shard refuses containers without a forward",
                help="use the class of the blocks inside it",
            )
        return
    root = census.modules[""].class_name
    if name == root:
        raise ModelError(
            f"{name} is the whole model", help="the root is always sharded; use the class of its blocks"
        )
    raise ModelError(
        f"{root} does not contain {name}",
        help=did_you_mean(name, census.by_class) or "`fsdptool detect REF` lists its classes",
    )


def _present(census: Census, classes: Collection[str]) -> bool:
    return bool(classes) and all(name in census.by_class for name in classes)


def _candidates(census: Census) -> dict[str, float]:
    """Return the classes that repeat side by side, with the share at which each is a stage."""
    shares: dict[str, float] = {}
    for name, paths in census.by_class.items():
        if name in CONTAINERS:
            continue
        listed = [
            path
            for path in paths
            if census.modules[path].listed and not census.is_leaf(path) and not _among_experts(path)
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
        for parent in {census.parent(path) for path in paths if not _among_experts(path)}
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


def _among_experts(path: str) -> bool:
    return "expert" in path.rpartition(".")[0].rpartition(".")[2].lower()


def _descend(search: _Search, path: str, stepped: bool) -> None:
    census = search.census
    for child in census.inner(path):
        name = census.modules[child].class_name
        if name in search.candidates and not _among_experts(child):
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
        elif not _among_experts(child):
            _descend(search, child, stepped)


def _wrapped(search: _Search, path: str) -> str | None:
    """Return the one child that is all of ``path``, if it is a block and not a list."""
    census = search.census
    inner = census.inner(path)
    if len(inner) != 1 or census.owned.get(path) or census.is_leaf(inner[0]) or census.is_flat(inner[0]):
        return None
    return inner[0] if census.modules[inner[0]].class_name not in CONTAINERS else None


def _is_stage(search: _Search, path: str) -> bool:
    census = search.census
    share = search.candidates[census.modules[path].class_name]
    blocks: list[str] = []
    for child in census.inner(path):
        if census.modules[child].class_name not in CONTAINERS:
            continue
        items = census.inner(child)
        names = {census.modules[item].class_name for item in items}
        if (
            len(names) == 1
            and names <= search.candidates.keys()
            and not any(_among_experts(i) for i in items)
        ):
            blocks += items
    for child in census.inner(path):
        if child in _numbered(census, path, census.modules[child].class_name):
            blocks.append(child)
    return bool(blocks) and census.union(blocks) >= share * census.size(path)


def _holds_blocks(search: _Search, path: str) -> bool:
    """Say whether an attribute is a stage or a tower: blocks, however deep, are half of it, tables apart."""
    census = search.census
    tables = [
        item for item, module in census.modules.items() if module.embedding and item.startswith(f"{path}.")
    ]
    blocks = census.union(_blocks_below(search, path))
    return blocks > 0 and blocks >= LOOSE_STAGE_SHARE * (census.size(path) - census.union(tables))


def _blocks_below(search: _Search, path: str) -> list[str]:
    """Return the outermost repetitions inside a module: in lists, or as numbered attributes."""
    census = search.census
    blocks: list[str] = []
    for child in census.inner(path):
        module = census.modules[child]
        listed = module.listed and module.class_name in search.candidates and not census.is_leaf(child)
        if listed or child in _numbered(census, path, module.class_name):
            blocks.append(child)
        elif not _among_experts(child):
            blocks += _blocks_below(search, child)
    return blocks


def _numbered(census: Census, parent: str, name: str) -> list[str]:
    """Return attributes that only a number tells apart, three or more: not the two attentions of a layer."""
    siblings = _attributes(census, parent, name)
    stems = {path.rpartition(".")[2].rstrip("0123456789") for path in siblings}
    return siblings if len(siblings) >= 3 and len(stems) == 1 else []


def _keep(search: _Search) -> tuple[list[str], dict[str, WrapReason]]:
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


def _structural_reasons(
    search: _Search, classes: list[str], dropped: Mapping[str, WrapReason]
) -> dict[str, tuple[WrapReason, str]]:
    census = search.census
    reasons: dict[str, tuple[WrapReason, str]] = {}
    for name in classes:
        paths = search.chosen[name]
        share = census.union(paths) / max(census.total, 1)
        where = "in a list" if any(census.modules[path].listed for path in paths) else "side by side"
        text = f"{len(paths)} identical instances {where} hold {share:.1%} of the parameters"
        if name in search.after_stage:
            reasons[name] = ("repeated_in_stages", f"{text}; the enclosing stages hold little else")
        else:
            reasons[name] = ("repeated_block", text)
    for name, code in dropped.items():
        share = census.union(search.chosen[name]) / max(census.total, 1)
        reasons[name] = (code, _dropped_text(code, len(search.chosen[name]), share))
    for name in search.through:
        if name not in reasons:
            reasons[name] = ("stage", "the blocks inside it hold at least 80 % of it")
    return reasons


def _dropped_text(code: WrapReason, count: int, share: float) -> str:
    if code == "too_small":
        return f"{count} instances hold {share:.2%} of the parameters: too little for a collective each"
    if code == "helper":
        return f"no inner structure and {share:.1%} of the parameters: a helper module"
    return "occurs once outside other blocks"


def _describe(
    census: Census, classes: Collection[str], reasons: Mapping[str, tuple[WrapReason, str]]
) -> tuple[WrapCandidate, ...]:
    """Return every class with inner structure, the chosen ones first, then by size."""
    roots = [path for name in classes for path in census.by_class.get(name, ())]
    candidates = []
    for name, paths in census.by_class.items():
        if (
            name not in classes
            and name not in reasons
            and (name in CONTAINERS or all(census.is_leaf(path) for path in paths))
        ):
            continue
        sizes = [census.size(path) for path in paths]
        if not any(sizes) and name not in classes:
            continue
        code, text = reasons.get(name) or _why_left(census, name, paths, roots)
        total = census.union(paths)
        candidates.append(
            WrapCandidate(
                name=name,
                instances=len(paths),
                parameters_each=(min(sizes), max(sizes)),
                parameters_total=total,
                share=total / max(census.total, 1),
                paths=tuple(paths[:5]),
                chosen=name in classes,
                reason_code=code,
                reason=text,
            )
        )
    order = {name: index for index, name in enumerate(classes)}
    return tuple(
        sorted(
            candidates, key=lambda item: (order.get(item.name, len(order)), -item.parameters_total, item.name)
        )
    )


def _why_left(
    census: Census, name: str, paths: Sequence[str], roots: Sequence[str]
) -> tuple[WrapReason, str]:
    prefixes = tuple(f"{path}." for path in roots)
    if prefixes and all(path.startswith(prefixes) for path in paths):
        holder = next(root for root in roots if paths[0].startswith(f"{root}."))
        return "inside_block", f"is inside {census.modules[holder].class_name}"
    if name in CONTAINERS:
        return "container", "a bare container: its class name would match every other container"
    if any(_among_experts(path) for path in paths):
        return "expert", "one expert of a mixture: as units, experts would be gathered one by one"
    if len(paths) == 1:
        return "once", "occurs once"
    signatures = Counter(census.signature(path) for path in paths)
    if max(signatures.values()) < 2:
        return "different_each", f"{len(paths)} instances, no two with the same shapes"
    if prefixes and any(path.startswith(prefixes) for path in paths):
        return "inside_block", "is inside a selected block in most places"
    return "unlisted", f"{len(paths)} instances, but not side by side"
