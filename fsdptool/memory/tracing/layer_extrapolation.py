"""Reduced depth: like blocks are traced a few times and stand for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from fsdptool.memory.simulation.program import program
from fsdptool.records.trace import Repeat, Trace

_LONGEST_PERIOD = 12
_LONGEST_PREFIX = 8
_COUNTERS = ("idx", "index", "layer_id", "layer_number", "depth")


@dataclass(frozen=True, slots=True)
class Shortened:
    """One list that was cut: blocks ``[cut, cut + total - traced)`` of the real list are missing."""

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
    shortened = []
    for path, blocks in _lists(model, ""):
        signatures = [_signature(block) for block in blocks]
        pattern = _pattern(signatures)
        if pattern is None:
            continue
        skipped = (pattern.length // pattern.period - periods) * pattern.period
        if skipped <= 0:
            continue
        cut = pattern.prefix + pattern.period * (periods - 1)
        total = len(blocks)
        keep = [block for i, block in enumerate(blocks) if not cut <= i < cut + skipped]
        parent = model.get_submodule(path.rpartition(".")[0])
        setattr(parent, path.rpartition(".")[2], nn.ModuleList(keep))
        _cut_configurations(model, total, cut, skipped)
        shortened.append(Shortened(path, pattern.period, cut, len(keep), total))
    return tuple(shortened)


def lengthened(trace: Trace, shortened: Sequence[Shortened], totals: dict[str, int] | None = None) -> Trace:
    """Return ``trace`` with its lists declared to be of their real length.

    Args:
        trace: Of the shortened model.
        shortened: What was cut.
        totals: Other lengths, by path (to predict another depth).
    """
    totals = totals or {}
    repeats = tuple(Repeat(s.path, s.period, s.traced, totals.get(s.path, s.total), s.cut) for s in shortened)
    return replace(trace, repeats=repeats)


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


def _lists(module: nn.Module, prefix: str) -> Iterator[tuple[str, list[nn.Module]]]:
    for name, child in module.named_children():
        path = f"{prefix}{name}"
        if isinstance(child, nn.ModuleList) and _pattern([_signature(b) for b in child]) is not None:
            yield path, list(child)
        else:
            yield from _lists(child, f"{path}.")


def _pattern(signatures: Sequence[Any]) -> _Pattern | None:
    """Return the repetition that leaves the fewest blocks to trace at four periods, or None."""
    best: tuple[int, _Pattern] | None = None
    count = len(signatures)
    for period in range(1, min(_LONGEST_PERIOD, count // 2) + 1):
        for prefix in range(min(_LONGEST_PREFIX, count) + 1):
            end = prefix + period
            while end < count and signatures[end] == signatures[end - period]:
                end += 1
            length = end - prefix
            kept = count - (length // period - 4) * period
            if length // period > 4 and (best is None or kept < best[0]):
                best = kept, _Pattern(prefix, period, length)
    return best[1] if best else None


def _signature(block: nn.Module) -> Any:
    parts: list[Any] = []
    for path, module in block.named_modules():
        parts.append((path, type(module), "forward" in vars(module)))
        parts += [(name, _plain(name, value)) for name, value in vars(module).items()]
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
        return None if any(word in name for word in _COUNTERS) else value
    if isinstance(value, float):
        # Drop-path rates grow with depth: only whether there is any matters.
        return value != 0.0
    return None


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
