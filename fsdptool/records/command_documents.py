"""Documents of the commands other than detect, plan and those about configurations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from fsdptool.records.annotations import Count, Keywords, Positive
from fsdptool.records.plan import SearchPoint, Verdict
from fsdptool.records.run import DeviceType


@dataclass(frozen=True, slots=True)
class CacheEntry:
    """One stored answer, by its header alone. ``created`` is in seconds since 1970."""

    kind: str
    key: str
    about: str
    created: float
    bytes: Count
    path: str


@dataclass(frozen=True, slots=True)
class PathProblem:
    """A file and what is wrong with it."""

    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What `fsdptool cache ls|verify|prune|clear --format json` print."""

    folder: str
    entries: tuple[CacheEntry, ...] | None = None
    good: Count | None = None
    bad: tuple[PathProblem, ...] | None = None
    removed: Count | None = None
    bytes: Count | None = None
    failed: tuple[PathProblem, ...] | None = None


Figure = str | float | int | bool | None
FigureUnit = Literal["bytes", "seconds", "rate", "text"]


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """One figure on both sides.

    ``percent`` is how far the right side lies above the left one (a run: how far measurement lies above
    prediction), or None where it does not apply.
    """

    what: str
    left: Figure
    right: Figure
    unit: FigureUnit
    percent: float | None = None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two plans side by side, or a plan's prediction against a run (`fsdptool compare --format json`).

    Attributes:
        kind: Whether the right side is another plan or a run.
        left, right: What the sides are called.
        rows: Totals.
        moments: Allocated bytes moment by moment (plans); phase by phase, rank by rank, and at every step
            whose peak exceeds that of the steps before it (a run).
        error_percent: For a run: predicted over measured allocated peak, in percent.
        notes: What could not be compared, one sentence each.
    """

    kind: Literal["plans", "run"]
    left: str
    right: str
    rows: tuple[ComparedFigure, ...]
    moments: tuple[ComparedFigure, ...]
    error_percent: float | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Host:
    """The machine the command ran on."""

    platform: str
    cores: Count
    memory_bytes: Count
    memory_available_bytes: Count
    shared_memory_free_bytes: Count | None


@dataclass(frozen=True, slots=True)
class Device:
    """One GPU. ``uuid`` is null if nothing tells it; ``run`` is the run folder that claims it, or null."""

    id: str
    name: str
    memory_bytes: Count
    memory_free_bytes: Count
    capability: str
    uuid: str | None
    run: str | None


@dataclass(frozen=True, slots=True)
class InstalledFamily:
    """A model family and the package it comes from."""

    family: str
    library: str
    origin: str


@dataclass(frozen=True, slots=True)
class CacheState:
    """The cache folder, whether it can be written, and what it holds."""

    folder: str
    writable: bool
    entries: Count
    bytes: Count


@dataclass(frozen=True, slots=True)
class Probe:
    """A run of FSDP2 on two processes, or on one where there is one GPU.

    Attributes:
        device: Device type of the processes.
        backend: The communication backend, or null if the processes did not report one.
        processes: Number of processes.
        sharded: Whether each process stored only its own rows.
        equal: Whether the weights after three steps equal those of a plain loop.
        difference: Largest difference between the two, or null.
        ok: Whether the probe passed.
        reason: Why it did not pass, or null.
    """

    device: DeviceType
    backend: str | None
    processes: Count
    sharded: bool
    equal: bool
    difference: float | None
    ok: bool
    reason: str | None


@dataclass(frozen=True, slots=True)
class Health:
    """What `fsdptool doctor --format json` prints. Findings of severity `error` mean that runs will fail.

    Attributes:
        versions: Package to version; null is not installed.
        machine: The machine the command ran on.
        devices: GPUs; empty if there are none.
        plugins: Installed model families.
        cache: The cache folder.
        probes: Two-process FSDP2 probes; empty with ``--no-probe``.
    """

    versions: Mapping[str, str | None]
    machine: Host
    devices: tuple[Device, ...]
    plugins: tuple[InstalledFamily, ...]
    cache: CacheState
    probes: tuple[Probe, ...]


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What `fsdptool export --format json` prints."""

    folder: str
    kind: str
    step: Count
    checkpoint: str
    files: tuple[str, ...]
    bytes: Count


