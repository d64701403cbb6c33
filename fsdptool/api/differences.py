"""What a plain accelerate script does differently from the native layout, in bytes and precision."""

from __future__ import annotations

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
    from fsdptool.layout import group

    native = group(anatomy, settings, sharding, layout="native")
    try:
        plain = group(anatomy, settings, Sharding(layout="accelerate"), layout="accelerate")
    except FsdptoolError as error:
        return (f"accelerate 1.15 cannot run it: {error.message}",)
    differences = [*_precision(native, plain), *_recipe_only(sharding), *_units(native, plain)]
    if settings.use_cpu:
        differences.insert(0, "on CPU, accelerate 1.15 does not shard the model")
    return tuple(differences)


def _precision(native: UnitPlan, plain: UnitPlan) -> list[str]:
    lines = []
    if native.reduce_dtype != plain.reduce_dtype:
        lines.append(
            f"gradients are reduced in {plain.reduce_dtype or 'the parameter dtype'} instead of "
            f"{native.reduce_dtype or 'the parameter dtype'}"
        )
    if native.output_dtype != plain.output_dtype:
        own = "the dtype the model computes"
        lines.append(
            f"outputs (logits and loss) come in {plain.output_dtype or own} instead of "
            f"{native.output_dtype or own}"
        )
    if native.param_dtype != plain.param_dtype:
        lines.append(
            f"parameters are gathered as {plain.param_dtype or 'stored'} instead of "
            f"{native.param_dtype or 'stored'}"
        )
    if native.master_dtype != plain.master_dtype:
        lines.append(
            f"trainable parameters are stored as {plain.master_dtype or 'loaded'} instead of "
            f"{native.master_dtype or 'loaded'}"
        )
    return lines


def _recipe_only(sharding: Sharding) -> list[str]:
    lines = []
    if sharding.reshard_after_forward is not None:
        lines.append(f"resharding to {sharding.reshard_after_forward} ranks after forward is not available")
    if sharding.prefetch != 1:
        lines.append(f"units are prefetched one at a time instead of {sharding.prefetch}")
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
        lines.append(f"{abs(kept):,} bytes {direction} stay gathered from forward to backward on every rank")
    largest = _largest(plain) - _largest(native)
    if largest:
        direction = "more" if largest > 0 else "less"
        lines.append(f"the largest unit holds {abs(largest):,} bytes {direction} while it is gathered")
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
