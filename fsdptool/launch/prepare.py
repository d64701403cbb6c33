"""The preflight: from a recipe and a YAML to the contents of a run folder. Torch-free itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from fsdptool.advisories.facts import own_facts
from fsdptool.advisories.locks import installed
from fsdptool.advisories.matching import diagnostics
from fsdptool.distributed.devices import count_gpus, why_unused
from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.files.text import UnreadableError, read_bytes
from fsdptool.launch.command import Nodes
from fsdptool.launch.job import FIRST_NODE, PORT, MultiNodeJob
from fsdptool.launch.machine import local_cluster, visible_gpus
from fsdptool.records.anatomy import Anatomy, ModelSpec
from fsdptool.records.cluster import device_profile
from fsdptool.records.command_documents import Unchecked
from fsdptool.records.compilation import Compilation
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.fused_loss import FusedLoss
from fsdptool.records.plan import Candidate
from fsdptool.records.recipe import FUSED_ATTENTION, Attention, Recipe
from fsdptool.records.resolved_run import ResolvedRun
from fsdptool.records.sharding import FsdpSettings, UnitPlan
from fsdptool.runs.folder import ACCELERATE, RECIPE
from fsdptool.runs.trackers import check_trackers
from fsdptool.versions import refuse_old, untested_versions

Device = Literal["cpu", "cuda"]


@dataclass(frozen=True, slots=True)
class PreparedRun:
    """A run that can be written and launched.

    Attributes:
        recipe, settings, spec, units: What the workers need.
        teacher_spec, teacher_units: Only under distillation.
        device: ``cpu`` or ``cuda``.
        world_size, per_machine: Total number of processes, and those on each machine.
        prediction: What the plan says, or None with the reason in ``notes``.
        diagnostics: Findings in the YAML that are not errors.
        notes: One line each for the person.
        files: The files as given, by their name in the run folder.
        recipe_path: The recipe that was read.
        unchecked: What was left to the start of the run.
    """

    recipe: Recipe
    settings: FsdpSettings
    spec: ModelSpec
    units: UnitPlan
    teacher_spec: ModelSpec | None
    teacher_units: UnitPlan | None
    device: Device
    world_size: int
    per_machine: int
    prediction: Candidate | None
    diagnostics: tuple[Diagnostic, ...]
    notes: tuple[str, ...]
    files: Mapping[str, str]
    recipe_path: Path
    unchecked: tuple[Unchecked, ...] = ()


def prepare(
    recipe_path: Path,
    config_path: Path,
    *,
    processes: int | None = None,
    cpu: bool = False,
    with_prediction: bool = True,
    with_data: bool = True,
    dry_run: bool = False,
    trust_remote_code: bool = False,
) -> PreparedRun:
    """Read, resolve, inspect, group and predict.

    Args:
        recipe_path: The recipe.
        config_path: The accelerate YAML (any dialect ``config`` reads).
        processes: Processes the launch will have, if the command line says so.
        cpu: Train on the CPU whatever the YAML says.
        with_prediction: Predict the memory with ``planning``.
        with_data: Open (and tokenise) the data once, here, so that a mistake is one line.
        dry_run: The run will start on another machine: this one may lack its GPUs, and only
            the first row of the data is read.
        trust_remote_code: Whether the model's own code may run.

    Raises:
        FsdptoolError: A mistake in the inputs, in one line.
    """
    from fsdptool.config import read_settings
    from fsdptool.config.recipe import read_recipe
    from fsdptool.inspection import inspect
    from fsdptool.modeling.context_parallel import check_context
    from fsdptool.modeling.methods import method_of
    from fsdptool.modeling.objective import objective_for
    from fsdptool.modeling.units import plan_units
    from fsdptool.source import consented, weights_left_out, with_places

    refuse_old(training=True)
    files = {RECIPE: _read(recipe_path), ACCELERATE: _read(config_path)}
    recipe = with_places(read_recipe(recipe_path), recipe_path.parent)
    recipe = consented(recipe, recipe_path, trust_remote_code=trust_remote_code)
    check_trackers(recipe)
    reading = read_settings(config_path, consumer="fsdptool")
    settings = reading.require()
    settings = replace(settings, use_cpu=cpu or settings.use_cpu)
    device = choose_device(settings, config_path, dry_run=dry_run)
    without_gpus = dry_run and device == "cuda" and not count_gpus()
    world_size, per_machine = count_processes(
        settings, device, processes, config_path, machine_unknown=without_gpus
    )
    settings = replace(settings, num_processes=world_size, use_cpu=device == "cpu")
    _check_mesh(settings, world_size, config_path)
    _check_length(recipe, recipe_path)
    recipe, spec = _model(recipe, recipe_path)
    run = _resolve(recipe, settings, world_size)
    # The folder keeps the batch as it was given: a run may be resumed on other ranks.
    recipe = replace(run.recipe, batch=recipe.batch)
    check_context(spec, run)
    _check_attention(recipe, spec, device, packages=not without_gpus)
    objective_for(recipe, spec)
    anatomy = inspect(spec)
    run, compilation, fused_loss = _decide(anatomy, run, on_this_machine=not without_gpus)
    recipe = replace(recipe, sharding=run.recipe.sharding, objective=run.recipe.objective)
    bugs = diagnostics(own_facts(run), installed(), str(recipe_path))
    units = plan_units(anatomy, run)
    teacher_spec, teacher_units = _teacher(run, recipe_path)
    if teacher_spec is not None:
        method_of(recipe).check_teacher(spec, teacher_spec)
    made_up = recipe.data.source == "synthetic" and recipe.evaluation.data is None
    recipe = _check_sources(recipe, spec, opened=with_data and not made_up, checked=with_data or dry_run)
    prediction, notes = _predict(spec, anatomy, run, device) if with_prediction else (None, ())
    # A prediction has already built a batch of this recipe, or has cached it and needs no torch.
    if with_data and made_up and prediction is None:
        _check_data(recipe, spec)
    return PreparedRun(
        recipe=recipe,
        settings=settings,
        spec=spec,
        units=units,
        teacher_spec=teacher_spec,
        teacher_units=teacher_units,
        device=device,
        world_size=world_size,
        per_machine=per_machine,
        prediction=prediction and replace(prediction, compilation=compilation, fused_loss=fused_loss),
        diagnostics=(*(item for item in reading.diagnostics if item.severity != "error"), *bugs),
        notes=(
            *(finding.message for finding in untested_versions()),
            *weights_left_out(spec, recipe.model),
            *((compilation.text,) if device == "cuda" else ()),
            *((fused_loss.text,) if fused_loss.fused else ()),
            *notes,
        ),
        files=files,
        recipe_path=recipe_path,
        unchecked=(
            *(("gpus",) if without_gpus else ()),
            *(() if with_prediction else ("memory",)),
            *(() if with_data else ("data",)),
        ),
    )


def _check_length(recipe: Recipe, path: Path) -> None:
    if recipe.steps is None and recipe.epochs is None:
        raise ConfigError(f"{path} sets neither steps nor epochs", help="set one of them")


_PACKAGES: Mapping[Attention, tuple[str, str]] = {
    "flash_attention_2": ("flash_attn", "flash-attn"),
    "flash_attention_3": ("flash_attn_interface", "flash-attn-3"),
}
"""Modules of attention kernels and their distributions; ``kernels`` fetches either (transformers 5.23)."""


def _check_attention(recipe: Recipe, spec: ModelSpec, device: Device, *, packages: bool) -> None:
    """Check that the attention of a recipe can run, and does what the recipe asks.

    Args:
        recipe, spec: The recipe and its model.
        device: Of the run.
        packages: Whether this machine is the one that needs the packages.

    Raises:
        ConfigError: It is a kernel for GPUs and the run has none, its package is missing, or it would join
            packed documents.
    """
    attention = recipe.model.attention
    usual = "set model.attention: sdpa"
    if device == "cpu" and attention in FUSED_ATTENTION:
        raise ConfigError(f"{attention} runs on GPUs alone, and this run is on the CPU", help=usual)
    module, package = _PACKAGES.get(attention, (None, ""))
    if packages and module is not None and not (find_spec(module) or find_spec("kernels")):
        raise ConfigError(
            f"{attention} needs a package that is not installed: {package} or kernels",
            help=f"pip install kernels, or {usual}",
        )
    _check_packing(recipe, spec)


def _check_packing(recipe: Recipe, spec: ModelSpec) -> None:
    """Check that the attention of a recipe keeps packed documents apart.

    Raises:
        ConfigError: It would attend across documents and say nothing: transformers' flash attention looks for
            the documents of one row alone (5.23, ``modeling_flash_attention_utils.py:_is_packed_sequence``).
    """
    from fsdptool.modeling.objective import objective_for

    data, size = recipe.data, recipe.batch.micro_batch
    apart = data.packing and data.document_mask and data.source not in ("synthetic", "python")
    if recipe.model.attention not in _PACKAGES or size == 1 or not apart:
        return
    if objective_for(recipe, spec).samples == "documents":
        raise ConfigError(
            f"{recipe.model.attention} keeps packed documents apart in micro-batches of one sequence alone,"
            f" and batch.micro_batch is {size}",
            help="set batch.micro_batch: 1, or model.attention: sdpa",
        )


def _check_sources(recipe: Recipe, spec: ModelSpec, *, opened: bool, checked: bool) -> Recipe:
    """Check that the inputs of the model are known, and that the data of a run can be read.

    Returns the recipe, with the number of samples of streams that were opened.

    Args:
        recipe: The recipe.
        spec: The model.
        opened: Open it and read its first rows.
        checked: If it is not opened, check its libraries and its place.
    """
    from fsdptool.inspection.micro_batch import batch_spec
    from fsdptool.training.data.build import with_counts
    from fsdptool.training.data.sources import check_place

    batch_spec(spec, recipe)  # a plan may know the states alone; a run needs its inputs
    if checked:
        _check_libraries(recipe)
    if opened:
        recipe = with_counts(recipe, spec)
        _check_data(recipe, spec)
    elif checked:
        check_place(recipe.data)
    return recipe


def _decide(
    anatomy: Anatomy, run: ResolvedRun, *, on_this_machine: bool
) -> tuple[ResolvedRun, Compilation, FusedLoss]:
    from fsdptool.modeling.compilation import decide_compilation
    from fsdptool.modeling.fused_loss import decide_fused_loss

    run, compilation = decide_compilation(anatomy, run, on_this_machine=on_this_machine)
    run, fused_loss = decide_fused_loss(anatomy, run)
    return run, compilation, fused_loss


def _resolve(recipe: Recipe, settings: FsdpSettings, ranks: int) -> ResolvedRun:
    """Return the run, after refusing a global batch that the ranks cannot share."""
    from fsdptool.modeling.methods import method_of
    from fsdptool.modeling.resolve import resolve_run
    from fsdptool.training.data.build import share_of

    method_of(recipe).check(recipe, settings)
    share_of(recipe, rank=0, world=settings.mesh.resolve(ranks).data_ranks)
    return resolve_run(recipe, settings, ranks=ranks)


def _model(recipe: Recipe, path: Path) -> tuple[Recipe, ModelSpec]:
    """Return the model of a recipe, and the recipe with the method of an adapter that it names.

    Raises:
        FsdptoolError: The model, its adapter or its weights cannot be used.
    """
    from fsdptool.config.recipe import given_keys
    from fsdptool.source import adapted, check_continues, check_weights, resolve_choice

    spec = resolve_choice(recipe.model, path.parent)
    recipe = adapted(recipe, spec, given_keys(path))
    check_continues(recipe, spec)
    check_weights(spec, recipe.model)
    return recipe, spec


def absolute_job(
    recipe_path: Path,
    config_path: Path,
    output: Path,
    cluster_path: Path | None,
    options: tuple[str, ...],
    *,
    trust_remote_code: bool = False,
) -> MultiNodeJob:
    """Return what several machines need to start a run, after checking the recipe and the YAML.

    Paths become absolute. Devices of this machine do not matter: it need not be one of them.

    Raises:
        FsdptoolError: A mistake in the inputs, in one line.
    """
    from fsdptool.config import read_settings
    from fsdptool.config.recipe import read_recipe
    from fsdptool.source import consented

    consented(read_recipe(recipe_path), recipe_path, trust_remote_code=trust_remote_code)
    settings = read_settings(config_path, consumer="fsdptool").require()
    cluster = None
    if cluster_path is not None:
        from fsdptool.planning.clusters import read_cluster

        cluster = read_cluster(cluster_path).cluster
    nodes = max(settings.num_machines, 1)
    world_size = settings.num_processes
    if world_size is None or world_size < 1:
        if cluster is None:
            raise ConfigError(f"{config_path} does not set num_processes", help="set it, or give --cluster")
        world_size = cluster.world_size
    if cluster is not None and (nodes, world_size) != (cluster.nodes, cluster.world_size):
        raise ConfigError(
            f"{config_path} is for {world_size} processes on {nodes} machines, the cluster has"
            f" {cluster.world_size} on {cluster.nodes}",
            help="change num_processes and num_machines, or the cluster description",
        )
    if world_size % nodes:
        raise ConfigError(
            f"{config_path}: {world_size} processes cannot be divided equally among {nodes} machines",
            help="make num_processes a multiple of num_machines",
        )
    _check_mesh(settings, world_size, config_path)
    return MultiNodeJob(
        recipe_path.absolute(),
        config_path.absolute(),
        output.absolute(),
        nodes,
        world_size // nodes,
        not settings.use_cpu,
        dict(cluster.environment) if cluster else {},
        (*options, "--trust-remote-code") if trust_remote_code else options,
    )


def _read(path: Path) -> str:
    if not path.exists():
        raise ConfigError(f"{path} does not exist", help="check the path")
    try:
        return read_bytes(path).decode("utf-8")
    except UnreadableError as error:
        raise ConfigError(f"{path}: {error.message}", help="check the path") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start})", help="save it as UTF-8") from None


def _teacher(run: ResolvedRun, recipe_path: Path) -> tuple[ModelSpec | None, UnitPlan | None]:
    from fsdptool.inspection import inspect
    from fsdptool.modeling.methods import method_of
    from fsdptool.modeling.units import plan_teacher
    from fsdptool.source import check_weights, resolve_choice

    choice = method_of(run.recipe).teacher_choice(run.recipe)
    if choice is None:
        return None, None
    spec = resolve_choice(choice, recipe_path.parent)
    check_weights(spec, choice)
    return spec, plan_teacher(inspect(spec), run)


def _check_libraries(recipe: Recipe) -> None:
    """Refuse what the installed libraries cannot train."""
    from fsdptool.modeling.methods import method_of
    from fsdptool.modeling.optimizer_costs import check_optimizer

    check_optimizer(recipe.optimizer)
    method_of(recipe).check_libraries(recipe)


def _check_data(recipe: Recipe, spec: ModelSpec) -> None:
    from fsdptool.training.data import prepare as prepare_data

    prepare_data(recipe, spec)


def _predict(
    spec: ModelSpec, anatomy: Anatomy, run: ResolvedRun, device: Device
) -> tuple[Candidate | None, tuple[str, ...]]:
    from fsdptool.planning.candidate.estimator import predict

    try:
        cluster = None
        if device == "cuda":
            cluster = local_cluster(run.settings)
        candidate = predict(spec, anatomy, run, cluster=cluster, profile=device_profile(device))
    except FsdptoolError as error:
        return None, (f"memory could not be predicted: {error.message}",)
    if run.recipe.data.padded == "longest":
        length = run.recipe.batch.sequence_length
        return candidate, (
            f"memory was predicted for sequences of {length} tokens; micro-batches whose longest sample is "
            "shorter need less (`fsdptool plan --lengths` predicts them)",
        )
    return candidate, ()


def choose_device(settings: FsdpSettings, config_path: Path, *, dry_run: bool = False) -> Device:
    """Return the device of the run: the CPU only if the file sets it.

    A dry run may be on a machine without GPUs.

    Raises:
        ConfigError: The file is for GPUs and there are none.
    """
    if settings.use_cpu:
        return "cpu"
    if not dry_run and not count_gpus():
        # Where it is missing, it is what to install first: nobody counts GPUs without it.
        import torch  # noqa: F401

        raise ConfigError(
            f"{config_path} is for {settings.num_processes or 'some'} GPUs but "
            + (why_unused() or "this machine has none"),
            help="run it on a machine with GPUs, or train on the CPU with use_cpu: true (or --cpu)",
        )
    return "cuda"


def count_processes(
    settings: FsdpSettings,
    device: Device,
    processes: int | None,
    config_path: Path,
    *,
    machine_unknown: bool = False,
) -> tuple[int, int]:
    """Return the world size and the processes per machine.

    Args:
        settings, device, processes, config_path: What the file and the command line say.
        machine_unknown: The run will start on a machine whose GPUs are not known here.

    Raises:
        ConfigError: The file is for more processes than the launch or this machine has.
    """
    world_size = processes if processes is not None else settings.num_processes
    if machine_unknown and world_size in (None, -1):
        raise ConfigError(
            f"{config_path} does not set num_processes, and this machine has no GPUs to count",
            help="set num_processes, or give --processes",
        )
    if world_size is None or world_size == -1:
        world_size = max(count_gpus(), 1) if device == "cuda" else 1
    if processes is not None and settings.num_processes not in (None, -1, processes):
        raise ConfigError(
            f"{config_path} is for {settings.num_processes} processes and the launch has {processes}",
            help="change num_processes, or leave --processes out",
        )
    if world_size < 1:
        raise ConfigError(f"{config_path}: num_processes is {world_size}", help="set it to 1 or more")
    machines = max(settings.num_machines, 1)
    if world_size % machines:
        raise ConfigError(
            f"{config_path}: {world_size} processes cannot be divided equally among {machines} machines",
            help="make num_processes a multiple of num_machines",
        )
    per_machine = world_size // machines
    available = visible_gpus(settings)
    if device == "cuda" and per_machine > available and not machine_unknown:
        raise ConfigError(
            f"{config_path} is for {per_machine} processes on this machine, which offers {available} GPUs",
            help="lower num_processes, change gpu_ids, or set use_cpu: true",
        )
    return world_size, per_machine


def place_nodes(
    settings: FsdpSettings,
    node_rank: int | None,
    rendezvous: str | None,
    launch_id: str | None,
    *,
    dry_run: bool = False,
) -> Nodes:
    """Return the rendezvous of the nodes: from the command line, else from the YAML.

    A dry run that is given none shows ``node0`` in its place, as ``fsdptool launch`` does.

    Raises:
        ConfigError: There are several nodes without a rendezvous endpoint, or a rank is out of range.
    """
    count = max(settings.num_machines, 1)
    if count == 1:
        if node_rank:
            raise ConfigError(f"--node-rank {node_rank}: the configuration is for one machine")
        return Nodes()
    rank = node_rank if node_rank is not None else settings.machine_rank
    if not 0 <= rank < count:
        raise ConfigError(f"--node-rank {rank}: the configuration is for {count} machines")
    endpoint = rendezvous
    if endpoint is None and settings.main_process_ip:
        endpoint = f"{settings.main_process_ip}:{settings.main_process_port or PORT}"
    if endpoint is None and dry_run:
        endpoint = f"{FIRST_NODE}:{PORT}"
    if endpoint is None:
        raise ConfigError(
            f"the configuration is for {count} machines and does not set a rendezvous endpoint",
            help="set main_process_ip, or use --rendezvous HOST:PORT",
        )
    return Nodes(count, rank, endpoint, launch_id)


def _check_mesh(settings: FsdpSettings, world_size: int, config_path: Path) -> None:
    try:
        settings.mesh.resolve(world_size)
    except ValueError as error:
        raise ConfigError(
            f"{config_path}: {error}", help="change parallelism_config or num_processes"
        ) from error
