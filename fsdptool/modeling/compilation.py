"""Whether the blocks of a run are compiled: as the recipe says, else on GPUs where that is known to work."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from fsdptool.errors import ConfigError
from fsdptool.families.bases.batches import separates
from fsdptool.modeling.objective import objective_for
from fsdptool.records.compilation import Compilation, CompileReason
from fsdptool.records.plan import OWN_LOOP
from fsdptool.tensor.sites import experts_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from fsdptool.records.anatomy import Anatomy, ModelSpec
    from fsdptool.records.recipe import Recipe
    from fsdptool.records.resolved_run import ResolvedRun

_TESTED = frozenset({"causal_lm", "masked_lm"})
"""Objectives whose models were trained with compiled blocks and compared with eager ones
(``tests/training/test_compilation.py``)."""

MEASURED_TORCH = ("2.13",)
"""Minor versions of torch whose compiled blocks were compared with measurements of memory
(``benchmarks/memory/compiled.py``)."""

_SEVERAL_INPUTS = ("vision_config", "audio_config")
"""Configurations of models of which a sample of text alone uses only a part."""


def decide_compilation(
    anatomy: Anatomy, run: ResolvedRun, *, on_this_machine: bool = False
) -> tuple[ResolvedRun, Compilation]:
    """Decide whether the blocks of a run are compiled: as ``sharding.compile`` says, by default on GPUs.

    Args:
        anatomy: The model.
        run: ``settings.use_cpu`` says on which kind of device, ``loop`` which program trains it.
        on_this_machine: Whether it starts on this machine, which then must have a compiler.

    Returns:
        The run with the decision in its recipe, and the decision with its reason.

    Raises:
        ConfigError: float8 training on GPUs would run in eager blocks.
    """
    wanted, settings = run.recipe.sharding.compile, run.settings
    if wanted is not None:
        decision = Compilation(wanted, CompileReason.REQUESTED if wanted else CompileReason.DECLINED)
    else:
        against = _against(anatomy, run, on_this_machine=on_this_machine)
        decision = Compilation(against is None, against or CompileReason.AUTOMATIC)
    if settings.mixed_precision == "fp8" and _own(run) and not (settings.use_cpu or decision.compiled):
        raise ConfigError(
            f"mixed_precision fp8 is slower than bf16 unless blocks are compiled; {decision.text}",
            help="use bf16, or set sharding.compile: true",
        )
    sharding = replace(run.recipe.sharding, compile=decision.compiled)
    return replace(run, recipe=replace(run.recipe, sharding=sharding)), decision


_VARIANTS = 64
"""Programs of one block: for training and validation, and for lengths and kinds of layers. Past torch's own
limit of 8 (2.13, ``torch/_dynamo/config.py``) blocks silently run eagerly."""


def compile_modules(model: nn.Module, paths: Iterable[str]) -> None:
    """Compile modules, each by itself, when they first run.

    Args:
        model: Below FSDP, whose hooks stay outside the programs.
        paths: The modules.
    """
    from torch._dynamo import config

    config.recompile_limit = _VARIANTS
    for path in paths:
        model.get_submodule(path).compile()


def _own(run: ResolvedRun) -> bool:
    return run.loop.program == OWN_LOOP.program


def _against(anatomy: Anatomy, run: ResolvedRun, *, on_this_machine: bool) -> CompileReason | None:
    """Return what rules out that blocks are compiled without being asked for, or None."""
    recipe, sharding, mesh = run.recipe, run.sharding, run.mesh
    lora = recipe.method.lora
    if run.settings.use_cpu:
        return CompileReason.CPU
    if not _own(run):
        return CompileReason.OTHER_PROGRAM
    if mesh.tp > 1:
        return CompileReason.TENSOR_PARALLEL
    if mesh.cp > 1:
        return CompileReason.CONTEXT_PARALLEL
    if experts_of(anatomy.parameters) is not None:
        return CompileReason.EXPERTS
    if lora is not None and lora.base != "unchanged":
        return CompileReason.QUANTISED_BASE
    if sharding.recomputes and run.settings.activation_checkpointing_offload:
        return CompileReason.ACTIVATION_OFFLOAD
    if recipe.data.padded == "longest":
        return CompileReason.VARYING_LENGTHS
    if sharding.wrap_policy == "size" or _nested(anatomy, sharding.wrap_classes):
        return CompileReason.NESTED_UNITS
    if not _tested(anatomy.spec, recipe):
        return CompileReason.UNTESTED
    if not _measured():
        return CompileReason.TORCH_VERSION
    return CompileReason.NO_COMPILER if on_this_machine and not _has_compiler() else None


def _nested(anatomy: Anatomy, classes: tuple[str, ...]) -> bool:
    """Say whether a module of the wrapped classes lies within another one."""
    paths = {module.path for module in anatomy.modules if module.class_name in classes}
    return any(path[:end] in paths for path in paths for end, letter in enumerate(path) if letter == ".")


def _tested(spec: ModelSpec, recipe: Recipe) -> bool:
    config: Any = spec.config
    text = config.get("text_config") or config
    return (
        spec.library == "transformers"
        and not spec.trust_remote_code
        and not any(config.get(name) for name in _SEVERAL_INPUTS)
        and objective_for(recipe, spec).name in _TESTED
        and separates(SimpleNamespace(**text))
    )


def _measured() -> bool:
    """Say whether the memory of compiled blocks is known for the installed torch (or none is installed)."""
    try:
        return version("torch").split("+")[0].rpartition(".")[0] in MEASURED_TORCH
    except PackageNotFoundError:
        return True


def _has_compiler() -> bool:
    """Say whether Inductor can write kernels for GPUs: Triton, and a C compiler for their launchers.

    As Triton looks for it (3.5, ``runtime/build.py``).
    """
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1" or find_spec("triton") is None:
        return False
    return bool(os.environ.get("CC") or shutil.which("clang") or shutil.which("gcc"))
