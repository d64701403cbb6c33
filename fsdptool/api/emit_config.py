"""What ``emit-config`` writes: settings from a plan, a model or a preset, and the head of the file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from fsdptool import spelling
from fsdptool.api.options import EmissionOptions
from fsdptool.config.writer import emit_yaml, resolved
from fsdptool.errors import ConfigError
from fsdptool.options import takes, with_defaults
from fsdptool.records.config_documents import EmittedConfig, Preset
from fsdptool.records.diagnostic import digest, envelope
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Batch, ModelChoice, Recipe, Sharding
from fsdptool.records.sharding import FsdpSettings, Layout
from fsdptool.spelling import suggest_keywords

if TYPE_CHECKING:
    from fsdptool.config.translation import Translation
    from fsdptool.records.anatomy import Anatomy
    from fsdptool.records.described_run import DescribedRun
    from fsdptool.records.plan import Plan, SampleSize


@dataclass(frozen=True, slots=True)
class Emission:
    """Everything an emitted file says, before it is text.

    Attributes:
        settings: What the file writes.
        layout: The layout it was planned for.
        reference: The model, as the person named it, or None for a bare preset.
        plan_digest: Digest of the plan it came from, or None.
        recipe: The recipe of the plan, or None.
        anatomy: The inspected model, or None.
        environment: Variables of the workers that the plan assumes; no configuration file can set them.
        described: The run of the training file that was planned, or None.
        planned: The recipe with the sizes of a sample that the plan is for, or None.
        translation: The plan's whole run as the file of a program, or None.
    """

    settings: FsdpSettings
    layout: Layout = "native"
    reference: str | None = None
    plan_digest: str | None = None
    recipe: Recipe | None = None
    anatomy: Anatomy | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    described: DescribedRun | None = None
    planned: Recipe | None = None
    translation: Translation | None = None

    def differences(self) -> tuple[str, ...]:
        """Return what a plain accelerate script will do differently from what was planned."""
        if self.translation is not None:
            return ()
        if self.layout != "native" or self.anatomy is None:
            return ()
        from fsdptool.api.differences import list_differences

        sharding = self.recipe.sharding if self.recipe is not None else Sharding()
        return list_differences(self.anatomy, resolved(self.settings), sharding)

    def text(self) -> str:
        """Return the file."""
        if self.translation is not None:
            return self.translation.text
        notes = [
            f"The plan assumes {name}={value} in the environment of the launch: export it first."
            for name, value in self.environment.items()
        ]
        if self.reference is None:
            notes.append(
                "Wrap classes depend on the model (fsdptool detect): fsdp_transformer_layer_cls_to_wrap."
            )
        return emit_yaml(
            self.settings,
            layout=self.layout,
            reference=self.reference,
            plan_digest=self.plan_digest,
            differences=self.differences(),
            notes=notes,
        )

    def document(self, text: str, path: Path | None) -> dict[str, Any]:
        """Return the answer as a document (schema ``emit-config``)."""
        report = EmittedConfig(
            path=str(path) if path is not None else None,
            layout=self.layout,
            reference=self.reference,
            plan_digest=self.plan_digest,
            settings=self.settings,
            differences=self.differences(),
            text=text,
            environment=self.environment,
            losses=self.translation.losses if self.translation is not None else (),
        )
        return envelope("emit-config", self.settings, report)


@suggest_keywords()
@takes(EmissionOptions, first="reference")
def emit_config(reference: str | None = None, /, **options: Unpack[EmissionOptions]) -> str:
    """Return the accelerate YAML for a plan or a model, or the file of a program for a plan's whole run.

    Args:
        reference: A model (``family:flavour``, hub id, folder), or a training file of some program.
        **options: The options of ``fsdptool emit-config``. ``plan`` may be the record, too.

    Raises:
        ConfigError: Neither or both of model and plan are given, the plan has no chosen candidate, or an
            argument is impossible.
        PlanError: A training file leaves its model or its number of processes open.
        ReferenceError, ModelError: The model cannot be resolved or built.
    """
    if reference is not None:
        options["reference"] = reference
    return prepare_emission(options).text()


def prepare_emission(options: EmissionOptions) -> Emission:
    """Return what a plan chose, or a preset's settings for a model; as :func:`emit_config` says."""
    from fsdptool.planning.request.file_run import read_file_run

    options = with_defaults(EmissionOptions, options)
    reference, plan, preset = options["reference"], options["plan"], options["preset"]
    trust_remote_code = options["trust_remote_code"]
    if reference is not None and plan is not None:
        raise ConfigError("give a model or a plan, not both", help="the plan already names its model")
    if plan is not None:
        emission = from_plan(plan, candidate=options["candidate"], trust_remote_code=trust_remote_code)
    elif reference is None and preset is None:
        advice = "give a model, --plan FILE or --preset NAME"
        raise ConfigError("a model, a plan or a preset is required", help=advice)
    else:
        model = None
        run = read_file_run(reference) if reference is not None else None
        if run is not None and preset is not None:
            raise ConfigError(f"{reference} describes a whole run", help="leave the preset out")
        if reference is not None and run is None:
            model = ModelChoice(
                reference,
                revision=options["revision"],
                component=options["component"],
                trust_remote_code=trust_remote_code,
            )
        classes = tuple(options["wrap"]), tuple(options["exclude"])
        if run is not None:
            emission = from_run(run, str(reference), options["processes"], options["layout"], *classes)
        else:
            emission = from_reference(model, preset, options["layout"], *classes)
    settings = adjust(
        emission.settings,
        processes=options["processes"],
        nodes=options["nodes"],
        precision=options["precision"],
        cpu=options["cpu"],
        tp=options["tp"],
    )
    if settings.mesh.tp > 1 and emission.anatomy is not None and emission.recipe is not None:
        from fsdptool.modeling.resolve import resolve_run
        from fsdptool.modeling.units import plan_units

        # What cannot be divided is refused by name before anything is written.
        plan_units(emission.anatomy, resolve_run(emission.recipe, settings))
    emission = replace(emission, settings=settings)
    return emission if options["to"] is None else _translated(emission, options["to"])


