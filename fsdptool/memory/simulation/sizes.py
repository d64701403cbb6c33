"""Bytes of shards, gathers and reductions, by FSDP2's own rules (torch 2.13, ``_fsdp_param.py``)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from fsdptool.records.anatomy import Parameter
from fsdptool.records.sharding import UnitPlan

WIDTH = {
    "float64": 8,
    "complex64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "float16": 2,
    "bfloat16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
"""Bytes per element."""

_FLOATING = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


def rounded(size: int, grain: int) -> int:
    """Return ``size`` as the allocator counts it: up to a multiple of ``grain`` (512 on CUDA, else 1)."""
    return -(-size // grain) * grain


def pinned(size: int) -> int:
    """Return the page-locked host memory behind ``size`` bytes.

    torch's allocator of it rounds up to powers of two (2.13, ``CachingHostAllocator.h``).
    """
    return 1 << (size - 1).bit_length() if size else 0


def rounded_sum(sizes: Iterable[int], grain: int) -> int:
    """Return the bytes of several allocations."""
    return sum(-(-size // grain) * grain for size in sizes)


def shard_numel(shape: tuple[int, ...], ranks: int) -> int:
    """Return the elements of rank 0's shard, which is the padded size every rank allocates.

    Dimension 0 is cut in ``ceil(dim0 / ranks)`` rows (``_init_sharded_param``, ``_chunk_with_empty``).
    """
    if not shape:
        return 1
    return -(-shape[0] // ranks) * prod(shape[1:])


@dataclass(frozen=True, slots=True)
class Weights:
    """One parameter under a plan: elements per rank and the dtypes it passes through.

    Attributes:
        parameter: What it is.
        shard: Elements of rank 0's (padded) shard.
        whole: Elements after gathering, padding included.
        stored: Bytes per element of the shard.
        computed: Bytes per element while computing.
        casts: Whether gathering casts the shard first.
    """

    parameter: Parameter
    shard: int
    whole: int
    stored: int
    computed: int
    casts: bool

    @property
    def trainable(self) -> bool:
        """Whether it gets a gradient."""
        return self.parameter.trainable


def weigh(parameter: Parameter, plan: UnitPlan, ranks: int) -> Weights:
    """Return the sizes of one sharded parameter."""
    stored = stored_dtype(parameter, plan)
    computed = plan.param_dtype if plan.param_dtype and stored in _FLOATING else stored
    shard = shard_numel(parameter.shape, ranks)
    return Weights(
        parameter, shard, shard * ranks, WIDTH.get(stored, 4), WIDTH.get(computed, 4), stored != computed
    )


def stored_dtype(parameter: Parameter, plan: UnitPlan) -> str:
    """Return the dtype the shard is kept in: trainable floating parameters follow ``master_dtype``."""
    if parameter.trainable and plan.master_dtype and parameter.dtype in _FLOATING:
        return plan.master_dtype
    return parameter.dtype


def reduce_width(plan: UnitPlan) -> int | None:
    """Return bytes per element of reduction, or None where gradients are reduced as they are.

    ``init_dtype_attrs``: a reduce dtype equal to the policy's parameter dtype is dropped.
    """
    if plan.reduce_dtype is None or plan.reduce_dtype == plan.param_dtype:
        return None
    return WIDTH[plan.reduce_dtype]
