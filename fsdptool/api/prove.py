"""``fsdptool.prove``: compares a live model of any script with a plan or a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError, ShardingError
from fsdptool.formatting import amount
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.plan import Plan
from fsdptool.records.proof import Difference, DifferenceKind, ShardingProof
from fsdptool.records.recipe import Recipe, Sharding
from fsdptool.records.sharding import FsdpSettings, Layout, UnitPlan
from fsdptool.spelling import suggest_keywords

if TYPE_CHECKING:
    from torch import nn

    from fsdptool.records.anatomy import Anatomy, ModelSpec

FILE = "fsdptool-proof.json"
"""Name of the document that callbacks and trackers write."""


@dataclass(frozen=True, slots=True)
class Expected:
    """What a model should be.

    Attributes:
        units: Its FSDP units.
        dims: The mesh, sizes filled in for the live processes.
        peak_bytes: The plan's allocated peak of a rank, or None.
        ranks: Difference in the number of processes, if there is one.
    """

    units: UnitPlan
    dims: ParallelDims
    peak_bytes: int | None
    ranks: tuple[Difference, ...] = ()


class Proof:
    """What was found about a live model; measures its steps.

    Attributes:
        record: The findings, as plain data.
    """

    def __init__(self, record: ShardingProof, device: Any) -> None:
        from fsdptool.training.memory_meter import open_meter

        self.record = record
        self._meter = open_meter(device)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measure the memory of one optimizer step, forward to update.

        On CUDA every step is measured by the allocator's counters; on the CPU the first three, with torch's
        profiler.
        """
        number = self.record.steps + 1
        with self._meter.step(number):
            yield
        self.record = replace(self.record, steps=number)

    def conclude(self) -> ShardingProof:
        """Gather the measured peaks of all ranks and put them beside the plan's; a collective."""
        from fsdptool.distributed.proof import gather

        peaks = tuple(gather(self._meter.peaks()[0]))
        most = max((peak for peak in peaks if peak is not None), default=None)
        predicted = self.record.predicted_peak_bytes
        error = 100.0 * (predicted - most) / most if predicted is not None and most else None
        instrument = self._meter.instrument if most is not None else None
        self.record = replace(
            self.record, measured_peak_bytes=peaks, error_percent=error, instrument=instrument
        )
        return self.record

    def write(self, path: str | PathLike[str]) -> None:
        """Conclude, and write the document (schema ``proof``) on rank 0; a collective.

        Raises:
            StorageError: The file cannot be written.
        """
        import torch.distributed as dist

        from fsdptool.records.diagnostic import envelope
        from fsdptool.runs.folder import write_json

        record = self.conclude()
        if not dist.is_initialized() or dist.get_rank() == 0:
            file = Path(path)
            file.parent.mkdir(parents=True, exist_ok=True)
            write_json(file, envelope("proof", record, record))

    def __repr__(self) -> str:
        """Return the findings in a few lines."""
        record = self.record
        mesh = " x ".join(f"{name} {size}" for name, size in record.mesh.items())
        lines = [
            f"sharded as planned: {record.units} FSDP units ({record.layout} layout), {record.parameters}"
            f" parameters, {mesh}",
            f"parameters of a rank: {amount(max(record.local_bytes))} (exact)",
        ]
        known = [peak for peak in record.measured_peak_bytes if peak is not None]
        if known:
            planned = amount(record.predicted_peak_bytes)
            lines.append(f"allocated peak: {amount(max(known))} measured, {planned} planned")
        return "\n".join(lines)