@dataclass(frozen=True, slots=True)
class NodeCommand:
    """What one node runs: the command line and the environment variables to set for it."""

    argv: Annotated[tuple[str, ...], Keywords(minItems=1)]
    environment: Mapping[str, str]


Unchecked = Literal["gpus", "memory", "data", "rendezvous"]
"""What only the start of a run checks: the GPUs of its machine, their memory, every row of the data, and
where several machines meet."""


@dataclass(frozen=True, slots=True)
class LaunchLines:
    """What `fsdptool train --dry-run` and `fsdptool launch` print with `--format json`.

    ``unchecked`` is what a dry run left to the start of the run.
    """

    nodes: Annotated[tuple[NodeCommand, ...], Keywords(minItems=1)]
    folder: str
    script: str | None
    unchecked: tuple[Unchecked, ...] = ()


DataKind = Literal["chat", "prompts", "text", "labels", "pairs", "images", "code", "unread"]
"""How samples are read: ``unread`` data (a dataset on the Hub) were not looked at, nor was ``code`` run."""


@dataclass(frozen=True, slots=True)
class StarterReport:
    """What `fsdptool init --format json` prints: the files written, null where no configuration fits.

    ``data`` says how the samples are read, null without data; ``weights`` whether there are weights to start
    from; ``cpu`` whether the configuration is for this machine's CPU because it has no GPU.
    """

    recipe: str | None
    config: str | None
    verdict: Verdict
    data: DataKind | None
    columns: tuple[str, ...]
    weights: bool
    cpu: bool


@dataclass(frozen=True, slots=True)
class BucketCount:
    """Samples of one size, in pixels and frames."""

    height: Positive
    width: Positive
    frames: Positive
    pictures: Count


@dataclass(frozen=True, slots=True)
class PrecomputeReport:
    """What `fsdptool precompute --format json` prints; `made` counts the shards that this call encoded."""

    folder: str
    pictures: Positive
    buckets: tuple[BucketCount, ...]
    shards: Positive
    made: Count
    finished: bool
    device: str


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One combination of values and the plan it leads to: its chosen candidate, or the requested one.

    Attributes:
        values: Of every swept option, by name.
        verdict: Of the plan; None where the combination contradicts itself.
        reason: Why it does not fit or cannot be planned.
        settings: The candidate's.
        global_batch: Samples of one optimizer step.
        device_total_bytes, usable_bytes: What a rank needs, and what it has.
        fit_share: Share of published runs with whose error of memory the plan fits; None: not known.
        host_bytes_per_node: Host memory.
        step_seconds, samples_per_second, tokens_per_second, mfu: Estimates.
        price_per_million_tokens, price_per_run: In the currency of the price.
    """

    values: Mapping[str, float]
    verdict: Verdict | None
    reason: str | None = None
    settings: SearchPoint | None = None
    global_batch: Positive | None = None
    device_total_bytes: int | None = None
    usable_bytes: int | None = None
    host_bytes_per_node: int | None = None
    step_seconds: float | None = None
    samples_per_second: float | None = None
    tokens_per_second: float | None = None
    mfu: float | None = None
    price_per_million_tokens: float | None = None
    price_per_run: float | None = None
    fit_share: float | None = None


@dataclass(frozen=True, slots=True)
class Sweep:
    """What `fsdptool plan --sweep ... --format json` prints.

    Attributes:
        options: Names of the swept options, in the order they were given.
        rows: One per combination, the last option varying fastest.
    """

    options: tuple[str, ...]
    rows: tuple[SweepRow, ...]
