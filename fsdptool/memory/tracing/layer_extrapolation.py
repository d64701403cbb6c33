"""Reduced depth: like blocks are traced a few times and stand for the rest."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import nn

from fsdptool.memory.simulation.program import program
from fsdptool.records.trace import Repeat, Trace

_LONGEST_PERIOD = 12
_LONGEST_PREFIX = 8
_COUNTERS = ("idx", "index", "layer_id", "layer_number", "depth")
_OF_EVERY_MODULE = frozenset(
    name for name, value in vars(nn.Module()).items() if not isinstance(value, bool) and value is not None
)
"""The tables that every module has; they say nothing of how it behaves."""


@dataclass(frozen=True, slots=True)
class Shortened:
    """One cut: blocks ``[cut, cut + total - traced)`` of a list of ``total`` blocks are missing.

    A list with several runs of like blocks has a cut for each, front to back: what lies before a cut is
    then complete, and each ``total`` is the next one's ``traced``.
    """

    path: str
    period: int
    cut: int
    traced: int
    total: int


@dataclass(frozen=True, slots=True)
class _Pattern:
    prefix: int
    period: int
    length: int
    """Blocks in the periodic part, from ``prefix`` on."""


def shorten(model: nn.Module, periods: int) -> tuple[Shortened, ...]:
    """Cut every long list of like blocks in ``model`` to ``periods`` periods, in place.

    Blocks are alike if class, parameters, buffers, plain attributes (attention kind, window, ...) and
    recomputation agree. Irregular first and last blocks are kept. Per-layer lists in configurations
    are cut alike.
    """
    shortened: list[Shortened] = []
    for path, blocks, signatures in list(_lists(model, "")):
        shortened += _shorten_list(model, path, blocks, signatures, periods)
    return tuple(shortened)


def repeats(model: nn.Module) -> bool:
    """Return whether a model has a list that :func:`shorten` cuts to four periods."""
    return any(True for _ in _lists(model, ""))


@contextmanager
def shortened_to(model: nn.Module, periods: int | None) -> Iterator[tuple[Shortened, ...]]:
    """Cut a model to so many periods, if any, for a run that may change it; then give it back as it was.

    Every module that runs gets its parameters, buffers, hooks and other attributes back, and every
    configuration and list its entries.
    """
    lists = [
        (parent._modules, name, child)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if isinstance(child, nn.ModuleList)
    ]
    configurations = {
        id(config): vars(config)
        for module in model.modules()
        if hasattr(config := getattr(module, "config", None), "__dict__")
    }
    kept = [_contents(attributes) for attributes in configurations.values()]
    try:
        cuts = shorten(model, periods) if periods is not None else ()
        kept += [_contents(vars(module)) for module in model.modules()]
        yield cuts
    finally:
        for attributes, values, containers in kept:
            attributes.clear()
            attributes.update(values)
            for container, content in containers:
                container.clear()
                (container.extend if isinstance(container, list) else container.update)(content)
        for modules, name, child in lists:
            modules[name] = child


def _contents(attributes: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], list[tuple[Any, Any]]]:
    """Return attributes, their values, and the content of those that are dictionaries or lists."""
    containers = [
        (value, value.copy()) for value in attributes.values() if type(value) in (dict, OrderedDict, list)
    ]
    return attributes, dict(attributes), containers


def _shorten_list(
    model: nn.Module, path: str, blocks: Sequence[nn.Module], signatures: Sequence[int], periods: int
) -> Iterator[Shortened]:
    """Cut each run of like blocks in one list; a trace is lengthened in the order of the cuts returned."""
    start, runs = 0, []
    while (pattern := _pattern(signatures[start:])) is not None:
        skipped = (pattern.length // pattern.period - periods) * pattern.period
        cut = start + pattern.prefix + pattern.period * (periods - 1)
        runs.append((pattern.period, cut, max(skipped, 0)))
        start += pattern.prefix + pattern.length
    runs = [run for run in runs if run[2]]
    total = len(blocks)
    keep = [b for i, b in enumerate(blocks) if not any(cut <= i < cut + skipped for _, cut, skipped in runs)]
    if not runs:
        return
    parent = model.get_submodule(path.rpartition(".")[0])
    setattr(parent, path.rpartition(".")[2], nn.ModuleList(keep))
    for _, cut, skipped in reversed(runs):
        _cut_configurations(model, total, cut, skipped)
        total -= skipped
    length = len(keep)
    for period, cut, skipped in runs:
        yield Shortened(path, period, cut, length, length + skipped)
        length += skipped


def missing_periods(shortened: Sequence[Shortened]) -> int | None:
    """Return the periods that were cut, or None if lists differ in their number."""
    missing = {(item.total - item.traced) // item.period for item in shortened}
    return missing.pop() if len(missing) == 1 else None


def inner(shortened: Sequence[Shortened]) -> tuple[Shortened, ...]:
    """Return the cuts one period earlier: two periods follow the one that is then copied.

    What follows a block in forward precedes it in backward, where the first sums of a gradient that every
    block adds to take other memory than the later ones.
    """
    return tuple(replace(item, cut=item.cut - item.period) for item in shortened)


def lengthened(
    trace: Trace,
    shortened: Sequence[Shortened],
    deeper: Sequence[Shortened] | None = None,
    *,
    periods: int = 1,
) -> Trace:
    """Return ``trace`` with its lists declared to be of their real length.

    Args:
        trace: Of the shortened model.
        shortened: What was cut.
        deeper: The same cuts of the model at a greater traced depth, which is then the depth to predict.
        periods: By how many periods that is deeper.
    """
    if deeper is None:
        repeats = [Repeat(s.path, s.period, s.traced, s.total, s.cut) for s in shortened]
        return replace(trace, repeats=tuple(repeats))
    repeats = []
    lengths: dict[str, int] = {}
    missing: dict[str, int] = {}
    for item, other in zip(shortened, deeper, strict=True):
        length = lengths.setdefault(item.path, item.traced)
        lengths[item.path] += item.period * periods
        cut = item.cut - missing.get(item.path, 0)
        missing[item.path] = missing.get(item.path, 0) + other.total - other.traced
        repeats.append(Repeat(item.path, item.period, length, lengths[item.path], cut))
    return replace(trace, repeats=tuple(repeats))


def verified(shallow: Trace, deep: Trace) -> bool:
    """Say whether ``shallow``, declared to be as deep as ``deep``, predicts it event sum by event sum."""
    return _outline(shallow) == _outline(deep)


def _outline(trace: Trace) -> list[Any]:
    boundaries = frozenset(_real(segment.path, trace) for segment in trace.segments)
    return [
        (p.marker, p.path, p.body.net, p.body.peak, p.body.at_peak, sorted(p.gradients))
        for p in program(trace, boundaries, 1)
    ]


def _real(path: str, trace: Trace) -> str:
    from fsdptool.memory.simulation.program import block_index

    for repeat in trace.repeats:
        index = block_index(path, repeat)
        if index is not None:
            prefix = f"{repeat.path}."
            rest = path[len(prefix) :].partition(".")[2]
            path = f"{prefix}{repeat.real_index(index)}" + (f".{rest}" if rest else "")
    return path


def _lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, list[nn.Module], list[int]]]:
    """Yield every list of blocks that repeat: path, blocks, and a number for each block's signature."""
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList):
            blocks = list(child)
            # The search for a pattern compares each block with many others.
            numbers: dict[Any, int] = {}
            signatures = [numbers.setdefault(_signature(block), len(numbers)) for block in blocks]
            if _pattern(signatures) is not None:
                yield path, blocks, signatures
                continue
        yield from _lists(child, f"{path}.")


