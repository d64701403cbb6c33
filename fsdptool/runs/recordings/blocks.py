"""Which call of a model's block made an activation, by the order of the lines in the stacks. Torch-free.

Stacks name lines, not modules: all blocks that a loop calls have the same lines. But they run one after
another, so a block begins where the first line of its ``forward`` comes again after others. The number of a
call is therefore inferred; its bytes are those of the recorded blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from fsdptool.records.snapshot import BlockActivations, Part
from fsdptool.runs.recordings.stacks import Line, Stacks

_MOST = 1000

Path = tuple[Line | None, ...]
"""Lines from the outermost ``forward`` to the one that allocated, and None, which is where they end."""


@dataclass(slots=True)
class _Place:
    """What was seen at one depth below the same lines.

    Attributes:
        first: The line that came first.
        moved: Whether another one followed it.
        calls: How often the first line came again after others.
    """

    first: Line | None
    moved: bool = False
    calls: int = 0


@dataclass(frozen=True, slots=True)
class _Made:
    """Where a live activation was allocated: its lines, the calls at each depth, and the forward pass."""

    lines: Path
    calls: tuple[int, ...]
    passed: int


def activations_by_block(
    allocations: Iterable[tuple[int, object]], sizes: Mapping[int, int], stacks: Stacks
) -> tuple[BlockActivations, ...]:
    """Return the live activations of each call of a block, in the order of the calls.

    Args:
        allocations: Identity of the block in memory, and stack, of every allocation in their order.
        sizes: Bytes of the activations that are live, by identity.
        stacks: Reads the stacks.

    Returns:
        An entry for each call that holds anything, and for each line of the model before and after the calls;
        nothing where no line calls a block several times.
    """
    path: Path = ()
    places: list[_Place] = []
    passes = 0
    repeated: set[Path] = set()
    made: dict[int, _Made] = {}
    for identity, frames in allocations:
        new = stacks.forward_lines(frames)
        if not new:
            # The loss, the backward pass or the optimizer: the forward pass has ended.
            passes += bool(path)
            path, places = (), []
            continue
        depth = _advance(path, new, places)
        path = new
        if depth and places[depth].calls:
            repeated.add(new[:depth])
        if identity in sizes:
            made[identity] = _Made(new, tuple(place.calls for place in places), passes)
    return tuple(_grouped(made, repeated, sizes))


def _grouped(
    made: Mapping[int, _Made], repeated: Set[Path], sizes: Mapping[int, int]
) -> Iterator[BlockActivations]:
    """Yield the activations of each call, and those of the lines before and after the calls."""
    groups: dict[tuple[Part, int | None, Line], list[int]] = {}
    begun: set[int] = set()
    for identity, item in made.items():
        depth = next((depth for depth in range(1, len(item.lines)) if item.lines[:depth] in repeated), 0)
        part: Part = "block" if depth else "after" if item.passed in begun else "before"
        # Decorators of libraries have names of their own, such as ``wrapper``.
        named = (line for line in item.lines if line is not None and line[2] == "forward")
        line = item.lines[depth - 1] if depth else next(named, item.lines[0])
        if line is None:
            continue
        if depth:
            begun.add(item.passed)
        key = part, item.calls[depth] if depth else None, line
        groups.setdefault(key, []).append(sizes[identity])
    if begun:
        for (part, call, line), found in list(groups.items())[:_MOST]:
            yield BlockActivations(part, call, *line, sum(found), len(found))


def _advance(path: Path, new: Path, places: list[_Place]) -> int:
    """Follow the lines from one allocation to the next one; return the depth at which they differ."""
    if path == new:
        return 0
    depth = next((at for at, (old, line) in enumerate(zip(path, new, strict=False)) if old != line), 0)
    del places[depth + 1 :]
    if depth < len(places):
        place = places[depth]
        if place.moved and new[depth] == place.first:
            place.moved = False
            place.calls += 1
        else:
            place.moved = True
    places.extend(_Place(line) for line in new[len(places) :])
    return depth
