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

from fsdptool.errors import ModelError
from fsdptool.families.protocol import WrapHint
from fsdptool.inspection.census import CONTAINERS, Census
from fsdptool.inspection.wrap_classes.search import BlockSearch, among_experts, find_blocks, kept_classes
from fsdptool.records.anatomy import WrapCandidate, WrapChoice, WrapOrigin, WrapReason
from fsdptool.spelling import did_you_mean


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
    search = find_blocks(census, barred)
    classes, dropped = kept_classes(search)
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


def _structural_reasons(
    search: BlockSearch, classes: list[str], dropped: Mapping[str, WrapReason]
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
    if any(among_experts(path) for path in paths):
        return "expert", "one expert of a mixture: as units, experts would be gathered one by one"
    if len(paths) == 1:
        return "once", "occurs once"
    signatures = Counter(census.signature(path) for path in paths)
    if max(signatures.values()) < 2:
        return "different_each", f"{len(paths)} instances, no two with the same shapes"
    if prefixes and any(path.startswith(prefixes) for path in paths):
        return "inside_block", "is inside a selected block in most places"
    return "unlisted", f"{len(paths)} instances, but not side by side"
