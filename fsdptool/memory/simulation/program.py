"""A trace cut at the module boundaries that matter to one unit plan, at full depth. Torch-free.

Everything between two boundaries becomes one piece: its net change by kind, and how high it rises on
the way. A simulation then costs a few steps per unit instead of every event. Blocks that were not
traced take the pieces of the period that stands for them, each event of it, never a maximum.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fsdptool.memory.simulation.collective_bytes import pinned, rounded
from fsdptool.memory.simulation.ledger import Body
from fsdptool.records.trace import KINDS, Marker, Repeat, Trace

GRADIENT = KINDS.index("gradient")
OFFLOADED = KINDS.index("offloaded")
_ALWAYS = ("start", "loss", "backward", "end")
_KEPT = 32


@dataclass(frozen=True, slots=True)
class Piece:
    """A boundary and what follows it. ``path`` and ``gradients`` carry the real model's names."""

    marker: Marker
    path: str
    body: Body
    gradients: tuple[tuple[str, int], ...]
    copy: int = 0
    """0: traced as it is; ``c``: stands ``c`` periods after the one that was traced."""


_programs: OrderedDict[tuple[int, frozenset[str], int], tuple[Trace, list[Piece]]] = OrderedDict()


def program(trace: Trace, modules: frozenset[str], grain: int) -> list[Piece]:
    """Return the pieces of ``trace`` between the boundaries of ``modules``, at full depth.

    Args:
        trace: A trace that is ``known``.
        modules: Real module paths that are (part of) units.
        grain: Bytes the allocator rounds to.
    """
    key = (id(trace), modules, grain)
    if key in _programs:
        _programs.move_to_end(key)
        return _programs[key][1]
    units = {traced_path(path, trace.repeats) for path in modules}
    # Blocks that were not traced are copies of pieces: each block is pieces of its own, a unit or not.
    blocks = {f"{repeat.path}.{index}" for repeat in trace.repeats for index in range(repeat.traced)}
    pieces = list(_expand(_cut(trace, units | blocks, grain), trace.repeats))
    # The trace is kept with its pieces, so that its id cannot be given to another one.
    _programs[key] = (trace, pieces)
    while len(_programs) > _KEPT:
        _programs.popitem(last=False)
    return pieces


def _cut(trace: Trace, boundaries: set[str], grain: int) -> list[Piece]:
    names = {number: fqn for fqn, number in trace.gradients.items()}
    sizes = [
        pinned(size) if kind == OFFLOADED else rounded(size, grain)
        for size, kind in zip(trace.sizes, trace.kinds, strict=True)
    ]
    starts = [
        i for i, s in enumerate(trace.segments) if i == 0 or s.marker in _ALWAYS or s.path in boundaries
    ]
    pieces = []
    for first, last in zip(starts, [*starts[1:], len(trace.segments)], strict=True):
        body = _body(trace, first, last, sizes, names)
        head = trace.segments[first]
        pieces.append(Piece(head.marker, head.path, body, body.gradients))
    return pieces


def _body(trace: Trace, first: int, last: int, sizes: list[int], names: dict[int, str]) -> Body:
    kinds = trace.kinds
    net = [0] * len(KINDS)
    at_peak = list(net)
    level = peak = 0
    gradients = []
    events: list[int] = []
    for segment in trace.segments[first:last]:
        for event in segment.events:
            if event > 0:
                number = event - 1
                size = sizes[number]
                net[kinds[number]] += size
                if kinds[number] == OFFLOADED:
                    continue
                events.append(event)
                level += size
                if level > peak:
                    peak, at_peak = level, list(net)
                if kinds[number] == GRADIENT and number in names:
                    gradients.append((names[number], size))
            else:
                number = -event - 1
                net[kinds[number]] -= sizes[number]
                if kinds[number] != OFFLOADED:
                    events.append(event)
                    level -= sizes[number]
    return Body(tuple(events), tuple(net), level, peak, tuple(at_peak), tuple(gradients))


def _expand(pieces: list[Piece], repeats: tuple[Repeat, ...]) -> Iterator[Piece]:
    """Put the copies where their period was traced, in every pass over the list."""
    for repeat in repeats:
        pieces = list(_expand_one(pieces, repeat))
    yield from pieces


def _expand_one(pieces: list[Piece], repeat: Repeat) -> Iterator[Piece]:
    template = [i for i, piece in enumerate(pieces) if _in_template(piece.path, repeat)]
    runs: list[list[int]] = []
    for index in template:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    begins = {run[0]: run for run in runs}
    index = 0
    while index < len(pieces):
        run = begins.get(index)
        if run is None:
            yield _moved(pieces[index], repeat)
            index += 1
            continue
        here = [pieces[i] for i in run]
        upwards = _goes_up(pieces, run, repeat)
        for copy in range(repeat.copies + 1) if upwards else range(repeat.copies, -1, -1):
            for piece in here:
                yield _renamed(piece, repeat, copy)
        index = run[-1] + 1


def _in_template(path: str, repeat: Repeat) -> bool:
    block = block_index(path, repeat)
    return block is not None and repeat.cut - repeat.period <= block < repeat.cut


def _goes_up(pieces: list[Piece], run: list[int], repeat: Repeat) -> bool:
    for index in range(run[-1] + 1, len(pieces)):
        block = block_index(pieces[index].path, repeat)
        if block is not None:
            return block >= repeat.cut
    return pieces[run[0]].marker in ("enter", "leave")


def _moved(piece: Piece, repeat: Repeat) -> Piece:
    block = block_index(piece.path, repeat)
    if block is None and not piece.gradients:
        return piece
    return Piece(
        piece.marker,
        _at(piece.path, repeat, None),
        piece.body,
        tuple((_at(name, repeat, None), size) for name, size in piece.gradients),
        piece.copy,
    )


def _renamed(piece: Piece, repeat: Repeat, copy: int) -> Piece:
    return Piece(
        piece.marker,
        _at(piece.path, repeat, copy),
        piece.body,
        tuple((_at(name, repeat, copy), size) for name, size in piece.gradients),
        copy or piece.copy,
    )


def _at(path: str, repeat: Repeat, copy: int | None) -> str:
    """Return the real path of a traced one; ``copy`` moves the template's blocks further."""
    block = block_index(path, repeat)
    if block is None:
        return path
    if copy is not None and repeat.cut - repeat.period <= block < repeat.cut:
        return _with_index(path, repeat, block + copy * repeat.period)
    return _with_index(path, repeat, repeat.real_index(block))


def _with_index(path: str, repeat: Repeat, index: int) -> str:
    prefix = f"{repeat.path}."
    rest = path[len(prefix) :].partition(".")[2]
    return f"{prefix}{index}.{rest}" if rest else f"{prefix}{index}"


def block_index(path: str, repeat: Repeat) -> int | None:
    """Return the index in ``repeat``'s list of the block that holds ``path``, or None."""
    prefix = f"{repeat.path}."
    if not path.startswith(prefix):
        return None
    digits = path[len(prefix) :].partition(".")[0]
    return int(digits) if digits.isdigit() else None


def traced_path(path: str, repeats: Sequence[Repeat]) -> str:
    """Return the path in the traced model that stands for a real one."""
    # A list with several runs of like blocks was lengthened run by run: the way back is the reverse.
    for repeat in reversed(repeats):
        index = block_index(path, repeat)
        if index is None:
            continue
        if index >= repeat.cut + repeat.skipped:
            index -= repeat.skipped
        elif index >= repeat.cut:
            index = repeat.cut - repeat.period + (index - repeat.cut) % repeat.period
        path = _with_index(path, repeat, index)
    return path