@suggest_keywords(config="planned", plan="planned")
def prove(
    model: nn.Module,
    planned: Plan | FsdpSettings | str | PathLike[str],
    *,
    layout: Layout = "accelerate",
    trust_remote_code: bool = False,
) -> Proof:
    """Assert on every rank that a live model is sharded as planned; a collective.

    Compares FSDP units, placements and rows, dtypes, resharding, offload, ties, and the values of replicas.
    Call it after the model is sharded (``accelerator.prepare``) and before the first step.

    Args:
        model: The sharded model; wrappers of peft, activation checkpointing and compilation may be on it.
        planned: A plan (the record or ``plan.json``), or a configuration (settings or the YAML that
            accelerate reads). A configuration is compared with the model's own structure.
        layout: Who sharded it: ``accelerate`` (accelerate, Trainer, TRL), or ``native`` for fsdptool's units.
        trust_remote_code: Whether the code of the plan's model may run.

    Returns:
        The proof. Its ``step()`` measures memory, and ``write(path)`` writes both beside the plan.

    Raises:
        ShardingError: Something differs; the message lists what, where and what to do, on every rank.
        ConfigError: The plan or the configuration cannot be used for this model.
    """
    from fsdptool.distributed.proof import compute_device, differences, local_bytes, unwrapped

    model = unwrapped(model)
    expected = expect(model, planned, layout, trust_remote_code=trust_remote_code)
    found = expected.ranks or differences(model, expected.units, expected.dims)
    device = compute_device(model)
    units = expected.units
    record = ShardingProof(
        proven=not found,
        differences=found,
        world_size=expected.dims.other_sizes * expected.dims.size("dp_shard"),
        mesh=expected.dims.parameter_mesh(),
        layout=units.layout,
        units=len(units.units),
        parameters=sum(len(unit.parameters) for unit in units.units) + len(units.ignored),
        replicated=len(units.ignored),
        local_bytes=local_bytes(model),
        predicted_peak_bytes=expected.peak_bytes,
    )
    if found:
        raise ShardingError(_message(found), help=_advice(found, device.type))
    return Proof(record, device)


def _message(found: tuple[Difference, ...]) -> str:
    from fsdptool.distributed.proof import describe

    count = f"{len(found)} difference{'s' if len(found) > 1 else ''}"
    lines = (f"  {item.kind.value.replace('_', ' ')}: {describe(item)}" for item in found)
    return "\n".join((f"the model is not sharded as planned: {count}", *lines))


_ADVICE: Mapping[DifferenceKind, str] = {
    DifferenceKind.NOT_SHARDED: "start the script with accelerate launch --config_file FILE"
    " (fsdp_version: 2), and prove the model after accelerator.prepare(model, optimizer)",
    DifferenceKind.RANKS: "start as many processes as the plan has GPUs, or plan for these processes",
    DifferenceKind.PARAMETER: "load the model, the adapters and the revision that were planned",
    DifferenceKind.UNIT: "wrap the planned classes: set fsdp_transformer_layer_cls_to_wrap to what fsdptool"
    " emit-config --layout accelerate writes",
    DifferenceKind.PLACEMENT: "set parallelism_config (dp_replicate, dp_shard) as planned",
    DifferenceKind.STORED_DTYPE: "load the model in the planned dtype, or plan with --dtype",
    DifferenceKind.COMPUTE_DTYPE: "set mixed_precision as planned",
    DifferenceKind.RESHARD: "set fsdp_reshard_after_forward as planned",
    DifferenceKind.OFFLOAD: "set fsdp_offload_params as planned",
    DifferenceKind.TIE: "tie the weights again after loading them (model.tie_weights())",
    DifferenceKind.REPLICA: "load the same weights, or set the same seed, on every rank",
}
"""What to do about the first difference."""


def _advice(found: tuple[Difference, ...], device: str) -> str:
    kind = found[0].kind
    if kind is DifferenceKind.NOT_SHARDED and device == "cpu":
        return "accelerate 1.15 does not shard on the CPU (state.py); use GPUs, or fsdptool train"
    return _ADVICE[kind]


def expect(
    model: nn.Module,
    planned: Plan | FsdpSettings | str | PathLike[str],
    layout: Layout,
    *,
    trust_remote_code: bool = False,
) -> Expected:
    """Return what a live model should be; arguments and errors as :func:`prove`."""
    import torch.distributed as dist

    from fsdptool.layout import group, resolve_sharding
    from fsdptool.modeling.resolve import resolve_run
    from fsdptool.modeling.units import plan_units

    world = dist.get_world_size() if dist.is_initialized() else 1
    planned, ep = _read(planned), 1
    if isinstance(planned, FsdpSettings):
        settings, peak = planned, None
        sharding = resolve_sharding(settings, Sharding(layout=layout, reduce_dtype=None))
        units = group(live_anatomy(model), sharding)
    else:
        recipe, settings, anatomy, peak = _chosen(planned, layout, trust_remote_code=trust_remote_code)
        units, ep = plan_units(anatomy, resolve_run(recipe, settings)), recipe.sharding.expert_parallel
    wanted = settings.num_processes
    ranks: tuple[Difference, ...] = ()
    if wanted not in (None, -1, world):
        ranks = (Difference(DifferenceKind.RANKS, "the run", f"{wanted} processes", f"{world} processes"),)
        return Expected(units, ParallelDims(dp_shard=world), peak, ranks)
    try:
        return Expected(units, settings.mesh.resolve(world).with_experts(ep), peak)
    except ValueError as error:
        raise ConfigError(str(error), help="change parallelism_config or num_processes") from error