def _translated(emission: Emission, to: str) -> Emission:
    """Return an emission with its whole run as the file of a program."""
    from fsdptool.config.translation import planned_run, translate, writer_of

    if emission.plan_digest is None or emission.recipe is None:
        raise ConfigError("--to requires --plan", help="without a plan there is no run to write")
    if to == "fsdptool":
        raise ConfigError("a recipe is not written by --to", help="give --recipe-output FILE")
    writer_of(to)
    run = planned_run(emission.planned or emission.recipe, emission.settings, emission.described)
    head = (
        f"Written by fsdptool emit-config for {emission.reference}.",
        f"fsdptool: plan={emission.plan_digest}",
    )
    return replace(emission, translation=translate(run, to, header=head))


def from_plan(
    plan: str | PathLike[str] | Plan, *, candidate: str | None = None, trust_remote_code: bool = False
) -> Emission:
    """Return what a plan (the record, or the path of its document) chose.

    Raises:
        ConfigError: The file is not a plan, or has no such candidate, or chose none; or it asks to run the
            model's own code, and ``trust_remote_code`` is not set.
    """
    from fsdptool.inspection import inspect
    from fsdptool.planning import chosen_candidate, chosen_run, read_plan
    from fsdptool.source import consented, resolve_choice

    where = "the plan"
    if isinstance(plan, str | PathLike):
        where = str(plan)
        plan = read_plan(Path(plan))
    ids = [item.id for item in plan.candidates]
    if candidate is not None and candidate not in ids:
        raise ConfigError(
            f"{where}: there is no candidate {candidate!r}", help=f"choose one of: {', '.join(ids)}"
        )
    if candidate is None and plan.chosen is None:
        raise ConfigError(
            f"{where}: the plan has no chosen candidate (verdict: {plan.verdict})",
            help=f"name one with --candidate ({', '.join(ids[:4])}), or follow the plan's suggestions",
        )
    plan = replace(plan, chosen=candidate or plan.chosen)
    recipe, settings, cluster = chosen_run(plan)
    consented(recipe, where, trust_remote_code=trust_remote_code)
    if recipe.steps is None and recipe.epochs is None:
        # A plan needs no end; a run does.
        recipe = replace(recipe, epochs=1.0)
    chosen = chosen_candidate(plan)
    anatomy = inspect(
        resolve_choice(recipe.model, catalogue=True),
        wrap=plan.inputs.wrap,
        exclude=plan.inputs.exclude,
    )
    if settings.wrap_policy == "transformer" and not settings.wrap_classes:
        # The plan left the choice to detect; accelerate would take _no_split_modules instead.
        settings = replace(settings, wrap_classes=anatomy.wrap.classes)
    return Emission(
        settings,
        recipe.sharding.layout,
        recipe.model.reference,
        digest({"inputs": plan.inputs, "candidate": chosen.id}),
        recipe,
        anatomy,
        cluster.environment,
        plan.inputs.run,
        planned=replace(recipe, batch=_sized(recipe.batch, plan.sample)),
    )


