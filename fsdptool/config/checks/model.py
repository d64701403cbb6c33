"""The rules that need more than the file: an inspected model, or the hardware it runs on."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fsdptool import spelling
from fsdptool.config.canonical import settings_from
from fsdptool.config.context import LintContext
from fsdptool.errors import FsdptoolError
from fsdptool.formatting import amount
from fsdptool.modeling.context_parallel import MASKED_KINDS, attention_kinds
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.cluster import Gpu
from fsdptool.records.diagnostic import Edit
from fsdptool.records.recipe import Layout
from fsdptool.records.sharding import FsdpSettings


def check_model(lint: LintContext, anatomy: Anatomy) -> None:
    """Report what the settings do to this model, as accelerate 1.15's preparation would."""
    policy = lint.get("wrap_policy")
    if policy == "transformer":
        _classes(lint, anatomy)
    elif policy == "size":
        _containers(lint, anatomy)
    _buffers(lint, anatomy)
    _ties(lint, anatomy)
    _context(lint, anatomy)
    _ignored(lint, anatomy)


def _detected_classes(lint: LintContext, anatomy: Anatomy) -> dict[str, Any]:
    """Return the fix that writes detect's classes, as arguments of ``LintContext.report``."""
    text = ",".join(anatomy.wrap.classes)
    entry = lint.at("wrap_classes")
    edits: tuple[Edit, ...] | None = None
    if text and entry is not None:
        edits = lint.editor.replace_entry(entry, text)
    elif text and lint.dialect.name == "accelerate":
        holder = lint.root.get("fsdp_config")
        key = "fsdp_transformer_layer_cls_to_wrap"
        edits = lint.editor.add(holder.node if holder else None, holder, {key: text})
    return {"edits": edits, "safe": False, "fix": f"write {text}", "changes": {"wrap_classes": text}}


def _classes(lint: LintContext, anatomy: Anatomy) -> None:
    named = lint.get("wrap_classes") or ()
    present = {module.class_name for module in anatomy.modules}
    fix = _detected_classes(lint, anatomy)
    place = lint.at("wrap_classes")
    if not named:
        _hints(lint, anatomy, fix)
        return
    for name in named:
        if name not in present:
            near = spelling.nearest(name, present, cutoff=0.6)
            hint = f": did you mean {near}?" if near else ""
            lint.report_value("FSD401", f"{anatomy.spec.model_class} has no {name}{hint}", place, **fix)
        elif anatomy.modules and anatomy.modules[0].class_name == name:
            lint.report_value("FSD402", f"{name} is the whole model", place, **fix)
        elif _holds_embedding(anatomy, name):
            lint.report_value("FSD403", f"{name} contains the input embedding", place, **fix)
    _coverage(lint, anatomy, [name for name in named if name in present], fix)


def _hints(lint: LintContext, anatomy: Anatomy, fix: dict[str, Any]) -> None:
    """No class is named: accelerate takes ``_no_split_modules`` of the built instance."""
    place = lint.at("wrap_policy") or lint.root.get("fsdp_config")
    model = anatomy.spec.model_class
    absent = ", ".join(entry.name for entry in anatomy.wrap.no_split_modules if entry.status == "absent")
    if not anatomy.no_split_modules:
        lint.report("FSD406", f"{model} has no _no_split_modules; the file names no class", place, **fix)
    elif absent:
        lint.report("FSD410", f"_no_split_modules of {model} list {absent}, which it lacks", place, **fix)


def _holds_embedding(anatomy: Anatomy, name: str) -> bool:
    embedding = anatomy.input_embedding
    if embedding is None:
        return False
    return any(
        module.class_name == name and embedding.startswith(f"{module.path}.") for module in anatomy.modules
    )


def _under(anatomy: Anatomy, classes: Sequence[str]) -> tuple[str, ...]:
    """Return the path prefixes of everything inside modules of the classes."""
    return tuple(f"{m.path}." for m in anatomy.modules if m.class_name in classes and m.path)


