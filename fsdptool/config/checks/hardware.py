"""The rules of the family ``hardware``: a file's settings against GPUs and hosts. Torch-free by itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fsdptool.config.canonical import settings_from
from fsdptool.config.context import LintContext
from fsdptool.errors import PlanError
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.cluster import Gpu

_STATES = 16
"""Bytes per trainable parameter with AdamW and fp32 masters: parameter, gradient, two moments."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What ``--gpu``, ``--gpus`` and ``--host-memory`` say, and the model if one was named."""

    gpu: Gpu | None
    gpus: int | None
    host_memory: int | None
    anatomy: Anatomy | None = None


def read_hardware(gpu: str | None, gpus: int | None, host_memory: str | None) -> Hardware:
    """Look up what the options name.

    Raises:
        PlanError: The GPU is not in the catalogue, the count is not positive, or a size cannot be read.
    """
    from fsdptool.planning.clusters import parse_size
    from fsdptool.planning.gpu_catalogue import load_gpu

    if gpus is not None and gpus < 1:
        raise PlanError(f"{gpus} GPUs cannot train", help="give the number of GPUs in all, 1 or more")
    found = load_gpu(gpu) if gpu is not None else None
    return Hardware(found, gpus, parse_size(host_memory) if host_memory else None)


def judge_hardware(lint: LintContext, hardware: Hardware) -> None:
    """Report where the settings do not suit the hardware."""
    if hardware.gpu is not None:
        _precision(lint, hardware.gpu)
    _count(lint, hardware)
    _offload(lint, hardware)
    if hardware.gpu is not None and hardware.anatomy is not None:
        _fit(lint, hardware, hardware.gpu, hardware.anatomy)


def _precision(lint: LintContext, gpu: Gpu) -> None:
    precision = lint.get("mixed_precision")
    entry = lint.at("mixed_precision")
    if precision == "bf16" and not gpu.native_bf16:
        edits = lint.editor.replace(entry.node, "fp16") if entry is not None else None
        lint.report(
            "FSD501",
            f"{gpu.name} does not compute in bfloat16 natively",
            entry,
            value=True,
            edits=edits if lint.dialect == "accelerate" else None,
            safe=False,
            fix="write fp16",
            changes={"mixed_precision": "fp16"},
        )
    if precision == "fp8" and not gpu.native_fp8:
        lint.report("FSD505", f"{gpu.name} does not compute in fp8", entry, value=True)


def _count(lint: LintContext, hardware: Hardware) -> None:
    processes = lint.get("num_processes")
    if hardware.gpus is not None and isinstance(processes, int) and processes != hardware.gpus:
        lint.report(
            "FSD504",
            f"{processes} processes for {hardware.gpus} GPUs",
            lint.at("num_processes"),
            value=True,
        )


def _offload(lint: LintContext, hardware: Hardware) -> None:
    if not lint.get("cpu_offload") or hardware.host_memory is None or hardware.anatomy is None:
        return
    machines = lint.get("num_machines") or 1
    trainable = sum(p.numel for p in hardware.anatomy.parameters if p.trainable)
    copies = lint.get("dp_replicate") or 1
    needed = trainable * _STATES * copies // machines
    if needed > hardware.host_memory:
        lint.report(
            "FSD502",
            f"offload needs about {needed:,} bytes of host memory per machine, there are "
            f"{hardware.host_memory:,} (AdamW, fp32 masters)",
            lint.at("cpu_offload"),
        )


def _fit(lint: LintContext, hardware: Hardware, gpu: Gpu, anatomy: Anatomy) -> None:
    """The smallest run there is (micro-batch 1): if that does not fit, nothing does."""
    from fsdptool.errors import FsdptoolError
    from fsdptool.planning import predict
    from fsdptool.planning.clusters import make_cluster
    from fsdptool.records.recipe import Batch, ModelChoice, Recipe, Sharding

    processes = lint.get("num_processes")
    total = hardware.gpus or (processes if isinstance(processes, int) else None)
    if total is None:
        lint.report("FSD506", "the number of GPUs is not known: give --gpus")
        return
    machines = lint.get("num_machines") or 1
    settings = settings_from({key: fact.value for key, fact in lint.facts.items()})
    layout: Any = "native" if lint.consumer.name == "fsdptool" else "accelerate"
    sharding = Sharding(layout="native") if layout == "native" else Sharding(layout, reduce_dtype=None)
    recipe = Recipe(
        ModelChoice(anatomy.spec.reference.id, revision=anatomy.spec.reference.revision),
        batch=Batch(micro_batch=1, sequence_length=_sequence(anatomy)),
        sharding=sharding,
    )
    try:
        cluster = make_cluster(
            gpu, total // machines, machines, inter_node_bandwidth=25e9 if machines > 1 else None
        )
        candidate = predict(anatomy.spec, anatomy, recipe, settings, cluster=cluster)
    except FsdptoolError as error:
        lint.report("FSD506", f"the fit could not be judged: {error.message}")
        return
    if candidate.device_total_bytes is None or candidate.usable_bytes is None:
        lint.report("FSD506", "the fit could not be judged")
    elif candidate.device_total_bytes > candidate.usable_bytes:
        lint.report(
            "FSD503",
            f"{candidate.device_total_bytes:,} bytes are needed on {gpu.name} and "
            f"{candidate.usable_bytes:,} can be used, at micro-batch 1",
            lint.root.get("fsdp_config"),
        )


def _sequence(anatomy: Anatomy) -> int | None:
    """Text models are judged at 2,048 tokens or what they have positions for."""
    config = anatomy.spec.config
    inner = config.get("text_config")
    text = inner if isinstance(inner, dict) else config
    positions = text.get("max_position_embeddings") or text.get("n_positions")
    if "vocab_size" not in text:
        return None
    return min(2048, positions) if isinstance(positions, int) else 2048
