"""The one owner of grouping: an anatomy and settings in, a UnitPlan with its dtypes out."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from fsdptool.errors import ConfigError
from fsdptool.families.registry import family_of
from fsdptool.layout.accelerate import accelerate_units
from fsdptool.layout.native import native_units
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.checkpointing import BlockPolicy, Checkpointing
from fsdptool.records.recipe import Sharding
from fsdptool.records.resolved_run import ResolvedSharding
from fsdptool.records.sharding import FsdpSettings, Grouping, Layout, Unit, UnitPlan

_COMPUTE = {"no": None, "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
"""accelerate 1.15 computes fp8 runs in bfloat16 outside the fp8 layers
(``accelerate/utils/dataclasses.py:set_mixed_precision``); so do we."""

FLOAT8_MULTIPLE = 16
"""Rows and columns ``torch._scaled_mm`` takes (torch 2.13)."""

_BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}


def resolve_sharding(
    settings: FsdpSettings, sharding: Sharding | None = None, *, layout: Layout | None = None
) -> ResolvedSharding:
    """Return how a model is sharded: what the file says and what the recipe adds, in one.

    A recipe's number of ranks goes before the file's true or false for resharding. The file switches
    activation checkpointing on, and the recipe says how much is recomputed.

    Args:
        settings: What the accelerate YAML says.
        sharding: What the recipe adds; None takes its defaults.
        layout: Overrides ``sharding.layout``.
    """
    sharding = sharding if sharding is not None else Sharding()
    layout = layout if layout is not None else sharding.layout
    recomputed = (sharding.checkpointing or Checkpointing()) if settings.activation_checkpointing else None
    return ResolvedSharding(
        layout=layout,
        wrap_policy=settings.wrap_policy,
        wrap_classes=settings.wrap_classes,
        min_num_params=settings.min_num_params,
        ignored_modules=settings.ignored_modules,
        grouping=sharding.grouping,
        reshard_after_forward=sharding.reshard_after_forward or settings.reshard_after_forward,
        checkpointing=recomputed or Checkpointing("none"),
        compute_dtype=compute_dtype(settings, sharding, layout),
        reduce_dtype=sharding.reduce_dtype,
        output_dtype=sharding.output_dtype,
        cpu_offload=settings.cpu_offload,
        prefetch=sharding.units_ahead,
        float8=settings.mixed_precision == "fp8",
    )


def group(
    anatomy: Anatomy,
    sharding: ResolvedSharding,
    *,
    replicated: Collection[str] = (),
    experts: Sequence[str] = (),
) -> UnitPlan:
    """Decide which parameters form which FSDP unit. ``memory`` simulates it, ``training`` applies it.

    Args:
        anatomy: The model as it will be trained (after LoRA injection, if any).
        sharding: How it is sharded.
        replicated: Names of further parameters kept whole on every rank (LoRA adapters).
        experts: Paths of the modules whose experts an expert-parallel group shares out.

    Raises:
        ConfigError: The settings do not suit the model; the message names the class or parameter.
    """
    ignored = _ignored(anatomy, sharding.ignored_modules) | set(replicated)
    # fully_shard refuses 0-dim parameters (torch 2.13, _verify_managed_param), and the reduction of gradients
    # refuses empty ones (_chunk_cat): there is nothing to cut.
    whole = {parameter.fqn for parameter in anatomy.parameters if not parameter.shape or not parameter.numel}
    if sharding.layout == "accelerate":
        _refuse_extras(sharding)
        _refuse_uncuttable(anatomy, whole - ignored)
        policy = sharding.checkpointing
        (selection,) = policy.per_block(1) if policy.mode == "selective" else (BlockPolicy(1),)
        units = accelerate_units(anatomy, sharding, ignored, selection.saved)
        dtypes = accelerate_dtypes(anatomy, sharding)
    else:
        ignored |= whole
        units = native_units(anatomy, sharding, ignored, experts)
        dtypes = native_dtypes(anatomy, sharding)
    _refuse_hookless(anatomy, units)
    return UnitPlan(
        layout=sharding.layout,
        units=units,
        param_dtype=dtypes.param,
        reduce_dtype=dtypes.reduce,
        output_dtype=dtypes.output,
        master_dtype=dtypes.master,
        input_dtype=dtypes.inputs,
        exact_inputs=() if sharding.layout == "accelerate" else family_of(anatomy.spec).exact_inputs,
        ignored=tuple(parameter for parameter in anatomy.parameters if parameter.fqn in ignored),
        cpu_offload=sharding.cpu_offload,
        prefetch=1 if sharding.layout == "accelerate" else sharding.prefetch,
        float8=_float8_weights(anatomy) if sharding.float8 else (),
    )


def _float8_weights(anatomy: Anatomy) -> tuple[str, ...]:
    """Return the trained weights of the linear layers inside lists of blocks that float8 products take.

    accelerate 1.15 converts the linear layers outside the blocks, too, and neither the first nor the last of
    the model (``accelerate/utils/ao.py``).
    """
    lists = tuple(
        f"{module.path}." for module in anatomy.modules if "ModuleList" in (module.class_name, *module.bases)
    )
    # A layer of torch itself: no class of a model that has its name, and none that is made from it.
    layers = {
        module.path
        for module in anatomy.modules
        if module.class_name == "Linear" and not module.arguments and "Linear" not in module.bases
    }
    return tuple(
        parameter.fqn
        for parameter in anatomy.parameters
        if parameter.fqn.startswith(lists)
        and parameter.fqn.removesuffix(".weight") in layers
        and ".lora_" not in parameter.fqn
        and ".original_module" not in parameter.fqn
        and parameter.trainable
        and not parameter.aliases
        and not any(size % FLOAT8_MULTIPLE for size in parameter.shape)
    )


def _ignored(anatomy: Anatomy, expression: str | None) -> set[str]:
    if expression is None:
        return set()
    try:
        pattern = re.compile(expression)
    except re.error as error:
        raise ConfigError(
            f"ignored_modules {expression!r} is not a regular expression: {error}",
            help="it is matched in full against module paths, as accelerate does",
        ) from error
    paths = [module.path for module in anatomy.modules if pattern.fullmatch(module.path)]
    prefixes = tuple(f"{path}." if path else "" for path in paths)
    return {p.fqn for p in anatomy.parameters if any(name.startswith(prefixes) for name in p.names)}


def _refuse_uncuttable(anatomy: Anatomy, names: set[str]) -> None:
    """Refuse parameters without dimensions or without elements, which accelerate passes to fully_shard."""
    if not names:
        return
    parameter = next(parameter for parameter in anatomy.parameters if parameter.fqn in names)
    what = "an empty" if parameter.shape else "a 0-dimensional"
    where = "torch refuses to reduce" if parameter.shape else "fully_shard rejects"
    raise ConfigError(
        f"{anatomy.spec.model_class} has {what} parameter ({parameter.fqn}), which {where} and"
        " accelerate 1.15 passes to it",
        help="train with fsdptool's native layout, which keeps it whole on every rank",
    )


def _refuse_hookless(anatomy: Anatomy, units: Iterable[Unit]) -> None:
    hookless = set(anatomy.hookless)
    for unit in units:
        if unit.kind == "block" and hookless.intersection(unit.modules):
            raise ConfigError(
                f"{anatomy.spec.model_class} runs {unit.class_name} ({unit.id}) without FSDP2's hooks:"
                " as a unit it would stay sharded while it is used",
                help=f"leave {unit.class_name} out of the wrap classes",
            )


def _refuse_extras(sharding: ResolvedSharding) -> None:
    if not isinstance(sharding.reshard_after_forward, bool):
        raise ConfigError(
            f"sharding.reshard_after_forward: {sharding.reshard_after_forward} is not supported in the"
            " accelerate layout: accelerate 1.15 supports only true and false",
            help="use the native layout, or leave the key out",
        )
    if sharding.grouping != Grouping():
        raise ConfigError(
            "sharding.grouping is not supported in the accelerate layout, which groups as accelerate does",
            help="use the native layout, or leave the key out",
        )
    if sharding.checkpointing.mode == "per_block":
        raise ConfigError(
            "sharding.checkpointing.mode per_block is not supported in the accelerate layout: accelerate 1.15"
            " checkpoints every wrapped block",
            help="use the native layout, or mode full",
        )


def compute_dtype(settings: FsdpSettings, sharding: Sharding, layout: Layout) -> str | None:
    """Return the dtype parameters are cast to for computing; None leaves them as they are stored.

    accelerate has no other dtype for parameters than the one of its mixed precision.
    """
    own = sharding.param_dtype if layout == "native" else None
    return own or _COMPUTE[settings.mixed_precision]


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The policy's three dtypes, what trainable shards are stored in, and what inputs are cast to."""

    param: str | None
    reduce: str | None
    output: str | None
    master: str | None
    inputs: str | None


