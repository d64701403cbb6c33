"""The verdict: what every rank will hold, whether it fits, and which configuration to run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import prod
from typing import Annotated, Literal

from fsdptool.records.advice import Shortfall, Suggestion
from fsdptool.records.annotations import Count, Keywords, Positive
from fsdptool.records.checkpointing import POLICY_PATTERN
from fsdptool.records.cluster import Cluster, DeviceProfile, Machine
from fsdptool.records.compilation import Compilation
from fsdptool.records.described_run import DescribedRun, Side
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.fused_loss import FusedLoss, LossTiles, NamedLoss
from fsdptool.records.lengths import LengthsPlan, SampleLengths
from fsdptool.records.mesh import TRAINED
from fsdptool.records.plan_details import PipelineSchedule, PlanDetails, PlannedModel
from fsdptool.records.recipe import GradientAccumulation, Implementation, Recipe
from fsdptool.records.run import RunPhase
from fsdptool.records.sharding import FsdpSettings, Layout, Loading, WrapPolicy
from fsdptool.records.trace import Basis, Component

Verdict = Literal["fits", "does_not_fit", "unknown"]
SearchScope = Literal["none", "open", "wide", "first"]
Preference = Literal["speed", "price"]


@dataclass(frozen=True, slots=True)
class SearchPoint:
    """One point of the search space. Everything else of recipe and settings stays unchanged.

    Attributes:
        cluster: Index of the cluster in the plan's offers.
        layout: Who groups parameters.
        wrap_policy, wrap_classes: The FSDP units; empty classes are the detected ones.
        micro_batch, accumulation: Samples per rank and forward; forwards per step.
        checkpointing: The policy as text, for example ``full`` or ``12*full+20*selective:attention``.
        reshard_after_forward: True, False or a number of ranks.
        dp_replicate, dp_shard, cp, tp: The mesh.
        ep: Ranks over which the experts of a layer are distributed; divides ``dp_shard`` x ``cp`` x ``tp``.
        cpu_offload: Shards, gradients and optimizer in host memory.
        optimizer_implementation: ``auto`` is fused on CUDA.
        prefetch: FSDP units to prefetch.
        reduce_dtype: Gradient reduction dtype; None is the parameters'.
        gradients: ``sharded`` reduces each micro-batch, ``unsharded`` keeps whole gradients.
        sequence_parallel: Whether the tensor-parallel ranks divide norms and residuals along the sequence.
    """

    cluster: Count
    layout: Layout
    wrap_policy: WrapPolicy
    wrap_classes: tuple[str, ...]
    micro_batch: Positive
    accumulation: Positive
    checkpointing: Annotated[str, Keywords(pattern=POLICY_PATTERN)]
    reshard_after_forward: bool | int
    dp_replicate: Positive
    dp_shard: Positive
    cp: Positive
    cpu_offload: bool
    optimizer_implementation: Implementation
    prefetch: Positive
    reduce_dtype: str | None
    gradients: GradientAccumulation
    tp: Positive = 1
    ep: Positive = 1
    sequence_parallel: bool = False

    @property
    def data_parallel(self) -> int:
        """Ranks that see different samples (context- and tensor-parallel ranks share theirs)."""
        return self.dp_replicate * self.dp_shard

    @property
    def ranks(self) -> int:
        """All ranks of the run."""
        return prod(getattr(self, name) for name in TRAINED)

    @property
    def global_batch(self) -> int:
        """Samples of one optimizer step."""
        return self.micro_batch * self.accumulation * self.data_parallel


@dataclass(frozen=True, slots=True)
class ComponentBytes:
    """Bytes of one component at the peak. ``bytes`` None goes with basis ``unknown``."""

    name: Component
    bytes: int | None
    basis: Basis


@dataclass(frozen=True, slots=True)
class Holding:
    """Something alive at the peak, by name."""

    name: Component
    bytes: int


@dataclass(frozen=True, slots=True)
class Peak:
    """The moment of the allocated peak and what is alive then, largest first."""

    moment: str
    live: tuple[Holding, ...]


@dataclass(frozen=True, slots=True)
class Moment:
    """One point of the timeline: allocated and reserved bytes after an event.

    ``groups`` divides the allocated bytes by group of components (``states``, ``gathered``, ``activations``,
    ``passing``, ``outside``), and ``components`` by component. What is 0 is left out; plans of earlier
    versions lack ``components``, or both.
    """

    name: str
    allocated_bytes: int
    reserved_bytes: int | None = None
    groups: Mapping[str, int] = field(default_factory=dict)
    components: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase of a run: the most a rank holds then.

    Attributes:
        name: The phase.
        allocated_bytes: Peak of live bytes on the device; None is unknown.
        host_bytes_per_rank: Host memory of every rank (tensors; on the CPU it is the device's).
        host_bytes_rank_0: Additional host memory of rank 0 (``export``: of its only process).
        basis: How ``allocated_bytes`` is known.
        moment: When in the phase the peak is.
    """

    name: RunPhase
    allocated_bytes: int | None
    host_bytes_per_rank: Count
    host_bytes_rank_0: Count
    basis: Basis
    moment: str = ""