def _sized(batch: Batch, sample: SampleSize) -> Batch:
    """Return a batch with the sizes of a sample that it leaves open and the plan assumed."""
    sizes = {name: getattr(sample, name) for name in ("sequence_length", "height", "width", "frames")}
    left = {name: size for name, size in sizes.items() if getattr(batch, name) is None and size is not None}
    return replace(batch, **left)


def from_reference(
    choice: ModelChoice | None,
    preset: str | None,
    layout: Layout | str,
    wrap: tuple[str, ...],
    exclude: tuple[str, ...],
) -> Emission:
    """Return a preset's settings (default ``single-node``) with the wrap classes of a model.

    Raises:
        ReferenceError, ModelError: The model cannot be resolved or built.
        ConfigError: The preset or the layout is unknown.
    """
    from fsdptool.inspection import inspect
    from fsdptool.source import resolve_choice

    if layout not in ("native", "accelerate"):
        raise ConfigError(f"unknown layout {layout!r}", help="native or accelerate")
    settings = find_preset(preset or "single-node").settings
    if choice is None:
        classes = spelling.classes(list(wrap)) or ()
        return Emission(replace(settings, wrap_classes=classes), layout)
    anatomy = inspect(resolve_choice(choice), wrap=wrap, exclude=exclude)
    classes = anatomy.wrap.classes
    if classes:
        settings = replace(settings, wrap_policy="transformer", wrap_classes=classes)
    else:
        settings = replace(settings, wrap_policy="none", wrap_classes=(), activation_checkpointing=False)
    chosen: Layout = "accelerate" if layout == "accelerate" else "native"
    recipe = Recipe(choice, sharding=Sharding(layout=chosen))
    return Emission(settings, layout, choice.reference, None, recipe, anatomy)


def from_run(
    run: DescribedRun,
    where: str,
    processes: int | None,
    layout: Layout | str,
    wrap: tuple[str, ...],
    exclude: tuple[str, ...],
) -> Emission:
    """Return the settings of the run that a training file describes, and its recipe where one can say it.

    A run without FSDP is written as one that shards over all of its processes.

    Raises:
        PlanError: The file leaves its model or its number of processes open.
        ReferenceError, ModelError: The model cannot be resolved or built.
    """
    from fsdptool.inspection import inspect
    from fsdptool.planning.request.file_run import file_run, is_recipe, ranks_of
    from fsdptool.source import resolve_choice

    if run.program == "fsdptool":
        raise ConfigError(f"{where} is a recipe", help=f"plan it: fsdptool plan {where} -o plan.json")
    made = file_run(run, None, where, ranks_of(run, processes, where, "--processes 8"))
    settings, recipe = made.settings, made.recipe
    if run.fsdp == "none":
        shared = ParallelDims(cp=settings.mesh.cp, tp=settings.mesh.tp)
        settings = replace(settings, mesh=shared, ignored_modules=None)
    anatomy = inspect(resolve_choice(recipe.model), wrap=wrap or settings.wrap_classes, exclude=exclude)
    chosen: Layout = "accelerate" if layout == "accelerate" else "native"
    recipe = replace(recipe, sharding=replace(recipe.sharding, layout=chosen))
    if recipe.steps is None:
        recipe = replace(recipe, epochs=run.epochs or 1.0)
    settings = replace(settings, wrap_classes=anatomy.wrap.classes)
    written = recipe if is_recipe(run) else None
    return Emission(settings, chosen, recipe.model.reference, None, written, anatomy)