def _coverage(lint: LintContext, anatomy: Anatomy, named: list[str], fix: dict[str, Any]) -> None:
    roots = _under(anatomy, named)
    if not roots or not anatomy.total_parameters or set(named) == set(anatomy.wrap.classes):
        return
    covered = sum(parameter.numel for parameter in anatomy.parameters if parameter.fqn.startswith(roots))
    best = _under(anatomy, anatomy.wrap.classes)
    possible = sum(
        parameter.numel for parameter in anatomy.parameters if best and parameter.fqn.startswith(best)
    )
    if covered < 0.7 * possible:
        lint.report_value(
            "FSD408",
            f"{','.join(named)} cover {covered:,} of {anatomy.total_parameters:,} parameters; "
            f"{','.join(anatomy.wrap.classes)} would cover {possible:,}",
            "wrap_classes",
            **fix,
        )


def _containers(lint: LintContext, anatomy: Anatomy) -> None:
    threshold = lint.get("min_num_params") or 0
    for module in anatomy.modules:
        if module.forwards or not module.path:
            continue
        prefix = f"{module.path}."
        size = sum(parameter.numel for parameter in anatomy.parameters if parameter.fqn.startswith(prefix))
        if size >= threshold > 0:
            lint.report_value(
                "FSD409",
                f"{module.path} ({module.class_name}) holds {size:,} parameters, more than {threshold:,}",
                "wrap_policy",
            )
            return


def _buffers(lint: LintContext, anatomy: Anatomy) -> None:
    persistent = [buffer.fqn for buffer in anatomy.buffers if buffer.persistent]
    if not lint.get("cpu_ram_efficient_loading") or not persistent or lint.consumer.name == "fsdptool":
        return
    entry = lint.at("cpu_ram_efficient_loading")
    if entry is not None:
        edits = lint.editor.replace(entry.node, False)
    else:
        holder = lint.root.get("fsdp_config")
        edits = lint.editor.add(
            holder.node if holder else None, holder, {"fsdp_cpu_ram_efficient_loading": False}
        )
    lint.report_value(
        "FSD404",
        f"{anatomy.spec.model_class} has {len(persistent)} persistent buffers ({persistent[0]}, ...)",
        entry,
        edits=edits,
        safe=False,
        fix="write fsdp_cpu_ram_efficient_loading: false",
        changes={"cpu_ram_efficient_loading": False},
    )


def _ties(lint: LintContext, anatomy: Anatomy) -> None:
    if lint.consumer.name == "fsdptool":
        return
    for names in anatomy.ties:
        if len(names) > 2:
            lint.report(
                "FSD405", f"{names[0]} is shared by {len(names)} modules: {', '.join(names[1:4])}, ..."
            )


def _context(lint: LintContext, anatomy: Anatomy) -> None:
    if (lint.get("cp") or 1) <= 1:
        return
    kinds = attention_kinds(anatomy.spec.config)
    if lint.consumer.name == "fsdptool":
        kinds = [kind for kind in kinds if kind not in MASKED_KINDS]
    if kinds:
        lint.report_value(
            "FSD407", f"{anatomy.spec.model_class} has attention layers of type {', '.join(kinds)}", "cp"
        )


def _ignored(lint: LintContext, anatomy: Anatomy) -> None:
    pattern = lint.get("ignored_modules")
    if not pattern:
        return
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        lint.report_value(
            "FSD206", f"fsdp_ignored_modules is not a valid regular expression: {error}", "ignored_modules"
        )
        return
    prefixes = tuple(f"{module.path}." for module in anatomy.modules if compiled.fullmatch(module.path))
    trainable = [p.fqn for p in anatomy.parameters if prefixes and p.fqn.startswith(prefixes) and p.trainable]
    if trainable and lint.consumer.name != "fsdptool":
        lint.report_value(
            "FSD411",
            f"{len(trainable)} trainable parameters are ignored ({trainable[0]}, ...)",
            "ignored_modules",
        )


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
