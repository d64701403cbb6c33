"""The document of ``fsdptool detect``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from fsdptool.records.anatomy import NoSplitEntry, Reference, WrapCandidate, WrapConcern, WrapOrigin
from fsdptool.records.annotations import Count, Keywords, Positive, Share
from fsdptool.records.recipe import Lora
from fsdptool.records.sharding import Layout, UnitKind
from fsdptool.records.tensor_plan import Indivisible, PlanOrigin, SequenceSpan, SplitStyle, WholeReason


@dataclass(frozen=True, slots=True)
class ModelSummary:
    """What the reference resolved to.

    Attributes:
        class_: Class that is built.
        library: ``transformers``, ``diffusers``, or the family's own name.
        family: Registered family name, or ``generic``.
        flavour: Flavour within the family, or null.
        component: Component of a pipeline, or null.
        objective: Default training objective, or null if unknown.
        checkpoint_dtype: dtype the configuration says its weights were saved in, or null.
        adapter: Whether the reference is a PEFT adapter.
    """

    class_: str
    library: str
    family: str
    flavour: str | None
    component: str | None
    objective: str | None
    checkpoint_dtype: str | None
    adapter: bool


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Exact numbers of unique parameters; `tied_saved` is what ties save."""

    total: Count
    trainable: Count
    frozen: Count
    tied_saved: Count
    by_dtype: Mapping[str, Count]
    frozen_fqns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WrapSummary:
    """The wrap classes, the number of units they make, and why one unit dominates, if one does."""

    classes: tuple[str, ...]
    units: Positive
    origin: WrapOrigin
    layout: Layout
    concern_code: WrapConcern | None
    concern: str | None


@dataclass(frozen=True, slots=True)
class ConsideredClass(WrapCandidate):
    """A class that was considered as a wrap class, and whether an instance holds an embedding."""

    holds_embedding: bool


@dataclass(frozen=True, slots=True)
class UnitSummary:
    """One FSDP unit and the parameters it owns."""

    id: str
    kind: UnitKind
    class_: str
    fqns: tuple[str, ...]
    parameters: Count


@dataclass(frozen=True, slots=True)
class LargestUnit:
    """The unit that owns most parameters; `bytes_16bit` is its size in a 16-bit dtype."""

    id: str
    kind: UnitKind
    parameters: Count
    share: Share
    bytes_16bit: Count


@dataclass(frozen=True, slots=True)
class EmbeddingPaths:
    """Paths of the embeddings and of the last norm, or null."""

    input: str | None
    output: str | None
    final_norm: str | None


@dataclass(frozen=True, slots=True)
class Part:
    """A language model, a vision tower, a projector or a head: each parameter is in one part."""

    path: str
    class_name: str
    parameters: Count
    trainable: Count
    share: Share


@dataclass(frozen=True, slots=True)
class FusedExperts:
    """Tensors that hold all experts of a layer; `counts` are the numbers of experts that occur."""

    tensors: Count
    parameters: Count
    share: Share
    counts: tuple[Count, ...]
    largest: Count


@dataclass(frozen=True, slots=True)
class BufferSize:
    """One buffer. Persistent buffers are part of the state dict."""

    fqn: str
    persistent: bool
    bytes: Count
    dtype: str


@dataclass(frozen=True, slots=True)
class Uneven:
    """A parameter whose first dimension is not a multiple of the ranks; padding is over all ranks."""

    fqn: str
    dim0: Count
    padding_bytes: Count
    empty_ranks: Count


