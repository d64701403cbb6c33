"""What one micro-batch does to memory and to the arithmetic units, and the components of that memory.

A trace knows nothing of sharding: it records the events of the plain model between the boundaries of
its modules, so that one trace serves every wrap choice, reshard setting and number of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from fsdptool.records.anatomy import Buffer

Profile = Literal["cuda", "cpu"]
"""Device profile whose kernels the trace assumes: they differ in what they save.

See ``docs/explanation/memory-assumptions.md``.
"""

Marker = Literal["start", "enter", "leave", "loss", "backward", "grad_enter", "grad_leave", "end"]

KINDS = ("activation", "recomputed", "temporary", "output", "loss", "gradient", "teacher", "offloaded")
"""What a traced tensor is. ``activation``: kept from forward to backward; ``recomputed``: created again
in backward under activation checkpointing; ``gradient``: of a parameter; ``teacher``: what a
teacher's forward holds, its prediction included; ``offloaded``: kept in host memory for backward."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A matrix product or an attention kernel: what decides its time on a GPU.

    Attributes:
        kind: ``product`` (convolutions included), or attention's forward or backward kernel.
        dtype: Of its first input.
        flops: Floating-point operations; causal attention counts whole, though kernels skip half of it.
        bytes_moved: Bytes read and written.
        head_size: Elements of an attention head; 0 for products.
        queries: Positions per sequence; 0 for products.
        causal: Whether the kernel masks causally by itself.
        fused: Whether attention runs torch's flash kernel (False: the memory-efficient one).
    """

    kind: Literal["product", "attention", "attention_backward"]
    dtype: str
    flops: float
    bytes_moved: int
    head_size: int = 0
    queries: int = 0
    causal: bool = False
    fused: bool = True


@dataclass(frozen=True, slots=True)
class RecomputedCall:
    """One operator call that activation checkpointing runs again in backward.

    Attributes:
        selector: What keeps its output instead, for example ``matmul#3``
            (:func:`fsdptool.records.checkpointing.read_selector`).
        bytes: Memory of its output.
        bytes_moved: Bytes read and written.
        operation: Number in :attr:`Trace.operations` of a matrix product or attention kernel, else None.
    """

    selector: str
    bytes: int
    bytes_moved: int
    operation: int | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """What happens between one module boundary and the next, in program order.

    Attributes:
        marker: The boundary that opens the segment: ``enter`` and ``leave`` of a module's forward,
            ``grad_enter`` when the gradient of its output arrives, ``grad_leave`` when the gradient
            of its inputs is complete; ``start``, ``loss``, ``backward`` and ``end`` of the whole.
        path: Module path in the traced model (block indices are those of the shortened model).
        events: ``+n`` allocates tensor ``n - 1``, ``-n`` frees it.
        flops: Floating-point operations by dtype.
        bytes_moved: Bytes read and written by the segment's operators, products included, views excluded.
        kernels: Operators that launch work, products included, views excluded.
        recomputed: FLOPs (of those in ``flops``) that only repeat forward under activation checkpointing.
        operations: Its matrix products and attention kernels, as numbers of :attr:`Trace.operations`.
        calls: The operators that activation checkpointing runs again here, where their output is new memory.
        summed: Bytes of every tensor that is summed over the tensor-parallel group here.
        gathered: Whole bytes of every tensor that is gathered over that group, or reduced and scattered.
    """

    marker: Marker
    path: str
    events: tuple[int, ...] = ()
    flops: Mapping[str, float] = field(default_factory=dict)
    bytes_moved: int = 0
    kernels: int = 0
    recomputed: float = 0.0
    operations: tuple[int, ...] = ()
    calls: tuple[RecomputedCall, ...] = ()
    summed: tuple[int, ...] = ()
    gathered: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Repeat:
    """A list of like blocks that was traced at reduced depth.

    Block ``i`` of the shortened list stands for block ``i`` of the real one while ``i < cut``, else
    for block ``i + skipped``. The period that ends at ``cut`` is the one to be copied; it was
    checked to do the same as the period before it. A list with several runs of like blocks has a repeat
    for each, to be applied in order: the traced list of one is the whole list of the one before it.

    Attributes:
        path: Path of the list, for example ``model.layers``.
        period: Blocks per period (1 unless block kinds alternate).
        traced: Blocks in the traced model.
        total: Blocks in the real model.
        cut: Index in the traced list before which the copies belong.
    """

    path: str
    period: int
    traced: int
    total: int
    cut: int

    @property
    def skipped(self) -> int:
        """Blocks that were not traced."""
        return self.total - self.traced

    @property
    def copies(self) -> int:
        """Periods that were not traced."""
        return self.skipped // self.period

    def real_index(self, index: int) -> int:
        """Return the real block that traced block ``index`` stands for."""
        return index if index < self.cut else index + self.skipped


@dataclass(frozen=True, slots=True)
class Trace:
    """One micro-batch of one model under one recipe, as the plain, unsharded model runs it.

    Attributes:
        profile: Device profile whose kernels were assumed.
        compute_dtype: dtype of the parameters while computing; of most elements, where they differ.
        segments: The program, at the traced depth.
        sizes: Bytes of every traced tensor, by its number.
        kinds: Index into :data:`KINDS` of every traced tensor.
        names: Index into ``vocabulary`` of every traced tensor: the operator that created it, or the
            parameter it is the gradient of.
        vocabulary: Names.
        repeats: Lists that were shortened; empty when the full depth was traced.
        input_bytes: Sizes of the micro-batch's tensors, which live as long as the step.
        gradients: Parameter (traced path) to the number of its gradient tensor.
        buffers: The real model's buffers: every rank holds them whole.
        teacher: A distillation teacher's forward without gradients, which precedes the student's.
        evaluation: A micro-batch of validation, where the recipe validates: forward and loss without
            gradients.
        sampling: A forward of sampling, where the recipe writes samples.
        tokens: What the objective's weight counts, per micro-batch at most.
        samples: Micro-batch size.
        torch: Version the trace was recorded with.
        model: Class of the traced model.
        unknowns: Why there are no segments, if there are none; otherwise what is uncertain.
        notes: Assumptions worth telling (attention kernel, balanced experts).
        operations: Every kind of matrix product and attention kernel that segments count.
        upper: With compiled blocks, the same micro-batch if nothing inside them were fused.
    """

    profile: Profile
    compute_dtype: str
    segments: tuple[Segment, ...]
    sizes: tuple[int, ...]
    kinds: tuple[int, ...]
    names: tuple[int, ...]
    vocabulary: tuple[str, ...]
    repeats: tuple[Repeat, ...] = ()
    input_bytes: tuple[int, ...] = ()
    gradients: Mapping[str, int] = field(default_factory=dict)
    buffers: tuple[Buffer, ...] = ()
    teacher: Trace | None = None
    evaluation: Trace | None = None
    sampling: Trace | None = None
    tokens: int | None = None
    samples: int = 1
    torch: str = ""
    model: str = ""
    unknowns: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    operations: tuple[Operation, ...] = ()
    upper: Trace | None = None

    @property
    def known(self) -> bool:
        """Whether activations are known."""
        return bool(self.segments)


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
