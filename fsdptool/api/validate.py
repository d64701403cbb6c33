"""``fsdptool.validate`` and ``fsdptool.emit_config``: what the commands do, as functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.config.reader import read_settings
from fsdptool.config.result import Verdict, expand, found_by_chance

if TYPE_CHECKING:
    from fsdptool.records.plan import Plan


def validate(
    files: str | PathLike[str] | Iterable[str | PathLike[str]],
    *,
    consumer: str | None = None,
    target: str | None = None,
    dialect: str | None = None,
    model: str | None = None,
    gpu: str | None = None,
    gpus: int | None = None,
    host_memory: str | None = None,
    trust_remote_code: bool = False,
) -> Verdict:
    """Judge configurations as the program that reads them will. Nothing is written.

    Args:
        files: A file or a folder, or several.
        consumer: Who reads them: ``accelerate``, ``fsdptool``, ``trainer``, ...; None: each file's own.
        target: Version to judge for, ``accelerate==1.15``.
        dialect: Force the dialect instead of detecting it from the content.
        model: Reference of a model to judge against, too.
        gpu, gpus, host_memory: Hardware to judge against, too; host memory per node (``512GiB``).
        trust_remote_code: Run the model's own code to inspect it.

    Returns:
        One reading per file: effective settings with their origins, what is ignored, and findings.
        ``document()`` gives the JSON document ``validate``, ``exit_code()`` the command's status.

    Raises:
        ConfigError: An argument names nothing known, or a folder holds no configuration. What is wrong
            with a file is a finding.
        ReferenceError, ModelError: The model cannot be resolved or built.
    """
    named = [files] if isinstance(files, str | PathLike) else list(files)
    judged = conditions(model, gpu, gpus, host_memory, trust_remote_code=trust_remote_code)
    readings = []
    for path, asked in expand(map(Path, named)).items():
        reading = read_settings(path, dialect=dialect, consumer=consumer, target=target, **judged)
        readings.append(reading if asked else found_by_chance(reading))
    return Verdict(tuple(readings))


def conditions(
    model: str | None, gpu: str | None, gpus: int | None, host_memory: str | None, *, trust_remote_code: bool
) -> dict[str, Any]:
    """Return what else a file is judged against, as arguments of ``read_settings``."""
    found: dict[str, Any] = {}
    hardware = None
    if gpu is not None or gpus is not None or host_memory is not None:
        from fsdptool.config.checks.hardware import read_hardware

        hardware = read_hardware(gpu, gpus, host_memory)
    if model is not None:
        from fsdptool.config.checks.model import inspect_model

        found["model"] = inspect_model(model, trust_remote_code=trust_remote_code)
    if hardware is not None:
        found["hardware"] = replace(hardware, anatomy=found.get("model"))
    return found


def emit_config(
    reference: str | None = None,
    *,
    plan: str | PathLike[str] | Plan | None = None,
    candidate: str | None = None,
    preset: str | None = None,
    layout: str = "native",
    wrap: Iterable[str] = (),
    exclude: Iterable[str] = (),
    processes: int | None = None,
    nodes: int | None = None,
    precision: str | None = None,
    cpu: bool = False,
    revision: str | None = None,
    component: str | None = None,
    trust_remote_code: bool = False,
) -> str:
    """Return the accelerate YAML for a plan or a model.

    Args:
        reference: A model: ``family:flavour``, hub id, folder.
        plan: A plan instead: the record, or the path of its document.
        candidate: Candidate of the plan; None: the chosen one.
        preset: What a model's settings start from; None: ``single-node``.
        layout, wrap, exclude, revision, component, trust_remote_code: Of a model, as for ``detect``.
        processes, nodes, precision, cpu: Replace what the plan or preset says.

    Raises:
        ConfigError: Neither or both of model and plan are given, the plan chose nothing, or an argument
            is impossible.
        ReferenceError, ModelError: The model cannot be resolved or built.
    """
    from fsdptool.api import emit_config as emission

    made = emission.start(
        reference,
        plan=plan,
        candidate=candidate,
        preset=preset,
        layout=layout,
        wrap=tuple(wrap),
        exclude=tuple(exclude),
        revision=revision,
        component=component,
        trust_remote_code=trust_remote_code,
    )
    settings = emission.adjust(made.settings, processes=processes, nodes=nodes, precision=precision, cpu=cpu)
    return replace(made, settings=settings).text()
