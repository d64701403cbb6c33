"""Diagnostics of a plan: precision, headroom, assumed sizes, and whether the run needs FSDP at all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from fsdptool.config.programs import PROGRAMS, installed_version, is_before
from fsdptool.errors import FsdptoolError
from fsdptool.formatting import amount
from fsdptool.inspection.micro_batch import planned_batch
from fsdptool.modeling.objective import objective_for
from fsdptool.planning.candidate.verdict import HEADROOM, highest_total, least_device_bytes
from fsdptool.planning.hardware import expands
from fsdptool.planning.request.file_run import LAUNCHED
from fsdptool.planning.search.choice import EarlyEnd, roomy
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.lengths import LengthsPlan
from fsdptool.records.plan import Candidate, PlanInputs, SearchPoint
from fsdptool.records.recipe import Recipe

if TYPE_CHECKING:
    from fsdptool.planning.candidate.estimator import Estimator


def advise(
    estimator: Estimator,
    inputs: PlanInputs,
    point: SearchPoint,
    requested: Candidate,
    chosen: Candidate | None,
) -> list[Diagnostic]:
    """Return what was assumed, what the trainer would refuse, and whether sharding is needed at all."""
    return [
        *_precision(inputs),
        *_choice(requested, chosen),
        *_fragmentation(inputs, chosen),
        *_network(inputs),
        *_host(inputs, chosen or requested),
        *_rows(estimator, inputs, (chosen or requested).settings),
        *_sizes(estimator.spec, inputs.recipe),
        *_packing(estimator.spec, inputs.recipe),
        *_needless(estimator, inputs, point, requested, chosen),
        *_whole_base(estimator, inputs, chosen or requested),
    ]


def _whole_base(estimator: Estimator, inputs: PlanInputs, candidate: Candidate) -> Iterator[Diagnostic]:
    """Say what accelerate adds to a 4-bit base of bytes: since 1.14 it leaves their parameters whole."""
    run = inputs.run
    if run is None or run.program not in LAUNCHED or "storage uint8" not in (run.quantisation or ""):
        return
    version = installed_version("accelerate") or PROGRAMS["accelerate"].checked or "0"
    rank = estimator.rank_of(candidate.settings, inputs.clusters[candidate.settings.cluster])
    codes = sum(
        parameter.numel
        for unit in rank.plan.units
        for parameter in unit.parameters
        if parameter.dtype == "uint8"
    )
    more = codes - codes // rank.degree
    if more and not is_before(version, 1, 14):
        yield Diagnostic(
            "PLN017",
            "warning",
            f"accelerate {version} does not shard a 4-bit base that is stored in uint8: + {amount(more)} per"
            " GPU, which this plan does not contain",
            help="set bnb_4bit_quant_storage to the dtype in which the run computes, such as bfloat16",
        )


def ended_early(end: EarlyEnd) -> Diagnostic:
    """Return what is said of a search that did not evaluate every configuration."""
    why = "was told to end" if end.interrupted else "ended at the first configuration that fits"
    return Diagnostic(
        "PLN018",
        "warning" if end.interrupted else "info",
        f"the search {why}, after {end.evaluated} of up to {end.of}: another configuration may be better",
        help=None if end.interrupted else "leave out --quick to look for the fastest",
    )


def does_not_fit(candidate: Candidate) -> bool:
    """Return whether a candidate needs more memory than there is; False where that is unknown."""
    return candidate.rejected_by is not None and candidate.rejected_by.kind.does_not_fit


def _precision(inputs: PlanInputs) -> Iterator[Diagnostic]:
    precision = inputs.settings.mixed_precision
    for gpu in {c.gpu.name: c.gpu for c in inputs.clusters if c.gpu is not None}.values():
        if not gpu.native_bf16 and precision == "bf16":
            yield Diagnostic(
                "PLN002",
                "warning",
                f"{gpu.name} has no bfloat16 units: bf16 runs at fp32 speed or slower",
                help="use --precision fp16 (with loss scaling) or a newer GPU",
            )
        if not gpu.native_fp8 and precision == "fp8":
            yield Diagnostic("PLN002", "warning", f"{gpu.name} has no fp8 units", help="use --precision bf16")


def _choice(requested: Candidate, chosen: Candidate | None) -> Iterator[Diagnostic]:
    """Say where the choice is tight, and where it had to differ from what was requested."""
    if chosen is None:
        return
    if not roomy(chosen):
        yield Diagnostic(
            "PLN003",
            "warning",
            f"only {amount(chosen.slack_bytes)} of {amount(chosen.usable_bytes)} stay free, which is within"
            " the error of the estimate",
            help="use --search to find a configuration with more headroom, or run one step before renting"
            " more GPUs",
        )
    if requested.rejected_by is not None and requested.id != chosen.id and does_not_fit(requested):
        yield Diagnostic(
            "PLN004",
            "info",
            f"the requested configuration does not fit ({requested.rejected_by.detail}); {chosen.id} does",
            help="--no-search evaluates only the requested configuration",
        )


def _fragmentation(inputs: PlanInputs, chosen: Candidate | None) -> Iterator[Diagnostic]:
    """Say that a choice without expandable segments fits only if it reserves less than published runs did."""
    highest = highest_total(chosen) if chosen is not None else None
    if chosen is None or highest is None or chosen.usable_bytes is None or highest <= chosen.usable_bytes:
        return
    if expands(inputs.clusters[chosen.settings.cluster], inputs.loop):
        return
    yield Diagnostic(
        "PLN007",
        "warning",
        f"with reserved memory as in published runs the device needs up to {amount(highest)} of"
        f" {amount(chosen.usable_bytes)}",
        help="set PYTORCH_ALLOC_CONF=expandable_segments:True for the run (environment: in the cluster file)",
    )


def _network(inputs: PlanInputs) -> Iterator[Diagnostic]:
    if any(c.nodes > 1 and c.inter_node_bandwidth is None and c.gpu is not None for c in inputs.clusters):
        yield Diagnostic(
            "PLN005",
            "info",
            "the bandwidth between nodes is assumed (docs/explanation/time.md); step times depend on it",
            help="give --network '400 Gbit/s' (per GPU), or set inter_node_bandwidth in the cluster file",
        )


_NOTABLE_HOST_BYTES = 32 * 2**30
"""Host memory per node that is worth a remark where it was not given: most machines with GPUs have more."""


def _host(inputs: PlanInputs, shown: Candidate) -> Iterator[Diagnostic]:
    """Say that host memory was not compared with anything."""
    cluster = inputs.clusters[shown.settings.cluster]
    needed = shown.host_bytes_per_node
    if cluster.gpu is None or cluster.host_memory_bytes is not None or needed is None:
        return
    if needed >= _NOTABLE_HOST_BYTES or shown.settings.cpu_offload:
        yield Diagnostic(
            "PLN006",
            "warning" if shown.settings.cpu_offload else "info",
            f"each node needs {amount(needed)} of host memory, which is not checked: its size is not given",
            help="give --host-memory '2 TiB' (per node), or set host_memory in the cluster file",
        )


_UNEVEN = 1.25
"""Times its even share that rank 0 may store without a remark: some padding is everywhere."""


def _rows(estimator: Estimator, inputs: PlanInputs, point: SearchPoint) -> Iterator[Diagnostic]:
    """Say that parameters have fewer rows than there are ranks, which leaves the first ranks the most."""
    shares = estimator.rank_of(point, inputs.clusters[point.cluster]).shares
    even = sum(weights.parameter.numel / share.ranks for share in shares for weights in share.weights)
    stored = sum(weights.shard for share in shares for weights in share.weights)
    if not even or stored < _UNEVEN * even:
        return
    share, worst = max(
        ((share, weights) for share in shares for weights in share.weights),
        key=lambda item: item[1].shard - item[1].parameter.numel / item[0].ranks,
    )
    parameter = worst.parameter
    rows = f"{parameter.shape[0]} rows" if parameter.shape[0] > 1 else "one row"
    yield Diagnostic(
        "PLN015",
        "warning",
        f"rank 0 stores {stored / even:.1f} times its even share of the model: FSDP2 shards the first"
        f" dimension, and {parameter.fqn} has {rows} for {share.ranks} ranks",
        help="use the native layout with a number of ranks that divides the rows of an expert, or replicate"
        " over the ranks that get no rows (--hsdp)",
    )


def _sizes(spec: ModelSpec, recipe: Recipe) -> list[Diagnostic]:
    """Say which sample size is assumed: memory depends on it more than on anything else."""
    batch = recipe.batch
    if any(size is not None for size in (batch.sequence_length, batch.height, batch.width, batch.frames)):
        return _unread_sizes(spec, recipe)
    if "inputs" in recipe.objective.options:
        return []  # the recipe gives their shapes itself
    tensors = planned_batch(spec, recipe)
    shapes = [
        f"{item.name} {' x '.join(map(str, item.shape[1:]))}" for item in tensors if len(item.shape) > 1
    ]
    if not shapes:
        return []
    return [
        Diagnostic(
            "PLN013",
            "info",
            f"no sample size is given; the default of the family is assumed: {', '.join(shapes)}",
            help="give --seq-len, --height, --width or --frames, or batch: in the recipe",
        )
    ]


def _unread_sizes(spec: ModelSpec, recipe: Recipe) -> list[Diagnostic]:
    """Say which sizes of pictures the model has no input for: a size twice as large changes no shape."""
    given = {name: getattr(recipe.batch, name) for name in ("height", "width", "frames")}
    given = {name: size for name, size in given.items() if size is not None}
    if not given:
        return []
    larger = {name: 2 * size for name, size in given.items()}
    try:
        planned = [item.shape for item in planned_batch(spec, recipe)]
        other = replace(recipe, batch=replace(recipe.batch, **larger))
        unread = bool(planned) and planned == [item.shape for item in planned_batch(spec, other)]
    except FsdptoolError:
        return []  # some sizes are refused, so they are read
    if not unread:
        return []
    options = " and ".join(f"--{name}" for name in given) + (" changes" if len(given) == 1 else " change")
    return [
        Diagnostic(
            "PLN013",
            "warning",
            f"{options} nothing: the inputs of {spec.model_class} have no such size",
            help="leave it out (of batch: in a recipe); give --seq-len where the model reads text",
        )
    ]


def advise_lengths(lengths: LengthsPlan | None, *, expandable: bool) -> list[Diagnostic]:
    """Say that reserved memory grows as lengths vary, if segments cannot grow with them.

    Args:
        lengths: What is planned of them; None if they are not given.
        expandable: Whether the run has expandable segments.
    """
    planned = lengths.traced if lengths is not None else ()
    if expandable or len(planned) < 2 or planned[0].reserved_peak_bytes is None:
        return []
    return [
        Diagnostic(
            "PLN014",
            "warning",
            f"micro-batches are padded to lengths from {planned[0].length:,} tokens (median) to"
            f" {planned[-1].length:,}: without expandable segments, a run can reserve more than steps of"
            " any one length",
            help="set PYTORCH_ALLOC_CONF=expandable_segments:True, or pack the samples",
        )
    ]


def _packing(spec: ModelSpec, recipe: Recipe) -> list[Diagnostic]:
    data = recipe.data
    documents = objective_for(recipe, spec).samples == "documents"
    if not documents or data.source == "synthetic" or not (data.packing and data.document_mask):
        return []
    names = {item.name for item in planned_batch(spec, recipe)}
    if "position_ids" in names or "pixel_values" in names:
        return []
    return [
        Diagnostic(
            "PLN012",
            "warning",
            f"{spec.model_class} cannot separate packed documents; training refuses data.document_mask",
            help="allow attention across documents (data.document_mask: false), or set data.packing: false",
        )
    ]


def _needless(
    estimator: Estimator,
    inputs: PlanInputs,
    point: SearchPoint,
    requested: Candidate,
    chosen: Candidate | None,
) -> list[Diagnostic]:
    """Return advice on whether sharding is needed at all.

    The model, its gradients and its optimizer on one GPU with the requested micro-batch: if that fits
    with room for DDP's gradient buckets, DDP trains it with less communication.
    """
    cluster = inputs.clusters[point.cluster]
    if cluster.gpu is None or requested.device_total_bytes is None or chosen is None:
        return []
    if cluster.world_size == 1:
        return [
            Diagnostic(
                "PLN010",
                "info",
                "there is nothing to shard on one GPU; FSDP only adds its own copies",
                help="train without FSDP on one GPU, or use --gpus 2 or more",
            )
        ]
    alone = replace(cluster, gpus_per_node=1, nodes=1)
    single = replace(
        point,
        dp_replicate=1,
        dp_shard=1,
        cp=1,
        reshard_after_forward=bool(point.reshard_after_forward),
        prefetch=1,
        cpu_offload=False,
    )
    machine = inputs.machines[point.cluster]
    try:
        trial = estimator.candidate("single", single, alone, machine, detail=False)
        least = least_device_bytes(trial)
        if least is None or trial.usable_bytes is None:
            return []
        # DDP's buckets hold every gradient once more, from before the first step on.
        buckets = estimator.states(single, alone)["gradients"]
        most = (1 - HEADROOM) * trial.usable_bytes
        if least + buckets > most:
            return []
        trial = estimator.candidate("single", single, alone, machine, detail=False, replay=True)
    except FsdptoolError:
        return []
    if trial.device_total_bytes is None or (total := trial.device_total_bytes + buckets) > most:
        return []
    return [
        Diagnostic(
            "PLN011",
            "info",
            f"FSDP is not needed: the whole run fits on one {cluster.gpu.name} ({amount(total)} of"
            f" {amount(trial.usable_bytes)} including DDP's buckets)",
            help="DDP communicates a third less; use FSDP for larger batches or models",
        )
    ]
