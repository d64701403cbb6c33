"""What a plain accelerate script does differently from the native layout, in bytes and precision."""

from __future__ import annotations

from fsdptool.formatting import amount
from fsdptool.records.anatomy import Anatomy
from fsdptool.records.recipe import Sharding
from fsdptool.records.sharding import FsdpSettings, UnitPlan

_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


def list_differences(anatomy: Anatomy, settings: FsdpSettings, sharding: Sharding) -> tuple[str, ...]:
    """Compare both layouts of one model.

    Returns:
        One sentence per difference, largest consequence first; empty when there is none.
    """
    from fsdptool.errors import FsdptoolError
    from fsdptool.layout import group, resolve_sharding

    native = group(anatomy, resolve_sharding(settings, sharding, layout="native"))
    try:
        plain = group(anatomy, resolve_sharding(settings, layout="accelerate"))
    except FsdptoolError as error:
        return (f"accelerate 1.15 cannot run it: {error.message}",)
    differences = [*_precision(native, plain), *_recipe_only(sharding), *_units(native, plain)]
    if settings.use_cpu:
        differences.insert(0, "on CPU, accelerate 1.15 does not shard the model")
    if settings.mesh.tp > 1:
        differences.insert(
            0, "accelerate 1.15 does not divide layers over the tensor-parallel ranks (FSD356)"
        )
    return tuple(differences)


_DTYPES = {
    "reduce_dtype": ("gradients are reduced in", "the parameter dtype"),
    "output_dtype": ("outputs (logits and loss) come in", "the dtype the model computes"),
    "param_dtype": ("parameters are gathered as", "stored"),
    "master_dtype": ("trainable parameters are stored as", "loaded"),
}
"""What each dtype of a plan is about, and what None stands for."""


def _precision(native: UnitPlan, plain: UnitPlan) -> list[str]:
    lines = []
    for name, (what, unset) in _DTYPES.items():
        own, other = getattr(native, name), getattr(plain, name)
        if own != other:
            lines.append(f"{what} {other or unset} instead of {own or unset}")
    return lines


def _recipe_only(sharding: Sharding) -> list[str]:
    lines = []
    if sharding.reshard_after_forward is not None:
        lines.append(f"resharding to {sharding.reshard_after_forward} ranks after forward is not available")
    if sharding.units_ahead != 1:
        lines.append(f"units are prefetched one at a time instead of {sharding.units_ahead}")
    if sharding.checkpointing is not None and sharding.checkpointing.mode not in ("none", "full"):
        lines.append(f"activation checkpointing is full instead of {sharding.checkpointing.mode}")
    if sharding.accumulation == "sharded":
        lines.append("gradients stay unsharded between the micro-batches of one step (no_sync)")
    if sharding.compile:
        lines.append("units are not compiled")
    return lines


def _units(native: UnitPlan, plain: UnitPlan) -> list[str]:
    lines = []
    if len(native.units) != len(plain.units):
        lines.append(f"{len(plain.units)} units instead of {len(native.units)}")
    kept = _kept(plain) - _kept(native)
    if kept:
        direction = "more" if kept > 0 else "less"
        lines.append(f"{amount(abs(kept))} {direction} stay gathered from forward to backward on every rank")
    largest = _largest(plain) - _largest(native)
    if largest:
        direction = "more" if largest > 0 else "less"
        lines.append(f"the largest unit holds {amount(abs(largest))} {direction} while it is gathered")
    return lines


def _bytes(plan: UnitPlan, index: int) -> int:
    unit = plan.units[index]
    return sum(p.numel * _BYTES.get(plan.param_dtype or p.dtype, 4) for p in unit.parameters)


def _kept(plan: UnitPlan) -> int:
    """Bytes of units that forward leaves gathered: reshard False, and the root by torch's rule."""
    return sum(
        _bytes(plan, index)
        for index, unit in enumerate(plan.units)
        if unit.reshard_after_forward is False or (unit.reshard_after_forward is None and unit.kind == "root")
    )


def _largest(plan: UnitPlan) -> int:
    return max((_bytes(plan, index) for index in range(len(plan.units))), default=0)
