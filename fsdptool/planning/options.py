"""The options a plan is asked with, and their canonical form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptool.records.cluster import Cluster
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.records.plan import PlanInputs
from fsdptool.records.recipe import Recipe
from fsdptool.records.settings import FsdpSettings

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
class Request:
    """Canonical inputs and what was noticed on the way."""

    inputs: PlanInputs
    diagnostics: tuple[Diagnostic, ...] = ()
