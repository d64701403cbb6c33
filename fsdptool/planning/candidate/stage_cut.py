"""One stage of a pipeline as a model of its own: consecutive blocks of the stack, and what lies around it.

The first stage holds what forward runs before the blocks, the last one what it runs after them. A stage's
trace is the whole model's with only the work and the tensors of its part, and with as many copies of the
traced blocks as the stage has. A tensor that comes from the neighbour belongs to the stage, too: it is what
the stage receives.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fsdptool.errors import PlanError
from fsdptool.planning.time.step_time import owners_of
from fsdptool.records.anatomy import Parameter
from fsdptool.records.sharding import Unit, UnitPlan
from fsdptool.records.trace import Repeat, Trace

_BEFORE = -1
_AFTER = 1 << 30


@dataclass(frozen=True, slots=True)
class VirtualStage:
    """A virtual stage: blocks ``first`` to ``last`` (exclusive) of ``total`` in the list ``stack``."""

    stack: str
    first: int
    last: int
    total: int

    @property
    def blocks(self) -> int:
        """Number of its blocks."""
        return self.last - self.first

    def holds(self, place: int) -> bool:
        """Whether a block of the real model, or what precedes or follows all of them, is its own."""
        if place == _BEFORE:
            return self.first == 0
        return self.last == self.total if place == _AFTER else self.first <= place < self.last


def find_stack(units: UnitPlan, trace: Trace) -> tuple[str, int]:
    """Return path and length of the one list of blocks that a pipeline can divide.

    Raises:
        PlanError: The model has no list of blocks, or several.
    """
    modules = [module for unit in units.units if unit.kind == "block" for module in unit.modules]
    stacks = {module.rpartition(".")[0] for module in modules if module.rpartition(".")[2].isdigit()}
    stacks |= {repeat.path for repeat in trace.repeats}
    if len(stacks) != 1 or not all(module.rpartition(".")[2].isdigit() for module in modules):
        found = f"it has {', '.join(sorted(stacks))}" if stacks else "no list of wrapped blocks was found"
        raise PlanError(
            f"pipeline parallelism needs a model with one stack of blocks: {found}", help="leave --pp out"
        )
    (stack,) = stacks
    return stack, len(modules)


def divide(stack: str, total: int, count: int) -> list[VirtualStage]:
    """Return ``count`` stages of nearly equal depth; the outer ones are the first to have a block less."""
    sizes = [total // count] * count
    order = [*range(1, count - 1), 0]
    for place in order[: total % count]:
        sizes[place] += 1
    starts = [sum(sizes[:place]) for place in range(count)]
    return [
        VirtualStage(stack, start, start + size, total) for start, size in zip(starts, sizes, strict=True)
    ]


def cut_trace(trace: Trace, stage: VirtualStage) -> Trace:
    """Return what one micro-batch does on the ranks of a stage."""
    repeats, kept, _ = _shorten(trace.repeats, stage)
    sides = list(_sides(trace, stage.stack))
    own = [side in kept if side not in (_BEFORE, _AFTER) else stage.holds(side) for side in sides]
    # What is freed after the step belongs to who allocated it.
    own[-1] = False
    alive = {
        abs(event)
        for segment, inside in zip(trace.segments, own, strict=True)
        if inside
        for event in segment.events
    }
    segments = []
    for segment, inside in zip(trace.segments, own, strict=True):
        events = tuple(event for event in segment.events if abs(event) in alive)
        if inside:
            segments.append(replace(segment, events=events))
        else:
            segments.append(type(segment)(segment.marker, segment.path, events))
    return replace(
        trace,
        segments=tuple(segments),
        repeats=repeats,
        gradients={name: number for name, number in trace.gradients.items() if number + 1 in alive},
        evaluation=None,
        sampling=None,
        upper=None,
    )


def cut_units(units: UnitPlan, trace: Trace, stage: VirtualStage) -> UnitPlan:
    """Return the FSDP units of a stage, its blocks numbered as in its trace.

    A parameter with names in two stages, such as a tied embedding, belongs to both.

    Args:
        units: Of the whole model.
        trace: Of the whole model.
        stage: The stage.
    """
    _, _, shift = _shorten(trace.repeats, stage)
    outside = _places(trace, stage.stack)

    def place(name: str) -> int:
        block = _block(name, stage.stack)
        while block is None and name and name not in outside:
            name = name.rpartition(".")[0]
        return block if block is not None else outside.get(name, _BEFORE)

    def moved(name: str) -> str:
        block = _block(name, stage.stack)
        if block is None:
            return name
        rest = name[len(stage.stack) + 1 :].partition(".")[2]
        return f"{stage.stack}.{block - shift}" + (f".{rest}" if rest else "")

    def own(parameters: Sequence[Parameter]) -> tuple[Parameter, ...]:
        return tuple(
            replace(p, fqn=moved(p.fqn), aliases=tuple(map(moved, p.aliases)))
            for p in parameters
            if any(stage.holds(place(name.rpartition(".")[0])) for name in p.names)
        )

    kept: list[Unit] = []
    for unit in units.units:
        parameters = own(unit.parameters)
        if parameters or unit.modules == ("",):
            modules = tuple(moved(path) for path in unit.modules)
            kept.append(replace(unit, modules=modules, parameters=parameters))
    return replace(units, units=tuple(kept), ignored=own(units.ignored))


def sent_bytes(trace: Trace, stack: str) -> int:
    """Return the bytes of hidden states that one rank hands on between two blocks, in one micro-batch.

    They are the largest tensor that forward allocates in a block and a later one frees, or its backward.
    """
    made: dict[int, int] = {}
    largest = 0
    forward = True
    for side, segment in zip(_sides(trace, stack), trace.segments, strict=True):
        forward = forward and segment.marker not in ("loss", "backward")
        if side in (_BEFORE, _AFTER):
            continue
        for event in segment.events:
            if event > 0 and forward:
                made[event] = side
            elif made.get(-event, side) < side:
                largest = max(largest, trace.sizes[-event - 1])
    return largest


def _block(path: str, stack: str) -> int | None:
    digits = path[len(stack) + 1 :].partition(".")[0] if path.startswith(f"{stack}.") else ""
    return int(digits) if digits.isdigit() else None


def _sides(trace: Trace, stack: str) -> Iterator[int]:
    """Yield for every segment the traced block it belongs to, or that it precedes or follows all of them."""
    found = [_block(segment.path, stack) for segment in trace.segments]
    last = max((block for block in found if block is not None), default=0)
    side, backward = _BEFORE, False
    for owner, segment in owners_of(trace):
        if segment.marker in ("loss", "backward"):
            side, backward = _AFTER, backward or segment.marker == "backward"
        block = _block(owner, stack)
        if block is not None:
            side = block
        elif not backward and side == last:
            side = _AFTER
        elif backward and side == 0:
            side = _BEFORE
        yield side


def _places(trace: Trace, stack: str) -> dict[str, int]:
    """Return which modules outside the stack forward enters before the blocks, and which after them."""
    places: dict[str, int] = {}
    for side, segment in zip(_sides(trace, stack), trace.segments, strict=True):
        if segment.marker == "backward":
            break
        if segment.marker == "enter" and _block(segment.path, stack) is None:
            places.setdefault(segment.path, _AFTER if side == _AFTER else _BEFORE)
    return places


def _shorten(repeats: Sequence[Repeat], stage: VirtualStage) -> tuple[tuple[Repeat, ...], range, int]:
    """Return the repeats of a stage, its traced blocks, and by how much its real blocks move to the front.

    A period of unlike blocks is never divided: a stage that begins or ends inside of one is counted with the
    activations of the whole period.
    """
    first, last, shift = stage.first, stage.last, 0
    shortened: list[Repeat] = []
    for repeat in reversed(repeats):
        begin, end, period = repeat.cut - repeat.period, repeat.cut + repeat.skipped, repeat.period
        low = begin + (first - begin) // period * period if begin < first < end else first
        high = begin - (begin - last) // period * period if begin < last < end else last
        inside = max(min(high, end) - max(low, begin), period)
        removed = end - begin - inside
        # A further run of like blocks comes later in the list.
        shortened = [
            replace(item, cut=item.cut - removed, traced=item.traced - removed, total=item.total - removed)
            for item in shortened
        ]
        shortened.append(replace(repeat, total=repeat.total - removed))
        shift += min(max(low - begin, 0), removed)
        first = low - repeat.skipped if low >= end else min(low, begin)
        last = high - repeat.skipped if high > end else repeat.cut if high > begin else high
    return tuple(reversed(shortened)), range(first, last), shift
