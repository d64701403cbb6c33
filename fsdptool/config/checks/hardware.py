"""The rules on the hardware that a run has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fsdptool.config.canonical import settings_from
from fsdptool.config.context import LintContext
from fsdptool.errors import FsdptoolError
from fsdptool.formatting import amount
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.cluster import Gpu
from fsdptool.records.recipe import Layout
from fsdptool.records.sharding import FsdpSettings

_STATES = 16
"""Bytes per trainable parameter with AdamW and fp32 masters: parameter, gradient, two moments."""


Fit = Callable[[FsdpSettings, Layout, int, int], tuple[int | None, int | None]]
"""Needed and usable bytes per GPU of the smallest run (micro-batch 1).

Takes the settings, the layout, the number of GPUs and of machines; raises FsdptoolError where the run cannot
be predicted. Predicting belongs to a later room, so the caller hands it in.
"""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a file is judged against besides its consumer.

    Attributes:
        gpu: The GPU, or None.
        gpus: Number of GPUs over all machines, or None.
        host_memory: Bytes of host memory per machine, or None.
        anatomy: The model, or None.
        fit: Predicts the smallest run of the model on the GPU, or None.
    """

    gpu: Gpu | None = None
    gpus: int | None = None
    host_memory: int | None = None
    anatomy: Anatomy | None = None
    fit: Fit | None = None


def check_hardware(lint: LintContext, hardware: Hardware) -> None:
    """Report where the settings do not suit the hardware."""
    if hardware.gpu is not None:
        _precision(lint, hardware.gpu)
    _count(lint, hardware)
    _offload(lint, hardware)
    if hardware.gpu is not None and hardware.fit is not None:
        _fit(lint, hardware, hardware.gpu, hardware.fit)


def _precision(lint: LintContext, gpu: Gpu) -> None:
    precision = lint.get("mixed_precision")
    entry = lint.at("mixed_precision")
    if precision == "bf16" and not gpu.native_bf16:
        edits = lint.editor.replace(entry.node, "fp16") if entry is not None else None
        lint.report_value(
            "FSD501",
            f"{gpu.name} does not compute in bfloat16 natively",
            entry,
            edits=edits if lint.dialect.name == "accelerate" else None,
            safe=False,
            fix="write fp16",
            changes={"mixed_precision": "fp16"},
        )
    if precision == "fp8" and not gpu.native_fp8:
        lint.report_value("FSD505", f"{gpu.name} does not compute in fp8", entry)


def _count(lint: LintContext, hardware: Hardware) -> None:
    processes = lint.get("num_processes")
    if hardware.gpus is not None and isinstance(processes, int) and processes != hardware.gpus:
        lint.report_value("FSD504", f"{processes} processes for {hardware.gpus} GPUs", "num_processes")


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
            f"offload needs about {amount(needed)} of host memory per machine, but only "
            f"{amount(hardware.host_memory)} are available (AdamW, fp32 masters)",
            "cpu_offload",
        )


def _fit(lint: LintContext, hardware: Hardware, gpu: Gpu, fit: Fit) -> None:
    """If the smallest run does not fit, nothing does."""
    processes = lint.get("num_processes")
    total = hardware.gpus or (processes if isinstance(processes, int) else None)
    if total is None:
        lint.report("FSD506", "the number of GPUs is unknown: give --gpus")
        return
    settings = settings_from({key: fact.value for key, fact in lint.facts.items()})
    layout: Layout = "native" if lint.consumer.name == "fsdptool" else "accelerate"
    try:
        needed, usable = fit(settings, layout, total, lint.get("num_machines") or 1)
    except FsdptoolError as error:
        lint.report("FSD506", f"could not check whether the run fits: {error.message}")
        return
    if needed is None or usable is None:
        lint.report("FSD506", "could not check whether the run fits")
    elif needed > usable:
        lint.report(
            "FSD503",
            f"the run needs {amount(needed)} of the {amount(usable)} that are usable on {gpu.name}, at"
            " micro-batch 1",
            lint.root.get("fsdp_config"),
        )
