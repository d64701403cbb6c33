"""The dtypes of a run by its configuration file: stored, gathered, computed, reduced, returned, saved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fsdptool.records.diagnostic import EffectiveDtypes

if TYPE_CHECKING:
    from fsdptool.config.context import LintContext

COMPUTED = {"bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
"""dtype of ``mixed_precision`` (accelerate 1.15, ``set_mixed_precision``: fp8 layers aside, bfloat16)."""

_NOT_UPCAST = frozenset({"axolotl"})
"""Programs that replace ``fsdp2_prepare_model``, in some versions by one that does not upcast."""


def consumer_dtypes(lint: LintContext) -> EffectiveDtypes:
    """Return what accelerate makes of ``mixed_precision``, or ``fsdptool train`` where it reads the file.

    accelerate 1.15: one dtype for parameters, reduction and outputs (``set_mixed_precision``); trained
    parameters are upcast to fp32 and saved so (``fsdp2_prepare_model``; under version 1
    ``prepare_model``). Under version 1 nothing casts the fp32 outputs of ``convert_outputs_to_fp32`` back.
    """
    computed = COMPUTED.get(lint.get("mixed_precision") or "no")
    if lint.consumer.name == "fsdptool":
        return EffectiveDtypes("float32", computed or "float32", *_native(computed))
    if computed is None:
        return EffectiveDtypes(None, None, None, None, None, None)
    stored = None if lint.consumer.name in _NOT_UPCAST else "float32"
    outputs = computed if lint.get("fsdp_version") == 2 else "float32"
    return EffectiveDtypes(stored, computed, computed, computed, outputs, stored)


def _native(computed: str | None) -> tuple[str, str, str, str]:
    """``fsdptool train`` reduces in fp32 unless the recipe says otherwise, and casts no outputs."""
    return computed or "float32", "float32", computed or "float32", "float32"