def adjust(
    settings: FsdpSettings,
    *,
    processes: int | None = None,
    nodes: int | None = None,
    precision: str | None = None,
    cpu: bool = False,
    tp: int | None = None,
) -> FsdpSettings:
    """Return settings with what the command line says on top.

    Raises:
        ConfigError: A value is impossible.
    """
    if processes is not None:
        if processes < 1:
            raise ConfigError(
                f"the number of processes must be at least 1, not {processes}", help="give 1 or more"
            )
        settings = replace(settings, num_processes=processes)
    if nodes is not None:
        if nodes < 1:
            raise ConfigError(
                f"the number of machines must be at least 1, not {nodes}", help="give 1 or more"
            )
        if (settings.num_processes or nodes) % nodes:
            raise ConfigError(
                f"{settings.num_processes} processes cannot be divided evenly over {nodes} machines",
                help="give --processes a multiple of --nodes: it counts the processes of all machines",
            )
        settings = replace(settings, num_machines=nodes)
    if precision is not None:
        mixed_precision = spelling.choice(precision, spelling.PRECISIONS)
        if mixed_precision is None:
            raise ConfigError(f"unknown precision {precision!r}", help="no, fp16, bf16 or fp8")
        settings = replace(settings, mixed_precision=mixed_precision)  # type: ignore[arg-type]
    if cpu:
        settings = replace(settings, use_cpu=True)
    if tp is not None:
        settings = _divided(settings, tp)
    mesh, total = settings.mesh, settings.num_processes
    if mesh.dp_shard is not None and total is not None:
        others = mesh.other_sizes
        if others == 1:
            # Sharding over everybody is what accelerate does without a mesh.
            settings = replace(settings, mesh=ParallelDims())
        elif others * mesh.dp_shard != total:
            if total % others:
                raise ConfigError(
                    f"{total} processes cannot be divided evenly over groups of {others}: the ranks that"
                    " hold one copy or share one sequence",
                    help=f"give a multiple of {others} with --processes",
                )
            settings = replace(settings, mesh=replace(mesh, dp_shard=total // others))
    return settings


def _divided(settings: FsdpSettings, tp: int) -> FsdpSettings:
    """Return settings with a tensor-parallel size; the other processes shard."""
    if tp < 1:
        raise ConfigError(f"the tensor-parallel size must be at least 1, not {tp}", help="give 1 or more")
    total, mesh = settings.num_processes, replace(settings.mesh, tp=tp)
    if tp > 1 and total is not None and total <= tp:
        raise ConfigError(
            f"{total} processes leave no rank to shard over beside {tp} tensor-parallel ranks",
            help=f"give a larger multiple of {tp} with --processes",
        )
    shard = mesh.dp_shard or max((total or tp) // mesh.other_sizes, 1)
    return replace(settings, mesh=replace(mesh, dp_shard=shard))


PRESETS = {
    preset.name: preset
    for preset in (
        Preset("single-node", "one machine with 8 GPUs, full sharding, bf16", FsdpSettings(num_processes=8)),
        Preset(
            "single-node-zero2",
            "the model fits unsharded during a step: parameters stay after forward",
            FsdpSettings(num_processes=8, reshard_after_forward=False),
        ),
        Preset(
            "single-node-checkpointing",
            "activations dominate: recompute every block in backward",
            FsdpSettings(num_processes=8, activation_checkpointing=True),
        ),
        Preset(
            "single-node-offload",
            "parameters and optimizer states live in host memory",
            FsdpSettings(num_processes=8, activation_checkpointing=True, cpu_offload=True),
        ),
        Preset(
            "two-nodes-hybrid",
            "2 machines with 8 GPUs: shard within, replicate across (HSDP)",
            FsdpSettings(num_processes=16, num_machines=2, mesh=ParallelDims(2, 8), rdzv_backend="c10d"),
        ),
        Preset(
            "long-context",
            "8 GPUs share every sequence, 4 by 2 (context parallel)",
            FsdpSettings(num_processes=8, activation_checkpointing=True, mesh=ParallelDims(1, 4, cp=2)),
        ),
        Preset(
            "cpu",
            "two processes on the CPU, for trying things out with fsdptool train",
            FsdpSettings(num_processes=2, use_cpu=True, mixed_precision="no"),
        ),
    )
}


def find_preset(name: str) -> Preset:
    """Return a preset by name.

    Raises:
        ConfigError: There is none; the help names the nearest.
    """
    if name in PRESETS:
        return PRESETS[name]
    near = spelling.nearest(name, PRESETS, cutoff=0.5)
    advice = f"did you mean {near}?" if near else f"choose one of: {', '.join(PRESETS)}"
    raise ConfigError(f"there is no preset {name!r}", help=advice)