def accelerate_dtypes(anatomy: Anatomy, sharding: ResolvedSharding) -> Dtypes:
    """Return what accelerate 1.15 sets: one dtype for parameters, reduction and outputs.

    Trainable parameters are upcast to fp32 masters whenever precision is not ``no``
    (``accelerate/utils/fsdp_utils.py:fsdp2_prepare_model``). Without mixed precision scripts cast the inputs
    of a 16-bit model themselves (diffusers 0.39, ``examples/dreambooth/train_dreambooth_flux.py``:
    ``weight_dtype``).
    """
    compute = sharding.compute_dtype
    inputs = compute or _prevailing(anatomy)
    return Dtypes(compute, compute, compute, _master(sharding), inputs)


def native_dtypes(anatomy: Anatomy, sharding: ResolvedSharding) -> Dtypes:
    """Return the trainer's own: fp32 masters under mixed precision, reduction never narrower than asked.

    ``reduce_dtype`` only widens: with fp32 or fp64 gradients an fp32 request changes nothing. Without
    mixed precision inputs follow the parameters: FSDP2 would hand fp32 latents to a bf16 model.
    """
    compute = sharding.compute_dtype
    master = _master(sharding)
    gradient = compute or sharding.trained_dtype or _widest_trainable(anatomy)
    requested = sharding.reduce_dtype
    narrows = requested is not None and _BITS[requested] <= _BITS.get(gradient, 32) and requested != gradient
    reduce = None if requested is None or narrows or requested == gradient else requested
    return Dtypes(compute, reduce, sharding.output_dtype, master, compute or _prevailing(anatomy))


def _master(sharding: ResolvedSharding) -> str | None:
    return sharding.trained_dtype or ("float32" if sharding.compute_dtype else None)


def _prevailing(anatomy: Anatomy) -> str | None:
    """Return the floating dtype that most of the model is stored in."""
    elements: dict[str, int] = {}
    for parameter in anatomy.parameters:
        if parameter.dtype in _BITS:
            elements[parameter.dtype] = elements.get(parameter.dtype, 0) + parameter.numel
    return max(elements, key=lambda name: elements[name], default=None)


def _widest_trainable(anatomy: Anatomy) -> str:
    dtypes = {parameter.dtype for parameter in anatomy.parameters if parameter.trainable}
    return max(dtypes or {"float32"}, key=lambda name: _BITS.get(name, 32))
