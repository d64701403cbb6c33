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
    """The policy's three dtypes, what trainable shards are stored in, and what inputs are cast to."""

    param: str | None
    reduce: str | None
    output: str | None
    master: str | None
    inputs: str | None


def accelerate_dtypes(settings: FsdpSettings) -> Dtypes:
    """Return what accelerate 1.15 sets: one dtype for parameters, reduction and outputs.

    Trainable parameters are upcast to fp32 masters whenever precision is not ``no``
    (``accelerate/utils/fsdp_utils.py:fsdp2_prepare_model``).
    """
    compute = _COMPUTE[settings.mixed_precision]
    return Dtypes(compute, compute, compute, "float32" if compute else None, compute)


def native_dtypes(anatomy: Anatomy, settings: FsdpSettings, sharding: Sharding) -> Dtypes:
    """Return the trainer's own: fp32 masters under mixed precision, reduction never narrower than asked.

    ``reduce_dtype`` only widens: with fp32 or fp64 gradients an fp32 request changes nothing. Without
    mixed precision inputs follow the parameters: FSDP2 would hand fp32 latents to a bf16 model.
    """
    compute = sharding.param_dtype or _COMPUTE[settings.mixed_precision]
    master = "float32" if compute else None
    gradient = compute or _widest_trainable(anatomy)
    wanted = sharding.reduce_dtype
    narrows = wanted is not None and _BITS[wanted] <= _BITS.get(gradient, 32) and wanted != gradient
    reduce = None if wanted is None or narrows or wanted == gradient else wanted
    return Dtypes(compute, reduce, sharding.output_dtype, master, compute or _prevailing(anatomy))


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