def _pattern(signatures: Sequence[int]) -> _Pattern | None:
    """Return the repetition that leaves the fewest blocks to trace at four periods, or None.

    Blocks with the same signature are alike.
    """
    best: tuple[int, _Pattern] | None = None
    count = len(signatures)
    for period in range(1, min(_LONGEST_PERIOD, count // 2) + 1):
        # How many blocks from each one on equal the block one period before them.
        equal = [0] * (count + 1)
        for index in range(count - 1, period - 1, -1):
            if signatures[index] == signatures[index - period]:
                equal[index] = equal[index + 1] + 1
        for prefix in range(min(_LONGEST_PREFIX, count - period) + 1):
            length = period + equal[prefix + period]
            kept = count - (length // period - 4) * period
            if length // period > 4 and (best is None or kept < best[0]):
                best = kept, _Pattern(prefix, period, length)
    return best[1] if best else None


def _signature(block: nn.Module) -> Any:
    parts: list[Any] = []
    for path, module in block.named_modules():
        forward = vars(module).get("forward")
        parts.append((path, type(module), forward is not None, getattr(forward, "saved", None)))
        attributes = vars(module).items()
        parts += [(name, _plain(name, value)) for name, value in attributes if name not in _OF_EVERY_MODULE]
        parts += [
            (n, p.shape, p.dtype, p.requires_grad) for n, p in module._parameters.items() if p is not None
        ]
        parts += [(n, b.shape, b.dtype) for n, b in module._buffers.items() if b is not None]
    return tuple(parts)


def _plain(name: str, value: object) -> Any:
    """Return what an attribute says of how a block behaves; tensors and objects say nothing here."""
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int):
        return None if _counts_layers(name) else value
    if isinstance(value, float):
        # Drop-path rates grow with depth: only whether there is any matters.
        return value != 0.0
    return None


@cache
def _counts_layers(name: str) -> bool:
    return any(word in name for word in _COUNTERS)


def _cut_configurations(model: nn.Module, total: int, cut: int, skipped: int) -> None:
    seen: set[int] = set()
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is None or id(config) in seen or not hasattr(config, "__dict__"):
            continue
        seen.add(id(config))
        for name, value in list(vars(config).items()):
            if isinstance(value, list | tuple) and len(value) == total:
                vars(config)[name] = type(value)([*value[:cut], *value[cut + skipped :]])
