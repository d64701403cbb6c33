"""What a plan says beside its verdict: the offers, the mesh, the routing, the stages, and what was tried."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from fsdptool.records.anatomy import ReferenceKind
from fsdptool.records.annotations import Count, Positive
from fsdptool.records.trace import Basis

PipelineSchedule = Literal["1f1b", "interleaved"]


@dataclass(frozen=True, slots=True)
class PlannedModel:
    """What a reference resolved to, as far as a plan depends on it; None is unknown.

    Attributes:
        reference, kind, revision: How the model was named.
        family, flavour, class_, library, component: What it resolved to.
        parameters: Exact number of unique parameters.
        config_digest: Digest of its configuration.
    """

    reference: str = ""
    kind: ReferenceKind | None = None
    revision: str | None = None
    family: str | None = None
    flavour: str | None = None
    class_: str | None = None
    library: str | None = None
    component: str | None = None
    parameters: Count | None = None
    config_digest: str | None = None


@dataclass(frozen=True, slots=True)
class StoredDtypes:
    """The dtypes that shards are kept in, by the number of elements, the largest share first.

    Attributes:
        trained, frozen: Of trained and of frozen parameters; empty where there are none.
        compute: Of gathered parameters, where it is one for all; else empty.
    """

    trained: tuple[str, ...] = ()
    frozen: tuple[str, ...] = ()
    compute: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedOffer:
    """A cluster, its best candidate and what that costs, in the currency of the price; None is unknown.

    Attributes:
        name: What the cluster file calls it, else ``cluster``.
        cluster: Its hardware in a phrase.
        candidate: Id of the best candidate; None where none fits.
        price_per_hour: Of the whole cluster.
        price_per_million_tokens: At the candidate's throughput.
        price_per_run, run_seconds: Of all steps, where the recipe gives their number.
    """

    name: str
    cluster: str
    candidate: str | None
    price_per_hour: float | None = None
    price_per_million_tokens: float | None = None
    price_per_run: float | None = None
    run_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class TriedSettings:
    """The largest micro-batch that fits with some settings; all figures are None where none fits."""

    checkpointing: str
    reshard_after_forward: bool | int
    micro_batch: Positive | None
    accumulation: Positive | None
    device_total_bytes: int | None
    samples_per_second: float | None
    tokens_per_second: float | None


@dataclass(frozen=True, slots=True)
class LargestBatch:
    """What ``--max-batch`` tried on one cluster.

    Attributes:
        cluster: Index of the cluster in the plan's offers.
        micro_batch: The size that is taken; None where none fits.
        tried: Device bytes by size, of the settings that are taken.
        settings: Every combination of settings that was tried.
    """

    cluster: Count
    micro_batch: Positive | None
    tried: Mapping[str, int | None]
    settings: tuple[TriedSettings, ...] = ()


@dataclass(frozen=True, slots=True)
class ExpertRouting:
    """What the routing of tokens to experts does to memory.

    Attributes:
        experts: Experts that a layer routes tokens to.
        balanced_bytes, worst_case_bytes: Allocated peak with balanced routing and in the worst case; None is
            unknown.
        reason: Why they are equal, differ or are unknown.
        all_to_all_bytes, worst_all_to_all_bytes: What the largest exchange brings to one rank; None without
            expert parallelism.
    """

    experts: Positive
    balanced_bytes: int | None
    worst_case_bytes: int | None
    reason: str
    all_to_all_bytes: int | None = None
    worst_all_to_all_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class MeshGroup:
    """The ranks of one dimension that exchange data, and the nodes that one such group spans."""

    dimension: str
    ranks: Positive
    nodes: Positive


@dataclass(frozen=True, slots=True)
class CommunicationWaits:
    """Seconds per step that nothing hides.

    Attributes:
        group: For sums, all-to-alls and exchanged sequences.
        sharding: For gathers and reductions.
    """

    group: float
    sharding: float


@dataclass(frozen=True, slots=True)
class MeshAlternative:
    """The best candidate of another mesh.

    Attributes:
        dp_replicate, dp_shard, cp, tp, ep: Sizes of the mesh.
        id: Of the candidate.
        fits: Whether it fits with the headroom that a search leaves.
        relative_speed: 1 is the chosen candidate's; None is unknown.
        waits: What its ranks wait for.
    """

    dp_replicate: Positive
    dp_shard: Positive
    cp: Positive
    id: str
    fits: bool
    relative_speed: float | None
    waits: CommunicationWaits
    tp: Positive = 1
    ep: Positive = 1


@dataclass(frozen=True, slots=True)
class MeshChoice:
    """Why the chosen mesh won over the others that were evaluated.

    Attributes:
        groups: Its groups of more than one rank.
        waits: What its ranks wait for.
        alternatives: The best candidate of every other mesh, the fastest first.
    """

    groups: tuple[MeshGroup, ...]
    waits: CommunicationWaits
    alternatives: tuple[MeshAlternative, ...]


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One rank of a pipeline at its peak.

    Attributes:
        blocks: First and last (exclusive) block of each of its virtual stages.
        parameters: Bytes of its shards.
        allocated_bytes: Peak of live bytes.
        activation_bytes: The part of it that is activations.
        in_flight: Micro-batches whose activations it holds.
        micro_batch_seconds: Forward and backward of a micro-batch; None is unknown.
    """

    blocks: tuple[tuple[Count, Count], ...]
    parameters: Count
    allocated_bytes: Count
    activation_bytes: Count
    in_flight: Count
    micro_batch_seconds: float | None


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A pipeline as it is planned.

    Attributes:
        ranks, schedule, virtual: As they were requested.
        micro_batches: Of one step.
        bubble: Idle share of the ideal time.
        bubble_seconds: Idle time of a step; None is unknown.
        sent_bytes: What one rank sends over one boundary, forward, per micro-batch.
        transfer_seconds: Waiting for hidden states and their gradients per step; None is unknown.
        basis: How the figures are known.
        trained: Whether ``train`` can run it.
        stages: Every rank of the pipeline.
    """

    ranks: Positive
    schedule: PipelineSchedule
    virtual: Positive
    micro_batches: Positive
    bubble: float
    bubble_seconds: float | None
    sent_bytes: Count
    transfer_seconds: float | None
    basis: Basis
    trained: bool
    stages: tuple[PipelineStage, ...]


@dataclass(frozen=True, slots=True)
class PlanDetails:
    """Additional facts, never required to read the verdict. Plans of earlier versions lack some of them.

    Attributes:
        asked: Ids of the requested candidates, one per cluster.
        flags: Options of ``plan`` that fix the shown configuration.
        front: Ids on the Pareto front of memory and speed.
        model: What the reference resolved to.
        clusters: The offers' hardware in a phrase each.
        notes: What the figures rest on, one sentence each.
        dtypes: What parameters are stored and computed in.
        wrap_classes: The detected wrap classes.
        adapter: Whether the reference is a PEFT adapter.
        headroom: Share of the memory that a search leaves free.
        offers: The clusters with their prices, in the order they were named.
        states: Bytes that one rank keeps for the model, by kind.
        searched: Number of candidates.
        changes_from: Id of the candidate that the suggestions change.
        max_batch: What ``--max-batch`` tried, by cluster.
        routing: What the routing of tokens to experts does; None without experts.
        mesh: Why the mesh was chosen; None where there was no other.
        pipeline: The stages of a pipeline, or None.
    """

    asked: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()
    front: tuple[str, ...] = ()
    model: PlannedModel = PlannedModel()
    clusters: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    dtypes: StoredDtypes = StoredDtypes()
    wrap_classes: tuple[str, ...] = ()
    adapter: bool = False
    headroom: float | None = None
    offers: tuple[PlannedOffer, ...] = ()
    states: Mapping[str, int] = field(default_factory=dict)
    searched: Count | None = None
    changes_from: str | None = None
    max_batch: tuple[LargestBatch, ...] = ()
    routing: ExpertRouting | None = None
    mesh: MeshChoice | None = None
    pipeline: PipelinePlan | None = None