@dataclass(frozen=True, slots=True)
class Footprint:
    """Per-rank memory of one configuration over a whole run (rank 0; steps are step 2).

    Attributes:
        allocated_peak_bytes: Peak of live bytes, or None when activations are unknown.
        reserved_peak_bytes: Peak of the caching allocator's segments, or None when not replayed.
        components: Live bytes by kind at the peak, each with its basis.
        peak: The peak's moment and what is alive then, largest first.
        timeline: Allocated (and reserved) bytes after each phase event.
        host_bytes_per_rank: Host memory every rank needs at the worst time (offload, staging, loading).
        confidence: ``verified`` if the torch minor version was checked against the oracle.
        unknowns: What could not be derived, one sentence each.
        phases: The peak of every phase of the run.
        allocated_peak_range_bytes: With compiled blocks, the peak of the program that Inductor writes for a
            CPU, and the peak if blocks fused nothing; None without them and where searches leave it out.
    """

    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    components: tuple[ComponentBytes, ...]
    peak: Peak | None
    timeline: tuple[Moment, ...]
    host_bytes_per_rank: int
    confidence: str = "verified"
    unknowns: tuple[str, ...] = ()
    phases: tuple[Phase, ...] = ()
    allocated_peak_range_bytes: tuple[int, int] | None = None


