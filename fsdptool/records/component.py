"""The components of a rank's memory: label, how the bytes are known, and the colour group of charts."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

Basis = Literal["exact", "estimated", "unknown"]
"""How bytes are known: ``exact`` follows from shapes and dtypes, ``estimated`` from a trace or a table."""


class ColourGroup(StrEnum):
    """What charts draw in one colour."""

    STATES = "states"
    GATHERED = "gathered"
    ACTIVATIONS = "activations"
    PASSING = "passing"
    OUTSIDE = "outside"

    @property
    def legend(self) -> str:
        """What the group holds, for a chart's legend."""
        return _LEGEND[self]


_LEGEND = {
    ColourGroup.STATES: "kept between steps",
    ColourGroup.GATHERED: "all-gathered or being reduced",
    ColourGroup.ACTIVATIONS: "kept or recomputed for backward",
    ColourGroup.PASSING: "temporary tensors",
    ColourGroup.OUTSIDE: "outside the model's tensors",
}


class Component(StrEnum):
    """One kind of live bytes, in the order it is shown. The value is the name in documents.

    Attributes:
        basis: How its bytes are known when they are known.
        group: The colour group of charts.
    """

    basis: Basis
    group: ColourGroup

    def __new__(
        cls, label: str, basis: Basis = "estimated", group: ColourGroup = ColourGroup.PASSING
    ) -> Component:
        """Make a member whose value is its label."""
        member = str.__new__(cls, label)
        member._value_ = label
        member.basis = basis
        member.group = group
        return member

    PARAMETERS = "parameters", "exact", ColourGroup.STATES
    GRADIENTS = "gradients", "exact", ColourGroup.STATES
    OPTIMIZER = "optimizer", "exact", ColourGroup.STATES
    EMA = "ema", "exact", ColourGroup.STATES
    REPLICATED = "replicated parameters", "exact", ColourGroup.STATES
    BUFFERS = "buffers", "exact", ColourGroup.STATES
    UNSHARDED = "unsharded parameters", "estimated", ColourGroup.GATHERED
    GATHER = "all-gather buffers", "estimated", ColourGroup.GATHERED
    RESHARDED = "resharded parameters", "estimated", ColourGroup.GATHERED
    UNSHARDED_GRADIENTS = "unsharded gradients", "estimated", ColourGroup.GATHERED
    REDUCE = "reduce-scatter buffers", "estimated", ColourGroup.GATHERED
    ALL_REDUCE = "all-reduce buffers", "estimated", ColourGroup.GATHERED
    INPUTS = "inputs", "estimated", ColourGroup.ACTIVATIONS
    ACTIVATIONS = "activations", "estimated", ColourGroup.ACTIVATIONS
    RECOMPUTED = "recomputed activations", "estimated", ColourGroup.ACTIVATIONS
    TEMPORARIES = "temporaries", "estimated", ColourGroup.PASSING
    OUTPUTS = "outputs", "estimated", ColourGroup.PASSING
    LOSS = "loss", "estimated", ColourGroup.PASSING
    TEACHER = "teacher", "estimated", ColourGroup.PASSING
    OPTIMIZER_TEMPORARIES = "optimizer temporaries", "estimated", ColourGroup.PASSING
    WORKSPACES = "workspaces", "estimated", ColourGroup.OUTSIDE
    STAGING = "gloo staging", "estimated", ColourGroup.GATHERED
    STAGED = "checkpoint staging", "exact", ColourGroup.STATES
    OFFLOADED = "offloaded activations", "estimated", ColourGroup.ACTIVATIONS
    ALLOCATOR_SLACK = "allocator slack", "estimated", ColourGroup.OUTSIDE
    CONTEXT = "context", "estimated", ColourGroup.OUTSIDE
    COMMUNICATORS = "communicators", "estimated", ColourGroup.OUTSIDE
