"""What a person asks to be planned, as options, and its canonical form, as records.

Files come first, options given beside them win. Everything a plan depends on ends in
:class:`PlanInputs`, which a plan document carries so that nothing else is needed later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from fsdptool.errors import ConfigError, PlanError
from fsdptool.planning.catalogue import find_gpu
from fsdptool.planning.clusters import Offer, make_cluster, parse_rate, parse_size, read_cluster
from fsdptool.planning.knobs import split_checkpointing
from fsdptool.planning.machine import Machine, machine_for
from fsdptool.records.cluster import Cluster
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.recipe import (
    Checkpointing,
    Distillation,
    Ema,
    Lora,
    Method,
    ModelChoice,
    Recipe,
)
from fsdptool.records.settings import FsdpSettings

R = TypeVar("R")
PROFILES = ("cuda", "cpu-fake", "cpu-gloo")


@dataclass(frozen=True, slots=True)
class Options:
    """Every knob ``plan`` offers; None means: not given. See ``fsdptool plan --help``."""

    reference: str | None = None
    recipe: Path | Recipe | None = None
    config: Path | FsdpSettings | None = None
    revision: str | None = None
    component: str | None = None
    trust_remote_code: bool | None = None
    overrides: Mapping[str, Any] | None = None
    wrap: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    gpu: str | None = None
    gpus: int | None = None
    nodes: int | None = None
    clusters: tuple[Path | Cluster, ...] = ()
    gpus_file: Path | None = None
    machine: Path | None = None
    network: str | float | None = None
    host_memory: str | int | None = None
    price: float | None = None
    profile: str | None = None
    method: str | None = None
    lora_rank: int | None = None
    lora_targets: tuple[str, ...] | None = None
    lora_base: str | None = None
    adapters: str | None = None
    teacher: str | None = None
    objective: str | None = None
    precision: str | None = None
    dtype: str | None = None
    reduce_dtype: str | None = None
    attention: str | None = None
    optimizer: str | None = None
    optimizer_implementation: str | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    global_batch: int | None = None
    sequence_length: int | None = None
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    checkpointing: str | None = None
    layout: str | None = None
    reshard: bool | int | None = None
    offload: bool | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    cp: int | None = None
    prefetch: int | None = None
    gradients: str | None = None
    ema: float | None = None
    search: bool | None = None
    max_batch: bool = False
    prefer: str | None = None


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The canonical inputs of a plan: plain data that says the same on any machine.

    Attributes:
        recipe, settings: The run.
        clusters: The offers, in the order they were given.
        machines: The machine table's row for each of them.
        profile: Whose memory is predicted.
        wrap, exclude: What the person said about wrap classes.
        search: ``none``, ``open`` (knobs nobody set) or ``wide`` (knobs not set on the command line).
        fixed: Knobs the search leaves alone.
        max_batch: Whether the largest micro-batch is looked for.
        prefer: ``speed`` or ``price``.
        model: What the reference resolved to: family, class, library and a digest of its configuration.
    """

    recipe: Recipe
    settings: FsdpSettings
    clusters: tuple[Cluster, ...]
    machines: tuple[Machine, ...]
    profile: str = "cuda"
    wrap: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    search: str = "none"
    fixed: tuple[str, ...] = ()
    max_batch: bool = False
    prefer: str = "speed"
    model: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Request:
    """Canonical inputs and what was noticed on the way."""

    inputs: PlanInputs
    diagnostics: tuple[Diagnostic, ...] = ()


def read_request(options: Options) -> Request:
    """Return the canonical inputs of ``options``; nothing is built yet.

    Raises:
        PlanError: The options contradict each other or name what is not there.
        ConfigError: A recipe or configuration file cannot be used.
    """
    profile = _one_of("profile", options.profile or "cuda", PROFILES)
    recipe = _recipe(options)
    settings, found = _settings(options, profile)
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


def _search_scope(options: Options, profile: str) -> str:
    """Nobody searches on CPU unless asked: there is no step time to prefer one configuration by."""
    if options.search is None:
        return "open" if profile == "cuda" and not options.max_batch else "none"
    return "wide" if options.search else "none"