class RejectionKind(StrEnum):
    """Why a candidate was not chosen."""

    DEVICE_MEMORY = "device_memory"
    HOST_MEMORY = "host_memory"
    UNKNOWN_ACTIVATIONS = "unknown_activations"
    UNKNOWN_HOST_MEMORY = "unknown_host_memory"
    HEADROOM = "headroom"
    """It fits, but leaves less free than the search keeps; another candidate leaves more."""
    SPEED = "speed"
    PRICE = "price"
    MEMORY_FOR_SPEED = "memory_for_speed"
    """It is as good as the chosen one within the time model's error, and needs more memory."""
    CPU_OFFLOAD = "cpu_offload"
    """It is as good as the chosen one within the time model's error, and offloads to the host."""
    INDIVISIBLE = "indivisible"
    """The model cannot be divided over a group of this size."""
    UNSUPPORTED = "unsupported"
    """The trainer cannot combine these dimensions of the mesh."""
    MORE_CHANGES = "more_changes"
    """It equals the chosen one, which changes fewer of the requested settings."""

    @property
    def does_not_fit(self) -> bool:
        """Whether the candidate needs more memory than there is; False where that is unknown."""
        return self in (RejectionKind.DEVICE_MEMORY, RejectionKind.HOST_MEMORY)


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a candidate was not chosen: ``kind`` for programs, ``detail`` a phrase for people."""

    kind: RejectionKind
    detail: str


@dataclass(frozen=True, slots=True)
class RangeBasis:
    """The published runs that a range of throughput, or of reserved memory, rests on.

    Attributes:
        rows: Runs that count, the likest for most.
        sources: Who published them.
        alike: Those that divide the model in the same way, on the same generation of GPUs (throughput), or
            with the same kind of segments and of sharding (memory).
        alike_sources: Who published these.
        nearest: The likest, in words, with published over planned figures.
    """

    rows: Count
    sources: Count
    alike: Count
    alike_sources: Count
    nearest: tuple[str, ...] = ()


StepBound = Literal["compute", "host", "communication", "optimizer", "offload"]
"""What takes most of a step: the GPU's work, its waits for the host to launch kernels, communication that no
work hides, the update, or copies to the host and back."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One configuration that was evaluated. ``rejected_by`` None: it may be chosen."""

    id: str
    settings: SearchPoint
    allocated_peak_bytes: int | None
    reserved_peak_bytes: int | None
    device_total_bytes: int | None
    """Reserved plus workspaces, communicators and context: what the driver would report."""
    usable_bytes: int | None
    """What the driver reports as the GPU's total."""
    slack_bytes: int | None
    host_bytes_per_node: int | None
    components: tuple[ComponentBytes, ...]
    peak: Peak | None
    timeline: tuple[Moment, ...] = field(repr=False)
    """Kept for the requested and the chosen candidates; empty for the others."""
    step_seconds: float | None
    tokens_per_second: float | None
    rejected_by: Rejection | None
    """Why it was not chosen; None for the chosen one and before the choice."""
    samples_per_second: float | None = None
    mfu: float | None = None
    """Model FLOPs (recomputation not counted) over the peak of all GPUs, 0 to 1."""
    price_per_million_samples: float | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Where the step's time goes: compute (launches is the part of it in which the GPU waits for the host),
    communication, exposed_communication (group_communication is the part of it that nothing can hide),
    optimizer, offload, contention."""
    bound: StepBound | None = None
    """What takes most of the step; None where its time is not known."""
    step_flops: float | None = None
    """Model FLOPs of one optimizer step over all ranks (recomputation not counted)."""
    peak_flops: float | None = None
    """One GPU's catalogued FLOP/s in the dtype the model computes in; None on the CPU."""
    phases: tuple[Phase, ...] = field(default=(), repr=False)
    """Every phase of the run; the highest of them decides the verdict. Empty where searches leave it out."""
    step_seconds_range: tuple[float, float] | None = None
    """10th to 90th percentile of the step time, from how far published runs lay from our plans of them."""
    tokens_per_second_range: tuple[float, float] | None = None
    """The same for the throughput."""
    range_basis: RangeBasis | None = field(default=None, repr=False)
    """The published runs that both rest on; None where measurements of the machine, or a table, say them."""
    reserved_range_bytes: tuple[int, int] | None = None
    """10th to 90th percentile of the reserved peak, from how far published runs lay from our plans of them.
    None where nothing was replayed, on hosts, and for measured machines."""
    reserved_range_basis: RangeBasis | None = field(default=None, repr=False)
    """The published runs that this rests on."""
    fit_share: float | None = None
    """Share of these runs, by weight, in which the device has enough memory if what is planned is as far off
    as in theirs; None where there is no range."""
    allocated_peak_range_bytes: tuple[int, int] | None = None
    """With compiled blocks, the allocated peak if they fuse as on a CPU, and if they fuse nothing."""
    compilation: Compilation | None = None
    """Whether its blocks are compiled, and why; None where it was never evaluated."""
    fused_loss: FusedLoss | None = None
    """Whether the head computes the loss, and why; None where it was never evaluated."""


AdapterDtype = Literal["float32", "bfloat16", "float16"]

Assumption = Literal[
    "compile", "float8", "async_tp", "fused_norm", "fused_rope", "fused_glu", "fused_lora",
    "float8_rowwise", "mxfp8",
]  # fmt: skip
"""What other training loops do, in time only.

Beside tensor parallelism: ``compile`` blocks, multiply their linear layers in ``float8``, and overlap the
group's collectives with matrix products (``async_tp``, torch's async TP). Anywhere: run norms, rotary
embeddings, gated activations and adapters in ``fused_`` kernels (``planning/data/fused_kernels.json``), and
scale the operands of float8 products by row (``float8_rowwise``) or by blocks of 32 (``mxfp8``).
"""

BESIDE_TP: tuple[Assumption, ...] = ("compile", "float8", "async_tp")
"""What fsdptool does itself, or plans otherwise, without tensor parallelism."""


