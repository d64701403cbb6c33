"""Read options into a request: canonical inputs that a plan document carries.

Files are read first, options override them. Everything a plan depends on ends in
:class:`~fsdptool.records.plan.PlanInputs`, so that nothing else is needed later.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from fsdptool.config.dialects.protocol import LAUNCH
from fsdptool.config.result import WRITE_IT
from fsdptool.errors import ConfigError, PlanError
from fsdptool.files.lengths import read_lengths
from fsdptool.planning.clusters import Offer, make_cluster, parse_rate, parse_size, read_cluster
from fsdptool.planning.hardware import find_gpu, machine_for
from fsdptool.planning.request.file_run import file_run, ranks_of, read_file_run
from fsdptool.planning.request.followed_loop import OWN, follow, masked_from_rows, training_loop, unread_keys
from fsdptool.planning.request.options import OPTIMAL, Options, closed_by, declared, read_options, settings_of
from fsdptool.planning.request.recipe import build_recipe, set_fields
from fsdptool.records.cluster import EXPANDABLE, Cluster, DeviceProfile, device_profile
from fsdptool.records.described_run import DescribedRun
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.lengths import LengthCount, SampleLengths
from fsdptool.records.plan import (
    BESIDE_TP,
    Assumption,
    Pipeline,
    PlanInputs,
    PlanLimit,
    Preference,
    SearchScope,
    UnreadKeys,
)
from fsdptool.records.plan_details import PipelineSchedule
from fsdptool.records.recipe import PADDING_MULTIPLE, Recipe
from fsdptool.records.sharding import FsdpSettings

if TYPE_CHECKING:
    from fsdptool.config.result import Reading


@dataclass(frozen=True, slots=True)
class Request:
    """Canonical inputs and what was noticed on the way.

    Attributes:
        inputs: Everything that a plan depends on.
        diagnostics: What was noticed while they were read.
        unread: Keys of the configuration file that change memory and were not read.
    """

    inputs: PlanInputs
    diagnostics: tuple[Diagnostic, ...] = ()
    unread: UnreadKeys | None = None


def read_request(options: Options, described: DescribedRun | None = None) -> Request:
    """Return the canonical inputs of ``options``; nothing is built yet.

    Args:
        options: As given.
        described: The run to plan, where it was read already; None looks whether the reference is a file that
            describes one.

    Raises:
        PlanError: The options contradict each other or name what is not there.
        ConfigError: A recipe or configuration file cannot be used.
    """
    options = read_options(options)
    _check_cluster(options)
    described, options, limits = _from_file(options, described)
    reading = _reading(options)
    unread = unread_keys(reading, options)
    followed = follow(options, reading, described.program if described is not None else None)
    options = followed.options
    recipe = build_recipe(options)
    lengths = _lengths(options)
    if lengths is not None and recipe.batch.sequence_length is None:
        longest = -(-lengths.longest // PADDING_MULTIPLE) * PADDING_MULTIPLE
        recipe = replace(recipe, batch=replace(recipe.batch, sequence_length=longest))
    settings, diagnostics = _settings(options, reading, options.get("profile"))
    if reading is not None and recipe.method.name == "full":
        diagnostics = (*diagnostics, *_unread_adapter(reading))
    profile = cast("DeviceProfile", options.get("profile") or _own_profile(options, settings))
    offers = _offers(options, settings, profile)
    clusters = tuple(_with_segments(offer.cluster, options) for offer in offers)
    diagnostics += tuple(diagnostic for offer in offers for diagnostic in offer.diagnostics)
    table = _path(options.get("machine"))
    machines = tuple(machine_for(cluster.gpu, table=table) for cluster in clusters)
    assumed_ranks = tuple(_assumed_ranks(options, described, settings, clusters[0]))
    settings = replace(
        settings,
        use_cpu=profile != "cuda",
        num_processes=clusters[0].world_size,
        num_machines=clusters[0].nodes,
    )
    search = _search_scope(options, profile)
    if recipe.sharding.sequence_parallel and settings.mesh.tp == 1 and (search == "none" or "tp" in options):
        raise PlanError(
            "sequence parallelism needs tensor-parallel ranks", help="give --tp 2 or more, or leave it out"
        )
    assumed = _assumed(options, recipe, settings)
    pipeline = _pipeline(options, clusters)
    if pipeline.ranks > 1:
        search = "none"
    version = 1 if described is not None and described.fsdp == 1 else 2
    outputs = described.keeps_logits if described is not None else None
    loop = training_loop(followed, settings.mixed_precision != "no", version=version, outputs=outputs)
    rows = masked_from_rows(followed, recipe, lengths, described)
    loop = replace(loop, assumed=assumed, masked_from_rows=rows)
    inputs = PlanInputs(
        recipe=recipe,
        settings=settings,
        clusters=clusters,
        machines=machines,
        profile=profile,
        wrap=tuple(options.get("wrap", ())),
        exclude=tuple(options.get("exclude", ())),
        search=search,
        fixed=_fixed(options),
        max_batch=options.get("max_batch", False),
        optimal_checkpointing=_optimal_checkpointing(options, clusters),
        prefer=_prefer(options, clusters),
        loop=loop,
        lengths=lengths,
        pipeline=pipeline,
        run=described,
        limits=limits,
        assumed_ranks=assumed_ranks,
    )
    return Request(inputs, diagnostics, unread)


def _from_file(
    options: Options, run: DescribedRun | None
) -> tuple[DescribedRun | None, Options, tuple[PlanLimit, ...]]:
    """Return the run of a training file that is given for the model, and the options that it leads to.

    Given options override the file. A recipe of fsdptool's own is taken as ``--recipe`` takes it.
    """
    reference, config = options.get("reference"), options.get("config")
    if run is None and reference is None and "recipe" not in options and isinstance(config, str | Path):
        # A training file that names its model, given as the configuration of none: the run that it describes.
        with suppress(PlanError):  # settings of accelerate alone
            run = read_file_run(str(config))
        if run is not None:
            reference = str(config)
            options = cast("Options", {name: value for name, value in options.items() if name != "config"})
    if run is None and reference is not None:
        run = read_file_run(reference)
    if run is not None and run.program == OWN:
        if "recipe" in options:
            raise PlanError(
                f"{reference} is a recipe, and --recipe names another", help="give one of the two"
            )
        own = {name: value for name, value in options.items() if name not in ("reference", "model")}
        given = {"reference": options["model"]} if "model" in options else {}
        return None, cast("Options", {**own, **given, "recipe": reference}), ()
    if run is None:
        if "model" in options:
            raise PlanError(
                "--model names the model of a training file, and none is given",
                help="name the model alone (fsdptool plan MODEL ...), or a training file before --model",
            )
        return None, options, ()
    reference = reference or "the file"
    for name in ("recipe", "config"):
        if name in options:
            raise PlanError(
                f"{reference} describes a whole run: --{name} would describe another",
                help=f"leave --{name} out, or give the model instead of the file",
            )
    cpu = (options.get("profile") or "cuda") != "cuda"
    ranks = _ranks(options, run, reference)
    trusted = options.get("trust_remote_code", False)
    made = file_run(
        run,
        options.get("model"),
        reference,
        ranks,
        cpu=cpu,
        fused=not cpu,
        attention=options.get("attention"),
        decided=options.keys(),
        trusted=trusted,
    )
    own = {name: value for name, value in options.items() if name not in ("reference", "model")}
    settings = made.settings
    if cpu or options.keys() & {"gpus", "nodes", "clusters"}:
        settings = replace(settings, num_machines=1)
    merged = {**made.options, **own, "recipe": made.recipe, "config": settings}
    return run, cast("Options", merged), made.limits


def _ranks(options: Options, run: DescribedRun, where: str) -> int:
    """Return the ranks that a described run is planned for.

    Raises:
        PlanError: Neither the file nor an option says how many ranks share the model, or clusters differ in
            size for a run whose ranks hold a copy each.
    """
    clusters = options.get("clusters")
    if clusters:
        gpus_file = _path(options.get("gpus_file"))
        sizes = [
            (
                item if isinstance(item, Cluster) else read_cluster(Path(item), gpus_file=gpus_file).cluster
            ).world_size
            for item in clusters
        ]
        if run.fsdp == "none" and len(set(sizes)) > 1:
            raise PlanError(
                f"{where} does not use FSDP, and the clusters have different numbers of GPUs",
                help="plan one cluster at a time",
            )
        return sizes[0]
    given = "gpus" in options or "nodes" in options
    ranks = (options.get("gpus") or 1) * (options.get("nodes") or 1) if given else None
    return ranks_of(run, ranks, where, "--gpus 8")


def _assumed_ranks(
    options: Options, run: DescribedRun | None, settings: FsdpSettings, cluster: Cluster
) -> Iterator[Literal["processes", "nodes"]]:
    """Yield what neither the file of a plan nor an option says of its ranks.

    accelerate's own formats are for one machine unless they say otherwise.
    """
    if options.keys() & {"clusters", "gpus"} or (run is None and "config" not in options):
        return
    if (run.processes if run is not None else settings.num_processes) is None:
        yield "processes"
    if run is not None and run.nodes is None and "nodes" not in options and cluster.world_size > 1:
        yield "nodes"


def _assumed(options: Options, recipe: Recipe, settings: FsdpSettings) -> tuple[Assumption, ...]:
    """Return what is assumed about another training loop.

    Raises:
        PlanError: fsdptool does it itself, or it needs what is not planned.
    """
    names = set(options.get("assume", ()))
    if not names:
        return ()
    beside = names & set(BESIDE_TP)
    if beside and settings.mesh.tp == 1:
        raise PlanError(
            f"--assume {min(beside)} is for tensor-parallel plans: without --tp, sharding.compile and"
            " --precision fp8 do it",
            help="give --tp 2 or more, or leave it out",
        )
    scaled = names & {"float8_rowwise", "mxfp8"}
    if scaled and "float8" not in names and settings.mixed_precision != "fp8":
        raise PlanError(
            f"--assume {min(scaled)} says how float8 products are scaled, and the plan has none",
            help="add --precision fp8, or leave it out",
        )
    if "async_tp" in names and not recipe.sharding.sequence_parallel:
        raise PlanError(
            "--assume async_tp overlaps what sequence parallelism gathers and scatters",
            help="add --sequence-parallel",
        )
    if beside and "compile" not in beside:
        raise PlanError(
            f"--assume {min(beside)} needs compiled blocks: torch.compile fuses casts and collectives",
            help="add --assume compile",
        )
    return tuple(name for name in get_args(Assumption) if name in names)


def _pipeline(options: Options, clusters: Sequence[Cluster]) -> Pipeline:
    """Return the pipeline that is planned; no search turns it, and no other question can be asked of it."""
    ranks = options.get("pp") or 1
    virtual = options.get("pp_virtual")
    schedule = cast(
        "PipelineSchedule", options.get("pp_schedule") or ("interleaved" if virtual is not None else "1f1b")
    )
    if ranks == 1:
        for name in ("pp_schedule", "pp_virtual"):
            if name in options:
                flag = declared()[name].flags[0]
                raise PlanError(f"{flag} needs pipeline stages", help="give --pp 2 or more, or leave it out")
        return Pipeline()
    if schedule == "1f1b" and virtual is not None:
        raise PlanError(
            "--pp-virtual needs the interleaved schedule",
            help="give --pp-schedule interleaved, or leave it out",
        )
    given = [name for name in ("search", "max_batch", "lengths") if options.get(name)]
    given += ["checkpointing"] if options.get("checkpointing") == OPTIMAL else []
    if given:
        flag = declared()[given[0]].flags[0].split("/")[0]
        value = f" {OPTIMAL}" if given[0] == "checkpointing" else ""
        raise PlanError(f"{flag}{value} is not supported beside --pp", help="leave one of the two out")
    if len(clusters) > 1:
        raise PlanError("--pp plans one cluster", help="give one --cluster")
    return Pipeline(ranks, schedule, (virtual or 2) if schedule == "interleaved" else 1)


def _lengths(options: Options) -> SampleLengths | None:
    path = options.get("lengths")
    if path is None:
        return None
    counts = read_lengths(path)
    return SampleLengths(tuple(LengthCount(length, count) for length, count in counts.items()))


def _search_scope(options: Options, profile: str) -> SearchScope:
    """CPU plans search only on request: without a step time no configuration is preferable."""
    search = options.get("search")
    if options.get("quick") and (search or (search is None and profile == "cuda")):
        return "first"
    if search is None:
        return "open" if profile == "cuda" and not options.get("max_batch") else "none"
    return "wide" if search else "none"


def _fixed(options: Options) -> tuple[str, ...]:
    """Return the closed dimensions: by an option or, unless a search is requested, by a file.

    An accelerate YAML decides what options set in the settings, a recipe what they set in the recipe.
    """
    named = [name for name in options if name != "checkpointing" or options["checkpointing"] != OPTIMAL]
    closed = closed_by(named)
    for source, root in (("config", "settings."), ("recipe", "recipe.")):
        if not options.get("search") and source in options:
            closed |= closed_by([n for n, item in declared().items() if item.option.sets.startswith(root)])
    return tuple(sorted(closed))


def _optimal_checkpointing(options: Options, clusters: Sequence[Cluster]) -> bool:
    if options.get("checkpointing") != OPTIMAL:
        return False
    if any(cluster.gpu is None for cluster in clusters):
        raise PlanError(
            "--checkpointing optimal needs GPUs: the step time of CPU processes is unknown",
            help="name the GPU that the run is for: --gpu H100-80GB-SXM --gpus 8",
        )
    return True


def _prefer(options: Options, clusters: Sequence[Cluster]) -> Preference:
    priced = all(cluster.price_per_gpu_hour is not None for cluster in clusters)
    prefer = options.get("prefer") or "speed"
    if prefer == "price" and not priced:
        raise PlanError("a cluster has no price", help="set price_per_gpu_hour in each cluster file")
    return "price" if prefer == "price" else "speed"


def _own_profile(options: Options, settings: FsdpSettings) -> DeviceProfile:
    """A file that says ``use_cpu`` is planned for CPU ranks unless hardware is named."""
    named = "gpu" in options or "clusters" in options
    return device_profile("cpu" if settings.use_cpu and not named else "cuda")


def _reading(options: Options) -> Reading | None:
    config = options.get("config")
    if config is None or isinstance(config, FsdpSettings):
        return None
    reading = _read(Path(config))
    given = {"num_processes": ("gpus", "clusters"), "num_machines": ("nodes", "clusters")}
    known = {name for name, ways in given.items() if options.keys() & set(ways)}
    if words := reading.unknown(but=known | (LAUNCH - given.keys())):
        flags = " and ".join(f"--{ways[0]}" for name, ways in given.items() if name in reading.open)
        raise ConfigError(f"{config}: {words}", help=f"give {flags}" if flags else WRITE_IT)
    return reading


def _settings(
    options: Options, reading: Reading | None, profile: str | None
) -> tuple[FsdpSettings, tuple[Diagnostic, ...]]:
    diagnostics: tuple[Diagnostic, ...] = ()
    config = options.get("config")
    if isinstance(config, FsdpSettings):
        settings = config
    elif reading is not None and reading.settings is not None:
        settings, diagnostics = reading.settings, tuple(reading.diagnostics)
    else:
        # Half precision gains nothing on CPU, so it is used only on request.
        settings = FsdpSettings(mixed_precision="bf16" if profile in (None, "cuda") else "no")
    return set_fields(settings, settings_of(options, "settings")), diagnostics


def _read(path: Path) -> Reading:
    """Return the reading of a file without errors."""
    from fsdptool.config import read_settings

    reading = read_settings(path)
    if reading.written_in is None or "fsdptool" in reading.written_in.consumers:
        own = read_settings(path, consumer="fsdptool")  # other programs' files are judged for these
        if not any(item.code == "FSD114" for item in own.diagnostics):  # as are their command lines
            reading = own
    errors = [item for item in reading.diagnostics if item.severity == "error"]
    if reading.open.keys() - LAUNCH and not errors:
        raise ConfigError(f"{path}: {reading.unknown(but=LAUNCH)}", help=WRITE_IT)
    if errors or reading.settings is None:
        first = errors[0] if errors else None
        place = f"{path}:{first.line}" if first is not None and first.line else str(path)
        if first is None:
            raise ConfigError(
                f"{path} does not configure FSDP",
                help=f"if it describes a whole run, name it in place of the model: fsdptool plan {path}",
            )
        raise ConfigError(
            f"{place}: {first.message}", help=f"fsdptool validate {path} lists every finding and its fix"
        )
    return reading


UNREAD_ADAPTER = "PLN016"
_ADAPTERS: Mapping[str, tuple[Any, ...]] = {
    "adapter": ("lora", "qlora"),
    "finetuning_type": ("lora",),
    "use_peft": (True,),
    "model_type": ("lora",),
}
"""Keys with which axolotl, LLaMA-Factory, TRL and SimpleTuner ask for LoRA, and those values."""


def _unread_adapter(reading: Reading) -> Iterator[Diagnostic]:
    root = reading.document.root if reading.document is not None else None
    if root is None or root.kind != "map":
        return
    for key, values in _ADAPTERS.items():
        entry = root.get(key) or root.get(f"--{key}")
        if entry is not None and entry.node.value in values:
            yield Diagnostic(
                UNREAD_ADAPTER,
                "warning",
                f"{reading.path} asks for LoRA ({entry.key}), which a plan does not read from there: full"
                " fine-tuning is planned",
                help="give --method lora with --lora-rank and --lora-target, or a recipe",
                path=reading.path,
            )


def _check_cluster(options: Options) -> None:
    """Refuse what a cluster file says itself, before anything is resolved."""
    for name in ("gpu", "gpus", "nodes", "network", "host_memory", "price"):
        if options.get("clusters") and name in options:
            raise PlanError(
                f"both --cluster and --{name.replace('_', '-')} are given",
                help="a cluster file says all of this itself: write it there, or leave --cluster out",
            )


def _offers(options: Options, settings: FsdpSettings, profile: str) -> tuple[Offer, ...]:
    gpus_file, clusters = _path(options.get("gpus_file")), options.get("clusters")
    if clusters:
        return tuple(
            Offer(item) if isinstance(item, Cluster) else read_cluster(Path(item), gpus_file=gpus_file)
            for item in clusters
        )
    nodes = options.get("nodes")
    nodes = settings.num_machines if nodes is None else nodes
    count = options["gpus"] if "gpus" in options else _processes(settings, nodes)
    host = parse_size(options.get("host_memory"))
    gpu = options.get("gpu")
    if profile != "cuda":
        if gpu is not None:
            raise PlanError(f"profile {profile} has no GPU", help="leave --gpu out, or use --profile cuda")
        host = host if host is not None else _own_memory()
        return (Offer(make_cluster(None, count or 1, nodes, host_memory_bytes=host)),)
    if gpu is None:
        raise PlanError(
            "no GPU is given",
            help="give --gpu H100-80GB-SXM --gpus 8, or --cluster FILE; on CPU: --profile cpu-gloo",
        )
    match = find_gpu(gpu, gpus_file=gpus_file)
    cluster = make_cluster(
        match.gpu,
        1 if count is None else count,
        nodes,
        inter_node_bandwidth=parse_rate(options.get("network")),
        host_memory_bytes=host,
        price_per_gpu_hour=options.get("price"),
    )
    return (Offer(cluster, (match.diagnostic,) if match.diagnostic else ()),)


def _with_segments(cluster: Cluster, options: Options) -> Cluster:
    """Return the cluster with the variable of expandable segments, if they are requested."""
    if not options.get("expandable_segments"):
        return cluster
    if cluster.gpu is None:
        raise PlanError("--expandable-segments is for GPUs", help="leave it out: this plan is for the CPU")
    return replace(cluster, environment={**cluster.environment, **EXPANDABLE})


def _path(value: str | Path | None) -> Path | None:
    return Path(value) if value is not None else None


def _processes(settings: FsdpSettings, nodes: int) -> int | None:
    if settings.num_processes is None:
        return None
    if nodes < 1 or settings.num_processes % nodes:
        raise PlanError(
            f"num_processes {settings.num_processes} is not a multiple of {nodes} nodes",
            help="num_processes counts all ranks of all machines",
        )
    return settings.num_processes // nodes


def _own_memory() -> int:
    """Return this machine's memory: the limit of CPU runs without --host-memory."""
    import psutil

    return int(psutil.virtual_memory().total)
