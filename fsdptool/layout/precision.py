"""Which dtypes FSDP2's mixed-precision policy gets, per layout."""

from __future__ import annotations

from dataclasses import dataclass

from fsdptool.records.anatomy import Anatomy
from fsdptool.records.recipe import Sharding
from fsdptool.records.settings import FsdpSettings

_COMPUTE = {"no": None, "bf16": "bfloat16", "fp16": "float16", "fp8": "bfloat16"}
"""accelerate 1.15 computes fp8 runs in bfloat16 outside the fp8 layers
(``accelerate/utils/dataclasses.py:set_mixed_precision``); so do we."""

_BITS = {"float16": 16, "bfloat16": 16, "float32": 32, "float64": 64}


@dataclass(frozen=True, slots=True)
class Dtypes:
    """The policy's three dtypes, and what trainable shards are stored in (None: as built)."""

    param: str | None
    reduce: str | None
    output: str | None
    master: str | None


def accelerate_dtypes(settings: FsdpSettings) -> Dtypes:
    """Return what accelerate 1.15 sets: one dtype for parameters, reduction and outputs.

    Trainable parameters are upcast to fp32 masters whenever precision is not ``no``
    (``accelerate/utils/fsdp_utils.py:fsdp2_prepare_model``).
    """
    compute = _COMPUTE[settings.mixed_precision]
    return Dtypes(compute, compute, compute, "float32" if compute else None)


def native_dtypes(anatomy: Anatomy, settings: FsdpSettings, sharding: Sharding) -> Dtypes:
    """Return the trainer's own: fp32 masters under mixed precision, reduction never narrower than asked.

    ``reduce_dtype`` only widens: with fp32 or fp64 gradients an fp32 request changes nothing.
    """
    compute = sharding.param_dtype or _COMPUTE[settings.mixed_precision]
    master = "float32" if compute else None
    gradient = compute or _widest_trainable(anatomy)
    wanted = sharding.reduce_dtype
    narrows = wanted is not None and _BITS[wanted] <= _BITS.get(gradient, 32) and wanted != gradient
    reduce = None if wanted is None or narrows or wanted == gradient else wanted
    return Dtypes(compute, reduce, sharding.output_dtype, master)


def _widest_trainable(anatomy: Anatomy) -> str:
    dtypes = {parameter.dtype for parameter in anatomy.parameters if parameter.trainable}
    return max(dtypes or {"float32"}, key=lambda name: _BITS.get(name, 32))