NotPlanned = Literal[
    "autocast", "outputs", "fused_loss", "whole_loss", "stored_dtype", "embedding_backward", "encoders",
    "forwards",
]  # fmt: skip
"""What differs from run to run, or is not modelled, in another program's training loop.

``autocast``: operators that autocast runs in fp32 (layer normalisation, softmax) keep fp32 copies.
``outputs``: a script that keeps the model's outputs during backward holds their logits. ``fused_loss``: Liger
and other fused losses hold less. ``whole_loss``: other losses than the program's default hold whole logits.
``stored_dtype``: without mixed precision, weights keep the dtype they are loaded in. ``embedding_backward``:
the embedding is gathered in backward, too. ``encoders``: text encoders and the VAE, loaded beside the model.
``forwards``: the time of forward passes without gradients: KTO's pairs, and a reference that is the base.
"""


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """What a plan assumes about a training loop, beyond what accelerate's YAML and a recipe can express.

    Attributes:
        loading: How it fills the model on GPUs; None: as the program of the planned layout does.
        keeps_logits: Whether it holds the whole fp32 logits until backward ends; fsdptool's loss frees them.
        keeps_outputs: Whether it holds the logits until then in the dtype in which the model returns them.
        assumed: What else it does, in time only: planned, and never trained by fsdptool.
        program: Whose loop it is (``fsdptool``, ``accelerate``, ``trainer``, ...).
        loss_in_forward: Whether the model's own forward computes the loss (``labels=``): FSDP's root then
            leaves forward and enters backward with the loss, not with the model's outputs.
        own_loss: Whether that loss is the model's own code, in the code's dtype; else it is that of the
            recipe's objective, in fp32.
        whole_logits: Whether its loss over tokens holds all logits, where nobody says otherwise.
        tiles: Tiles in which its head computes the loss over tokens; None: as fsdptool's loss does.
        head_chunks: Parts of each row whose logits its head makes one by one, and all keeps; 0: all at once.
        head_loss: Whose loss its head computes, by name; None: as the other fields and the recipe say.
        adapter_dtype: dtype in which it stores adapters; None: fp32, as peft casts those of 16 bits (0.21,
            ``autocast_adapter_dtype``) and accelerate all that trains.
        marks_last: Whether it tells FSDP which micro-batch is the step's last (``set_is_last_backward``).
        wraps_adapters: Whether a model with adapters is inside one of peft's (``get_peft_model``), in which
            accelerate 1.15 finds no final norm (``fsdp_utils.py:_find_final_norm``).
        masked_from_rows: Number of rows of a forward from which on a mask hides their padding; 0: there is no
            padding, or the model gets no mask.
        not_planned: What differs from run to run, or is not modelled.
    """

    loading: Loading | None = None
    keeps_logits: bool = False
    keeps_outputs: bool = False
    assumed: tuple[Assumption, ...] = ()
    program: str = "fsdptool"
    loss_in_forward: bool = False
    own_loss: bool = False
    whole_logits: bool = False
    tiles: LossTiles | None = None
    head_chunks: Count = 0
    head_loss: NamedLoss | None = None
    adapter_dtype: AdapterDtype | None = None
    marks_last: bool = True
    wraps_adapters: bool = False
    masked_from_rows: Count = 0
    not_planned: tuple[NotPlanned, ...] = ()

    @property
    def masked(self) -> bool:
        """Whether masks keep packed documents apart: the variable-length kernel is fsdptool's own choice."""
        return self.program != "fsdptool"


OWN_LOOP = TrainingLoop("rows")
"""What ``fsdptool train`` does."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """Pipeline parallelism, which is planned but not trained.

    Attributes:
        ranks: Stages; each runs on an equal part of the run's ranks, which the mesh divides further.
        schedule: The order of forwards and backwards.
        virtual: Virtual stages per rank; 1 unless the schedule is interleaved.
    """

    ranks: Positive = 1
    schedule: PipelineSchedule = "1f1b"
    virtual: Positive = 1


Bound = Literal["exact", "upper", "lower", "open"]
"""On which side of a run's memory a plan is that leaves some of it out."""