def _read(planned: Plan | FsdpSettings | str | PathLike[str]) -> Plan | FsdpSettings:
    if isinstance(planned, Plan | FsdpSettings):
        return planned
    path = Path(planned)
    if path.suffix == ".json":
        from fsdptool.planning.plan import read_plan

        return read_plan(path)
    from fsdptool.config.reader import read_settings

    return read_settings(path).require()


def _chosen(
    plan: Plan, layout: Layout, *, trust_remote_code: bool
) -> tuple[Recipe, FsdpSettings, Anatomy, int | None]:
    """Return the chosen run of a plan as a program of a layout runs it, its model and its peak in bytes."""
    from fsdptool.inspection import inspect
    from fsdptool.planning.plan import chosen_candidate, chosen_run
    from fsdptool.source import consented, resolve_choice

    recipe, settings, cluster = chosen_run(plan)
    recipe = consented(recipe, "the plan", trust_remote_code=trust_remote_code)
    anatomy = inspect(resolve_choice(recipe.model), wrap=plan.inputs.wrap, exclude=plan.inputs.exclude)
    if settings.wrap_policy == "transformer" and not settings.wrap_classes:
        # The plan left the choice to detect, and emit-config writes it.
        settings = replace(settings, wrap_classes=anatomy.wrap.classes)
    if layout == "accelerate":
        # accelerate shards adapters with everything else, and has none of the trainer's own settings.
        lora = recipe.method.lora
        method = replace(recipe.method, lora=replace(lora, adapters="sharded")) if lora else recipe.method
        recipe = replace(recipe, method=method, sharding=Sharding(layout, reduce_dtype=None))
    settings = replace(settings, num_processes=cluster.world_size)
    return recipe, settings, anatomy, chosen_candidate(plan).allocated_peak_bytes


def live_anatomy(model: nn.Module) -> Anatomy:
    """Return what a live, sharded model is made of: classes without FSDP2's, names without wrappers'."""
    from fsdptool.distributed.proof import unwrapped_names
    from fsdptool.inspection.walk import walk
    from fsdptool.records.anatomy import Anatomy, WrapChoice

    walked = walk(model)
    kinds = {path: type(module) for path, module in model.named_modules()}
    modules = []
    for module in walked.modules:
        bases = module.bases
        name = module.class_name
        if name.startswith("FSDP") and kinds[module.path].__mro__[1].__name__ == "FSDPModule":
            # fully_shard makes a class of each: FSDPBlock(FSDPModule, Block) (torch 2.13, _fully_shard.py).
            name, bases = bases[0], bases[1:]
        if name not in ("CheckpointWrapper", "OptimizedModule"):
            clean = unwrapped_names(module.path)
            modules.append(replace(module, path=clean, class_name=name, bases=bases, aliases=()))
    return Anatomy(
        spec=_live_spec(model, walked.modules[0].class_name),
        parameters=tuple(
            replace(p, fqn=unwrapped_names(p.fqn), aliases=tuple(map(unwrapped_names, p.aliases)))
            for p in walked.parameters
        ),
        buffers=walked.buffers,
        modules=tuple(modules),
        wrap=WrapChoice((), ()),
        input_embedding=_clean(walked.input_embedding),
        output_embedding=_clean(walked.output_embedding),
        final_norm=_clean(walked.final_norm),
        no_split_modules=walked.no_split_modules,
    )


def _clean(path: str | None) -> str | None:
    from fsdptool.distributed.proof import unwrapped_names

    return unwrapped_names(path) if path is not None else None


def _live_spec(model: nn.Module, name: str) -> ModelSpec:
    from fsdptool.records.anatomy import ModelSpec, Reference

    reference = Reference("config", "the live model")
    return ModelSpec(reference, "generic", None, type(model).__module__.partition(".")[0], name, {})