@dataclass(frozen=True, slots=True)
class LeafClass:
    """A class that owns parameters directly, with what all its instances own themselves."""

    name: str
    instances: Count
    parameters_total: Count
    share: Share
    paths: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """One module of the tree; `count` equal siblings are folded into the first."""

    name: str
    class_name: str
    count: Positive
    parameters_each: Count
    wrapped: bool
    children: tuple[Branch, ...]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a class is defined. `file` and `line` are null if its source is not available."""

    name: str
    module: str
    file: str | None
    line: int | None


@dataclass(frozen=True, slots=True)
class PlacedParameter:
    """Parameters that differ only in the numbers in their names, and where they lie on a group of ranks.

    Attributes:
        name: Name with ``*`` for every number.
        count: How many there are.
        shape: Global shape.
        local_shape: Shape on one rank.
        style: How their module is split, or null where they stay whole.
        dim: The divided dimension, or null.
        sections: Sizes of the parts of that dimension that are cut separately; empty where they stay whole.
        partial_gradient: Whether the ranks' gradients are summed over the group.
        reason: Why they stay whole, or null.
        origin: Who says how they are split, or null.
    """

    name: str
    count: Positive
    shape: tuple[Count, ...]
    local_shape: tuple[Count, ...]
    style: SplitStyle | None
    dim: Count | None
    sections: tuple[Positive, ...]
    partial_gradient: bool
    reason: WholeReason | None
    origin: PlanOrigin | None


@dataclass(frozen=True, slots=True)
class SplitSummary:
    """How a group of ranks divides the model.

    Attributes:
        size: Ranks of the group.
        parameters: Every distinct parameter.
        local_parameters: Number of parameters on one rank.
        regions: Modules whose input is whole and whose inside is divided, with ``*`` for every number.
        indivisible: What the group does not divide; empty where the model can be split.
        notes: What stays whole although it looks divisible, and findings about the library's own plan.
    """

    size: Positive
    parameters: tuple[PlacedParameter, ...]
    local_parameters: Count
    regions: tuple[str, ...]
    indivisible: tuple[Indivisible, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Detection:
    """What `fsdptool detect --format json` prints. Counts are parameters, bytes are bytes.

    Attributes:
        reference: How the model was named.
        model: What the reference resolved to.
        parameters: Exact numbers of parameters.
        wrap: The wrap classes.
        classes: Every class that was considered as a wrap class.
        no_split_modules: The entries of the model's ``_no_split_modules``, checked.
        repeated_blocks: diffusers' ``_repeated_blocks``.
        fsdp_plan_unmatched: Rules of transformers' own FSDP plan that do not match any module.
        units: Every FSDP unit; the root is last.
        largest_unit: The unit that owns most parameters.
        embeddings: Embeddings and the last norm.
        parts: The subtrees the model consists of.
        experts: Experts in fused tensors, or null.
        ties: Groups of names that share one tensor.
        buffers: Every buffer.
        lora: Settings of the PEFT adapter that the reference is, or null.
        world_size: Number of ranks that ``uneven`` is computed for, or null.
        uneven: Parameters that shard unevenly across the ranks.
        cached: Whether the answer comes from the cache.
        leaves: Classes that own parameters directly (``--leaves``).
        tree: The module tree (``--tree``).
        where: Where the classes are defined (``--where``).
        tensor_parallel: How a tensor-parallel group divides the model (``--tp``), or null.
        sequence_parallel: Where that group divides hidden states along the sequence, too
            (``--sequence-parallel``), or null.
        expert_parallel: How an expert-parallel group divides the experts (``--ep``), or null.
    """

    reference: Reference
    model: ModelSummary
    parameters: ParameterCounts
    wrap: WrapSummary
    classes: tuple[ConsideredClass, ...]
    no_split_modules: tuple[NoSplitEntry, ...]
    repeated_blocks: tuple[str, ...]
    fsdp_plan_unmatched: tuple[str, ...]
    units: tuple[UnitSummary, ...]
    largest_unit: LargestUnit
    embeddings: EmbeddingPaths
    parts: tuple[Part, ...]
    experts: FusedExperts | None
    ties: tuple[Annotated[tuple[str, ...], Keywords(minItems=2)], ...]
    buffers: tuple[BufferSize, ...]
    lora: Lora | None
    world_size: Positive | None
    uneven: tuple[Uneven, ...]
    cached: bool
    leaves: tuple[LeafClass, ...] | None
    tree: Branch | None
    where: tuple[Place, ...] | None
    tensor_parallel: SplitSummary | None = None
    sequence_parallel: SequenceSpan | None = None
    expert_parallel: SplitSummary | None = None