@dataclass(frozen=True, slots=True)
class PlanLimit:
    """A part of a described run that changes memory and is not planned.

    Attributes:
        what: A setting of the file, or a part of the run.
        side: Whether the run needs less or more than is planned; None if that depends.
        passing: Whether it leaves unchanged what is kept between steps.
    """

    what: str
    side: Side | None
    passing: bool = False


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The canonical inputs of a plan: plain data that means the same on any machine.

    Attributes:
        recipe, settings: The run.
        clusters: The offers, in the order they were named.
        machines: The machine table's row for each of them.
        profile: Device profile whose memory is predicted.
        wrap, exclude: Wrap classes named or excluded by the user.
        search: ``none``, ``open`` (settings that were left open), ``wide`` (all not on the command line) or
            ``first`` (as ``open``, up to the first configuration that fits).
        fixed: Settings the search leaves alone.
        max_batch: Whether to find the largest micro-batch.
        optimal_checkpointing: Whether to create a checkpointing policy for the available memory.
        prefer: ``speed`` or ``price``.
        model: What the reference resolved to: family, class, library and a digest of its configuration.
        loop: What is assumed about the training loop; fsdptool's own by default.
        lengths: Lengths of the data set's samples; None plans micro-batches of one length.
        pipeline: Stages that are planned, each with the settings' mesh.
        run: What the file of another program describes, from which recipe and settings were made; None where
            no such file was planned.
        limits: What of that run changes memory and is not planned.
        assumed_ranks: What neither a file that is planned nor an option says of the ranks.
    """

    recipe: Recipe
    settings: FsdpSettings
    clusters: Annotated[tuple[Cluster, ...], Keywords(minItems=1)]
    machines: tuple[Machine, ...]
    profile: DeviceProfile
    wrap: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    search: SearchScope = "none"
    fixed: tuple[str, ...] = ()
    max_batch: bool = False
    optimal_checkpointing: bool = False
    prefer: Preference = "speed"
    model: PlannedModel = field(default_factory=PlannedModel)
    loop: TrainingLoop = TrainingLoop()
    lengths: SampleLengths | None = None
    pipeline: Pipeline = Pipeline()
    run: DescribedRun | None = None
    limits: tuple[PlanLimit, ...] = ()
    assumed_ranks: tuple[Literal["processes", "nodes"], ...] = ()


Size = Literal["sequence_length", "height", "width", "frames"]


@dataclass(frozen=True, slots=True)
class SampleSize:
    """The size of one sample, on which memory depends more than on anything else.

    Attributes:
        sequence_length, height, width, frames: Tokens, pixels and frames; None where a sample has no such
            size, or none by that name.
        assumed: Those of them that nobody gave: the family's defaults.
        tensors: Shapes of the model's inputs, where nobody gave a size and none of the names says it.
    """

    sequence_length: int | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    assumed: tuple[Size, ...] = ()
    tensors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UnreadKeys:
    """Keys of the given file that change memory and that the plan did not read.

    Attributes:
        file: The file.
        keys: The keys, as it writes them.
        options: Options of ``plan`` that say the same, where there are such.
    """

    file: str
    keys: tuple[str, ...]
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """A verdict with every candidate that was evaluated (`fsdptool plan --format json`).

    Bytes are integers, times seconds.

    ``inputs`` holds the canonical forms of reference, recipe, cluster and settings the plan was
    derived from, so that ``emit-config``, ``train`` and ``plan --check`` need nothing else.
    """

    verdict: Verdict
    chosen: str | None
    """Id of a candidate."""
    candidates: Annotated[tuple[Candidate, ...], Keywords(minItems=1)] = field(repr=False)
    next_steps: tuple[Suggestion, ...] = field(repr=False)
    inputs: PlanInputs = field(repr=False)
    confidence: Literal["verified", "unverified"]
    details: PlanDetails = field(repr=False)
    """Additional facts (Pareto front, prices), never required to read the verdict."""
    diagnostics: tuple[Diagnostic, ...] = field(default=(), repr=False)
    unknowns: tuple[str, ...] = ()
    shortfall: Shortfall | None = None
    """Why nothing fits; None where something does, or where that is unknown."""
    lengths: LengthsPlan | None = field(default=None, repr=False)
    """What the lengths of a data set do to the shown configuration; None where none are given."""
    sample: SampleSize = SampleSize()
    """The size of a sample, and what of it is assumed."""
    unread: UnreadKeys | None = None
    """Keys of the given file that change memory and were not read; None where there are none."""
