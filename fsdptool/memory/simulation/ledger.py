"""Live bytes of one rank by kind, and the moment of their peak."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fsdptool.records.trace import Component

if TYPE_CHECKING:
    from fsdptool.records.run import RunPhase
    from fsdptool.records.trace import Trace

_INDEX = {component: index for index, component in enumerate(Component)}

PARAMETERS = _INDEX[Component.PARAMETERS]
GRADIENTS = _INDEX[Component.GRADIENTS]
OPTIMIZER = _INDEX[Component.OPTIMIZER]
EMA = _INDEX[Component.EMA]
REPLICATED = _INDEX[Component.REPLICATED]
BUFFERS = _INDEX[Component.BUFFERS]
UNSHARDED = _INDEX[Component.UNSHARDED]
GATHER = _INDEX[Component.GATHER]
RESHARDED = _INDEX[Component.RESHARDED]
UNSHARDED_GRADIENTS = _INDEX[Component.UNSHARDED_GRADIENTS]
REDUCE = _INDEX[Component.REDUCE]
ALL_REDUCE = _INDEX[Component.ALL_REDUCE]
INPUTS = _INDEX[Component.INPUTS]
ACTIVATIONS = _INDEX[Component.ACTIVATIONS]
RECOMPUTED = _INDEX[Component.RECOMPUTED]
TEMPORARIES = _INDEX[Component.TEMPORARIES]
OUTPUTS = _INDEX[Component.OUTPUTS]
LOSS = _INDEX[Component.LOSS]
TEACHER = _INDEX[Component.TEACHER]
OPTIMIZER_TEMPORARIES = _INDEX[Component.OPTIMIZER_TEMPORARIES]
WORKSPACES = _INDEX[Component.WORKSPACES]
STAGING = _INDEX[Component.STAGING]
STAGED = _INDEX[Component.STAGED]
OFFLOADED = _INDEX[Component.OFFLOADED]

OF_TRACE = (ACTIVATIONS, RECOMPUTED, TEMPORARIES, OUTPUTS, LOSS, UNSHARDED_GRADIENTS, TEACHER, OFFLOADED)
"""The component of each of the trace's kinds (``records.trace.KINDS``)."""


@dataclass(frozen=True, slots=True)
class Body:
    """What a run of segments does to live bytes.

    Attributes:
        events: What the segments allocate and free on the device, as ``Segment.events`` numbers it.
        net: Change of live bytes by kind; gradients included, never freed by the trace.
        total: Sum of ``net`` but for what is in host memory.
        peak: Highest rise above the start on the way (at least 0).
        at_peak: Change by kind at that point.
        gradients: Traced parameter names whose gradient it makes, with bytes.
    """

    events: tuple[int, ...]
    net: tuple[int, ...]
    total: int
    peak: int
    at_peak: tuple[int, ...]
    gradients: tuple[tuple[str, int], ...]


COPIES = 4
"""The stream on which fsdptool's trainer copies inputs to a GPU."""


@dataclass(frozen=True, slots=True)
class Block:
    """One buffer, or several that live and die together.

    Attributes:
        kind: Its component.
        total: Bytes as the allocator counts them.
        sizes: Bytes of each allocation before rounding.
        stream: 0 compute, 1 all-gather copy-in, 2 reduce-scatter, 3 all-reduce, 4 copies of inputs.
    """

    kind: int
    total: int
    sizes: tuple[int, ...]
    stream: int = 0


@dataclass(frozen=True, slots=True)
class Top:
    """The highest level of a phase: bytes, bytes by kind, and the moment it was reached."""

    total: int
    live: tuple[int, ...]
    moment: str


@dataclass(slots=True)
class Ledger:
    """Counts; a subclass may also write the events down (``replay``).

    ``best``, ``at_best`` and ``peak_moment`` are those of the phase that is being played; after
    :meth:`close` those of the highest one.
    """

    live: list[int] = field(default_factory=lambda: [0] * len(Component))
    total: int = 0
    best: int = 0
    at_best: list[int] = field(default_factory=lambda: [0] * len(Component))
    moment: str = ""
    prefix: str = ""
    """Prefix of every moment's name."""
    peak_moment: str = ""
    timeline: list[tuple[str, int, tuple[int, ...]]] | None = None
    """The total when each moment begins, and what is alive by component; None keeps nothing."""
    source: Trace | None = None
    """The trace whose pieces are being played."""
    phase: RunPhase | None = None
    """None between the phases of a run."""
    whole: RunPhase | None = None
    """While set, everything belongs to this phase: a step that is one phase to its reader."""
    hosted: int = 0
    """Most bytes of activations that were in host memory at a time: no part of ``total``."""
    tops: dict[RunPhase | None, Top] = field(default_factory=dict)
    """The peak of every phase that is over, by name."""

    def begin(self, phase: RunPhase | None) -> None:
        """Let the next phase begin; one that comes again keeps its higher peak."""
        phase = self.whole or phase
        if phase == self.phase:
            return
        self._end()
        self.phase = phase
        self.best, self.at_best, self.peak_moment = self.total, list(self.live), self.moment

    def close(self) -> None:
        """End the last phase and say what was the highest of all."""
        self._end()
        top = max(self.tops.values(), key=lambda top: top.total)
        self.best, self.at_best, self.peak_moment = top.total, list(top.live), top.moment

    def _end(self) -> None:
        known = self.tops.get(self.phase)
        if known is None or self.best > known.total:
            self.tops[self.phase] = Top(self.best, tuple(self.at_best), self.peak_moment)

    def add(self, block: Block) -> None:
        """Allocate."""
        self.live[block.kind] += block.total
        self.total += block.total
        if self.total > self.best:
            self.best = self.total
            self.at_best = list(self.live)
            self.peak_moment = self.moment

    def drop(self, block: Block) -> None:
        """Free."""
        self.live[block.kind] -= block.total
        self.total -= block.total

    def run(self, body: Body, copy: int = 0) -> None:
        """Play a segment of the trace."""
        if self.total + body.peak > self.best:
            self.best = self.total + body.peak
            at_best = list(self.live)
            for kind, change in enumerate(body.at_peak):
                at_best[OF_TRACE[kind]] += change
            self.at_best = at_best
            self.peak_moment = self.moment
        live = self.live
        for kind, change in enumerate(body.net):
            if change:
                live[OF_TRACE[kind]] += change
        self.total += body.total
        if live[OFFLOADED] > self.hosted:
            self.hosted = live[OFFLOADED]

    def note(self, moment: str) -> None:
        """Name the next moment, and record the level before it."""
        self.moment = f"{self.prefix}{moment}"
        if self.timeline is not None:
            self.timeline.append((moment, self.total, tuple(self.live)))
