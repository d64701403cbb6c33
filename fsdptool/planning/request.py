"""What a person asks to be planned, as options, and its canonical form, as records.

Files come first, options given beside them win. Everything a plan depends on ends in
:class:`PlanInputs`, which a plan document carries so that nothing else is needed later.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fsdptool.errors import ConfigError, PlanError
from fsdptool.planning.clusters import Offer, make_cluster, parse_rate, parse_size, read_cluster
from fsdptool.planning.gpu_catalogue import find_gpu
from fsdptool.planning.machine import machine_for
from fsdptool.planning.options import PROFILES, Options, Request
from fsdptool.planning.requested_recipe import build_recipe, choice, given, one_of
from fsdptool.records.cluster import Cluster
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.plan import MemoryProfile, PlanInputs, Preference, SearchScope
from fsdptool.records.settings import FsdpSettings


def read_request(options: Options) -> Request:
    """Return the canonical inputs of ``options``; nothing is built yet.

    Raises:
        PlanError: The options contradict each other or name what is not there.
        ConfigError: A recipe or configuration file cannot be used.
    """
    wanted = one_of("profile", options.profile, PROFILES) if options.profile is not None else None
    recipe = build_recipe(options)
    settings, found = _settings(options, wanted)
    profile = wanted or _own_profile(options, settings)
    offers = _offers(options, settings, profile)
    clusters = tuple(offer.cluster for offer in offers)
    found += tuple(diagnostic for offer in offers for diagnostic in offer.diagnostics)
    machines = tuple(machine_for(cluster.gpu, table=options.machine) for cluster in clusters)
    settings = replace(
        settings,
        use_cpu=profile != "cuda",
        num_processes=clusters[0].world_size,
        num_machines=clusters[0].nodes,
    )
    inputs = PlanInputs(
        recipe=recipe,
        settings=settings,
        clusters=clusters,
        machines=machines,
        profile=profile,
        wrap=options.wrap,
        exclude=options.exclude,
        search=_search_scope(options, profile),
        fixed=_fixed(options),
        max_batch=options.max_batch,
        prefer=_prefer(options, clusters),
    )
    return Request(inputs, found)


def _search_scope(options: Options, profile: str) -> SearchScope:
    """Nobody searches on CPU unless asked: there is no step time to prefer one configuration by."""
    if options.search is None:
        return "open" if profile == "cuda" and not options.max_batch else "none"
    return "wide" if options.search else "none"


_CLOSED_BY_OPTION = {
    "micro_batch": ("micro_batch", "accumulation"),
    "accumulation": ("micro_batch", "accumulation"),
    "checkpointing": ("checkpointing",),
    "reshard": ("reshard_after_forward",),
    "dp_replicate": ("mesh",),
    "dp_shard": ("mesh",),
    "cp": ("cp",),
    "offload": ("cpu_offload",),
    "optimizer_implementation": ("optimizer_implementation",),
    "prefetch": ("prefetch",),
    "gradients": ("gradients",),
    "wrap": ("wrap",),
}
"""Option to the knobs it closes."""

_CLOSED_BY_CONFIG = ("reshard_after_forward", "mesh", "cp", "cpu_offload", "wrap", "checkpointing")
"""What an accelerate YAML decides."""

_CLOSED_BY_RECIPE = ("micro_batch", "accumulation", "optimizer_implementation", "prefetch", "gradients")


def _fixed(options: Options) -> tuple[str, ...]:
    """Return the closed knobs: given as options, or, unless a search was asked for, by a file."""
    closed = {
        knob
        for option, point in _CLOSED_BY_OPTION.items()
        for knob in point
        if getattr(options, option) not in (None, ())
    }
    if not options.search:
        closed |= set(_CLOSED_BY_CONFIG) if options.config is not None else set()
        closed |= set(_CLOSED_BY_RECIPE) if options.recipe is not None else set()
    return tuple(sorted(closed))


def _prefer(options: Options, clusters: Sequence[Cluster]) -> Preference:
    priced = all(cluster.price_per_gpu_hour is not None for cluster in clusters)
    wanted = one_of("prefer", options.prefer or "speed", ("speed", "price"))
    if wanted == "price" and not priced:
        raise PlanError("not every cluster has a price", help="give price_per_gpu_hour in each cluster file")
    return "price" if wanted == "price" else "speed"


def _own_profile(options: Options, settings: FsdpSettings) -> MemoryProfile:
    """A file that says ``use_cpu`` is planned for CPU ranks unless hardware is named."""
    named = options.gpu is not None or options.clusters
    return "cpu-gloo" if settings.use_cpu and not named else "cuda"


def _settings(options: Options, profile: str | None) -> tuple[FsdpSettings, tuple[Diagnostic, ...]]:
    found: tuple[Diagnostic, ...] = ()
    if isinstance(options.config, FsdpSettings):
        settings = options.config
    elif options.config is not None:
        settings, found = _read_config(options.config)
    else:
        # On CPU nobody gains from half precision unless they say so.
        settings = FsdpSettings(mixed_precision="bf16" if profile in (None, "cuda") else "no")
    mesh = given(settings.mesh, dp_replicate=options.dp_replicate, dp_shard=options.dp_shard, cp=options.cp)
    checkpointing = None if options.checkpointing is None else options.checkpointing != "none"
    precision = {"fp32": "no", "no": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
    wanted = choice("precision", options.precision, tuple(precision))
    settings = given(
        settings,
        mesh=mesh,
        activation_checkpointing=checkpointing,
        mixed_precision=precision[wanted] if wanted is not None else None,
        cpu_offload=options.offload,
        reshard_after_forward=None if options.reshard is None else bool(options.reshard),
        wrap_classes=options.wrap or None,
    )
    return settings, found


def _read_config(path: Path) -> tuple[FsdpSettings, tuple[Diagnostic, ...]]:
    from fsdptool.config import read_settings

    reading = read_settings(path, consumer="fsdptool")
    errors = [item for item in reading.diagnostics if item.severity == "error"]
    if errors or reading.settings is None:
        first = errors[0] if errors else None
        place = f"{path}:{first.line}" if first is not None and first.line else str(path)
        message = first.message if first is not None else "no settings could be read"
        raise ConfigError(
            f"{place}: {message}", help=f"fsdptool validate {path} lists every finding and its fix"
        )
    return reading.settings, tuple(reading.diagnostics)


def _offers(options: Options, settings: FsdpSettings, profile: str) -> tuple[Offer, ...]:
    if options.clusters:
        for name in ("gpu", "gpus", "nodes", "network", "host_memory", "price"):
            if getattr(options, name) is not None:
                raise PlanError(
                    f"both --cluster and --{name.replace('_', '-')} are given",
                    help="a cluster file says all of this itself: write it there, or leave --cluster out",
                )
        return tuple(
            Offer(item) if isinstance(item, Cluster) else read_cluster(item, gpus_file=options.gpus_file)
            for item in options.clusters
        )
    nodes = options.nodes if options.nodes is not None else settings.num_machines
    count = options.gpus if options.gpus is not None else _processes(settings, nodes)
    host = parse_size(options.host_memory)
    if profile != "cuda":
        if options.gpu is not None:
            raise PlanError(f"profile {profile} has no GPU", help="leave --gpu out, or use --profile cuda")
        host = host if host is not None else _own_memory()
        return (Offer(make_cluster(None, count or 1, nodes, host_memory_bytes=host)),)
    if options.gpu is None:
        raise PlanError(
            "no GPU is named",
            help="give --gpu H100-80GB-SXM --gpus 8, or --cluster FILE; on CPU: --profile cpu-gloo",
        )
    found = find_gpu(options.gpu, gpus_file=options.gpus_file)
    cluster = make_cluster(
        found.gpu,
        1 if count is None else count,
        nodes,
        inter_node_bandwidth=parse_rate(options.network),
        host_memory_bytes=host,
        price_per_gpu_hour=options.price,
    )
    return (Offer(cluster, (found.diagnostic,) if found.diagnostic else ()),)


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
    """Return this machine's memory: CPU runs are judged by it unless --host-memory says otherwise."""
    import psutil

    return int(psutil.virtual_memory().total)


__all__ = ["Options", "PlanInputs", "Request", "read_request"]