_KNOBS = {
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

_FILE_KNOBS = ("reshard_after_forward", "mesh", "cp", "cpu_offload", "wrap", "checkpointing")
"""What an accelerate YAML decides (DESIGN decision 3)."""

_RECIPE_KNOBS = ("micro_batch", "accumulation", "optimizer_implementation", "prefetch", "gradients")


def _fixed(options: Options) -> tuple[str, ...]:
    """Return the closed knobs: given as options, or, unless a search was asked for, by a file."""
    closed = {
        knob
        for option, knobs in _KNOBS.items()
        for knob in knobs
        if getattr(options, option) not in (None, ())
    }
    if not options.search:
        closed |= set(_FILE_KNOBS) if options.config is not None else set()
        closed |= set(_RECIPE_KNOBS) if options.recipe is not None else set()
    return tuple(sorted(closed))


def _prefer(options: Options, clusters: Sequence[Cluster]) -> str:
    priced = all(cluster.price_per_gpu_hour is not None for cluster in clusters)
    wanted = _one_of("prefer", options.prefer or "speed", ("speed", "price"))
    if wanted == "price" and not priced:
        raise PlanError("not every cluster has a price", help="give price_per_gpu_hour in each cluster file")
    return wanted


def _recipe(options: Options) -> Recipe:
    if isinstance(options.recipe, Recipe):
        recipe = options.recipe
    elif options.recipe is not None:
        from fsdptool.config.recipe import read_recipe

        recipe = _beside(read_recipe(options.recipe), options.recipe)
    elif options.reference is not None:
        recipe = Recipe(ModelChoice(options.reference))
    else:
        raise PlanError(
            "there is no model to plan", help="name one (fsdptool plan llama3:8b ...) or give --recipe"
        )
    return replace(
        recipe,
        model=_model(options, recipe.model),
        method=_method(options, recipe.method),
        objective=_given(recipe.objective, name=options.objective),
        batch=_batch(options, recipe),
        optimizer=_given(
            recipe.optimizer,
            name=_choice("optimizer", options.optimizer, ("adamw", "adamw8bit", "adafactor", "sgd")),
            implementation=_choice(
                "optimizer-implementation",
                options.optimizer_implementation,
                ("auto", "fused", "foreach", "for_loop"),
            ),
        ),
        sharding=_sharding(options, recipe),
        ema=recipe.ema if options.ema is None else Ema(options.ema),
    )


def _beside(recipe: Recipe, path: Path) -> Recipe:
    """Relative model paths count from the working directory, then from the recipe (as ``train`` does)."""

    def found(choice: ModelChoice) -> ModelChoice:
        near = path.parent / choice.reference
        if Path(choice.reference).exists() or not near.exists():
            return choice
        return replace(choice, reference=str(near))

    taught = recipe.method.distillation
    if taught is not None:
        taught = replace(taught, teacher=found(taught.teacher))
        recipe = replace(recipe, method=replace(recipe.method, distillation=taught))
    return replace(recipe, model=found(recipe.model))


def _model(options: Options, model: ModelChoice) -> ModelChoice:
    return _given(
        model,
        reference=options.reference,
        revision=options.revision,
        component=options.component,
        trust_remote_code=options.trust_remote_code,
        overrides=options.overrides or None,
        dtype=_choice("dtype", options.dtype, ("float32", "bfloat16", "float16", "float64")),
        attention=_choice("attention", options.attention, ("sdpa", "eager", "flash_attention_2")),
    )


def _method(options: Options, method: Method) -> Method:
    name = _choice("method", options.method, ("full", "lora", "distillation"))
    lora_options = (options.lora_rank, options.lora_targets, options.lora_base, options.adapters)
    if name is None and any(option is not None for option in lora_options):
        name = "lora"
    if name is None and options.teacher is not None:
        name = "distillation"
    name = name or method.name
    if name == "lora":
        if options.lora_rank is not None and options.lora_rank < 1:
            raise PlanError(f"LoRA rank {options.lora_rank} adapts nothing", help="give 1 or more")
        lora = _given(
            method.lora or Lora(),
            rank=options.lora_rank,
            targets=options.lora_targets,
            base=_choice("lora-base", options.lora_base, ("unchanged", "nf4", "int8", "float8")),
            adapters=_choice("adapters", options.adapters, ("replicated", "sharded")),
        )
        return Method("lora", lora)
    if name == "distillation":
        if options.teacher is None and method.distillation is None:
            raise PlanError("distillation needs a teacher", help="give --teacher REFERENCE")
        kept = method.distillation
        teacher = ModelChoice(options.teacher) if options.teacher is not None else None
        if kept is None:
            return Method("distillation", None, Distillation(teacher)) if teacher else method
        return Method("distillation", None, _given(kept, teacher=teacher))
    return Method("full")


def _batch(options: Options, recipe: Recipe) -> Any:
    batch = _given(
        recipe.batch,
        micro_batch=options.micro_batch,
        accumulation=options.accumulation,
        global_batch=options.global_batch,
        sequence_length=options.sequence_length,
        height=options.height,
        width=options.width,
        frames=options.frames,
    )
    for name in ("sequence_length", "height", "width", "frames"):
        value = getattr(batch, name)
        if value is not None and value < 1:
            raise PlanError(f"{name.replace('_', ' ')} {value} is not positive")
    if options.global_batch is not None and options.accumulation is not None:
        raise PlanError("both accumulation and global batch are given", help="give one: it decides the other")
    # An option replaces the file's other way of saying the same.
    if options.accumulation is not None:
        return replace(batch, global_batch=None)
    return replace(batch, accumulation=1) if options.global_batch is not None else batch


def _sharding(options: Options, recipe: Recipe) -> Any:
    sharding = _given(
        recipe.sharding,
        layout=_choice("layout", options.layout, ("native", "accelerate")),
        prefetch=options.prefetch,
        accumulation=_choice("gradients", options.gradients, ("sharded", "unsharded")),
    )
    if options.prefetch is not None and options.prefetch < 1:
        raise PlanError(f"prefetch {options.prefetch} gathers nothing ahead", help="give 1 or more")
    if options.reduce_dtype is not None:
        names = ("float32", "bfloat16", "float16", "param")
        wanted = _one_of("reduce-dtype", options.reduce_dtype, names)
        sharding = replace(sharding, reduce_dtype=None if wanted == "param" else wanted)
    if options.reshard is not None:
        integer = not isinstance(options.reshard, bool)
        sharding = replace(sharding, reshard_after_forward=options.reshard if integer else None)
    if options.checkpointing is not None:
        mode, every_n = split_checkpointing(options.checkpointing)
        plain = mode in ("none", "full")
        kept = sharding.checkpointing or Checkpointing()
        chosen = None if plain else replace(kept, mode=mode, every_n=every_n)
        sharding = replace(sharding, checkpointing=chosen)
    return sharding


def _settings(options: Options, profile: str) -> tuple[FsdpSettings, tuple[Diagnostic, ...]]:
    found: tuple[Diagnostic, ...] = ()
    if isinstance(options.config, FsdpSettings):
        settings = options.config
    elif options.config is not None:
        settings, found = _read_config(options.config)
    else:
        # On CPU nobody gains from half precision unless they say so.
        settings = FsdpSettings(mixed_precision="bf16" if profile == "cuda" else "no")
    mesh = _given(settings.mesh, dp_replicate=options.dp_replicate, dp_shard=options.dp_shard, cp=options.cp)
    checkpointing = None if options.checkpointing is None else options.checkpointing != "none"
    precision = {"fp32": "no", "no": "no", "bf16": "bf16", "fp16": "fp16", "fp8": "fp8"}
    wanted = _choice("precision", options.precision, tuple(precision))
    settings = _given(
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
        if options.gpu is not None or options.gpus is not None:
            raise PlanError(
                "both --cluster and --gpu or --gpus are given", help="a cluster file already says which GPUs"
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


def _given(record: R, **values: Any) -> R:
    """Return ``record`` with the values that are not None."""
    changed = {name: value for name, value in values.items() if value is not None}
    return replace(record, **changed) if changed else record  # type: ignore[type-var]


def _choice(name: str, value: str | None, choices: tuple[str, ...]) -> Any:
    return None if value is None else _one_of(name, value, choices)


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> Any:
    """Return the choice ``value`` spells, forgiving case and dashes.

    Raises:
        PlanError: It is none of them.
    """
    spelled = {choice.replace("-", "_").lower(): choice for choice in choices}
    found = spelled.get(value.replace("-", "_").lower())
    if found is None:
        raise PlanError(f"{name} {value!r} is not known", help=f"choose one of: {', '.join(choices)}")
    return found
