"""Bytes of shards, and what each collective copies, stages, rounds and keeps alive, by device profile.

Torch-free. The one home of these rules: the schedule plays the buffers, and the step-time model moves
their bytes. Sources: torch 2.13,
``torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py`` and ``_fsdp_param.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from fsdptool.memory.simulation.ledger import (
    ALL_REDUCE,
    GATHER,
    GRADIENTS,
    REDUCE,
    RESHARDED,
    STAGING,
    UNSHARDED,
    UNSHARDED_GRADIENTS,
    Block,
)
from fsdptool.records.anatomy import Parameter
from fsdptool.records.cluster import DeviceProfile
from fsdptool.records.sharding import Unit, UnitPlan

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

_SINGLY = 512
"""Micro-batches of a step whose inputs are allocated one by one."""
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20
"""Bytes above which a bucket of plain data parallelism takes no further gradient."""
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


def alike(sizes: tuple[int, ...], count: int, grain: int) -> tuple[int, ...]:
    """Return the allocations of several micro-batches whose inputs live and die together.

    Of more than 512 micro-batches, several share an allocation of the same bytes: the replay of each would
    take minutes, and segments of the allocator hold the same bytes, but for the last one.
    """
    together = max(-(-count // _SINGLY), 1)
    shared = tuple(rounded_sum((size,), grain) * together for size in sizes)
    return (shared if together > 1 else sizes) * (count // together) + sizes * (count % together)


def shard_shape(shape: tuple[int, ...], ranks: int, dimension: int = 0) -> tuple[int, ...]:
    """Return the shape of rank 0's shard, which is the padded size every rank allocates.

    A dimension is cut in parts of ``ceil(size / ranks)`` (``_init_sharded_param``, ``_chunk_with_empty``).
    """
    return tuple(-(-size // ranks) if place == dimension else size for place, size in enumerate(shape))


@dataclass(frozen=True, slots=True)
class ShardedParameter:
    """One parameter under a plan: elements per rank and the dtypes it passes through.

    Attributes:
        parameter: What it is.
        dimension: Along which it is sharded (``UnitPlan.shard_dimension``).
        shard: Elements of rank 0's (padded) shard.
        whole: Elements after gathering, padding included.
        stored: Bytes per element of the shard.
        computed: Bytes per element of its gradient, and ``dtype`` the dtype it computes in.
        gathered: Bytes per element of what is gathered: ``computed``, or 1 in float8.
        casts: Whether gathering casts the shard first.
    """

    parameter: Parameter
    dimension: int
    shard: int
    whole: int
    stored: int
    computed: int
    dtype: str
    gathered: int
    casts: bool

    @property
    def ranks(self) -> int:
        """Over how many ranks it is sharded."""
        return self.whole // self.shard if self.shard else 1

    @property
    def narrow(self) -> bool:
        """Whether it is gathered in float8."""
        return self.gathered < self.computed

    @property
    def trainable(self) -> bool:
        """Whether it gets a gradient."""
        return self.parameter.trainable


def weigh(parameter: Parameter, unit: Unit, plan: UnitPlan, ranks: int) -> ShardedParameter:
    """Return the sizes of one parameter of ``unit``, sharded over ``ranks`` ranks."""
    stored = stored_dtype(parameter, plan)
    computed = plan.param_dtype if plan.param_dtype and stored in _FLOATING else stored
    dimension = plan.shard_dimension(unit, parameter.shape, ranks)
    shard = prod(shard_shape(parameter.shape, ranks, dimension))
    width = WIDTH.get(computed, 4)
    gathered = 1 if plan.gathers_in_float8(unit, parameter, ranks) else width
    return ShardedParameter(
        parameter,
        dimension,
        shard,
        shard * ranks,
        WIDTH.get(stored, 4),
        width,
        computed,
        gathered,
        casts=stored != computed or gathered < width,
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


COMPUTE, COPY_IN, REDUCE_SCATTER = range(3)
"""Streams FSDP2 allocates on (``FSDPCommContext``, torch 2.13)."""


@dataclass(frozen=True, slots=True)
class MemoryDevice:
    """How a device profile treats memory.

    Attributes:
        grain: Bytes its allocator rounds sizes to.
        host_apart: Whether host memory is memory of its own: offloaded tensors move, copies to it are pinned.
        copying: Whether the backend of collectives works on copies, as gloo does (:func:`backend_copy`).
        fused_copy_in: Whether one kernel pads, casts and concatenates the gradients of a reduction
            (:func:`copies_of_gradients`).
    """

    grain: int
    host_apart: bool = False
    copying: bool = False
    fused_copy_in: bool = False


DEVICES: Mapping[DeviceProfile, MemoryDevice] = {
    "cuda": MemoryDevice(512, host_apart=True, fused_copy_in=True),
    "cpu-fake": MemoryDevice(1),
    "cpu-gloo": MemoryDevice(1, copying=True),
}


@dataclass(frozen=True, slots=True)
class UnshardBuffers:
    """What one unit allocates when it is gathered; equal for units of one signature.

    Attributes:
        scaling: What casting shards to float8 holds at its worst moment, before ``cast`` is complete.
        cast: Copies of the shards in the dtype that is gathered, while gathering.
        gather: The all-gather's output.
        whole: The unsharded parameters.
        unordered: The parts of parameters that are not sharded along dimension 0, as ranks sent them: they
            are copied out of the output one after the other before they are put together
            (``foreach_all_gather_copy_out``).
        smaller: What stays after forward when resharding to fewer ranks, and its cast.
        offloaded: Device copies of host shards while gathering.
    """

    scaling: Block | None
    cast: Block | None
    gather: Block | None
    whole: Block
    unordered: Block | None
    smaller: Block | None
    smaller_cast: Block | None
    offloaded: Block | None


@dataclass(frozen=True, slots=True)
class Reduction:
    """Buffers of one unit's gradient reduction (``foreach_reduce``).

    Attributes:
        input: The gradients of all ranks' rows, padded, in the reduce dtype.
        copies: What copying the gradients into it allocates besides (:func:`copies_of_gradients`).
        output: This rank's rows.
        stored: The output in the parameters' own dtype, if that differs.
    """

    input: Block
    copies: Block | None
    output: Block
    stored: Block | None


def unshard_buffers(
    weights: Sequence[ShardedParameter], plan: UnitPlan, ranks: int, reshard: bool | int, grain: int
) -> UnshardBuffers:
    """Return the buffers that gather the parameters ``weights`` of one unit.

    Args:
        weights: The unit's parameters.
        plan: Whether shards are on the host.
        ranks: Ranks that share one copy.
        reshard: ``reshard_after_forward``.
        grain: Bytes the allocator rounds to.
    """
    whole_sizes = tuple(w.whole * w.gathered for w in weights)
    whole = Block(UNSHARDED, rounded_sum(whole_sizes, grain), whole_sizes, COMPUTE)
    if ranks == 1:
        return UnshardBuffers(None, None, None, whole, None, None, None, None)
    sizes = tuple(w.whole * w.gathered for w in weights if w.dimension)
    unordered = Block(GATHER, rounded_sum(sizes, grain), sizes, COMPUTE) if sizes else None
    casts = [w for w in weights if w.casts and not w.narrow]
    cast_bytes = sum(w.shard * w.computed for w in casts)
    narrow = [w.shard for w in weights if w.narrow]
    gather_bytes = sum(whole_sizes)
    gather = Block(GATHER, rounded(gather_bytes, grain), (gather_bytes,), COPY_IN)
    cast = offloaded = None
    if plan.cpu_offload:
        sizes = tuple(w.shard * w.computed for w in weights)
        offloaded = Block(GATHER, rounded_sum(sizes, grain), sizes, COPY_IN)
    elif casts or narrow:
        # A cast to float8 for each weight, and one flat copy of all others.
        sizes = (*narrow, *([cast_bytes] if casts else []))
        cast = Block(GATHER, rounded_sum(sizes, grain), sizes, COPY_IN)
    smaller = smaller_cast = None
    if not isinstance(reshard, bool):
        kept = tuple(size // reshard for size in whole_sizes)
        smaller = Block(RESHARDED, rounded_sum(kept, grain), kept, COMPUTE)
        if casts:
            again = sum(w.whole * w.computed for w in casts) // reshard
            smaller_cast = Block(GATHER, rounded(again, grain), (again,), COPY_IN)
    scaling = _float8_casts(narrow, grain) if narrow else None
    return UnshardBuffers(scaling, cast, gather, whole, unordered, smaller, smaller_cast, offloaded)


def _float8_casts(shards: Sequence[int], grain: int) -> Block:
    """Return what casting ``shards`` elements one after the other holds at its worst moment.

    Each is multiplied by its scale and clamped, out of place and in fp32, and then cast, while the casts
    before it wait (torchao 0.18, ``float8/float8_training_tensor.py:_ToFloat8ConstrFunc``).
    """
    moments = [(*shards[:place], 4 * size, 4 * size, size) for place, size in enumerate(shards)]
    worst = max(moments, key=sum)
    return Block(GATHER, rounded_sum(worst, grain), worst, COPY_IN)


def reduction(
    weights: Sequence[ShardedParameter], plan: UnitPlan, device: MemoryDevice, *, accumulated: bool = False
) -> Reduction:
    """Return the buffers that reduce-scatter the gradients of ``weights``.

    Args:
        weights: The parameters that have a gradient.
        plan: The reduce dtype.
        device: Whose kernels copy the gradients.
        accumulated: Whether the gradients were accumulated unsharded, and so have the reduce dtype already.
    """
    grain = device.grain
    width = reduce_width(plan) or max((w.computed for w in weights), default=4)
    shard = sum(w.shard for w in weights)
    whole = sum(w.whole for w in weights)
    stored = max((w.stored for w in weights), default=4)
    output_kind = GRADIENTS if stored == width else REDUCE
    kept = None
    if stored != width:
        kept = Block(GRADIENTS, rounded(shard * stored, grain), (shard * stored,), REDUCE_SCATTER)
    return Reduction(
        Block(REDUCE, rounded(whole * width, grain), (whole * width,), COMPUTE),
        copies_of_gradients(weights, plan, device, accumulated=accumulated),
        Block(output_kind, rounded(shard * width, grain), (shard * width,), REDUCE_SCATTER),
        kept,
    )


_FUSED_CAST = ("bfloat16", "float32")
"""The gradient's and the reduction's dtype of the only cast that CUDA's ``_chunk_cat`` fuses."""


def copies_of_gradients(
    weights: Sequence[ShardedParameter], plan: UnitPlan, device: MemoryDevice, *, accumulated: bool = False
) -> Block | None:
    """Return what ``_chunk_cat`` allocates while it copies gradients into a reduction's input, or None.

    CUDA pads, casts and concatenates in one kernel if both dtypes are equal or the gradients are bfloat16
    and the input is float32 (torch 2.13, ``aten/src/ATen/native/cuda/TensorShape.cu``,
    ``_chunk_cat_out_cuda``); its table of tiles, 8 bytes for each 2 KiB of a rank's rows, is not counted.
    In all other cases, and always on a CPU, every gradient whose rows the ranks do not divide is first
    copied into a padded tensor, and the copies live until all are concatenated
    (``aten/src/ATen/native/TensorShape.cpp``, ``_pad_chunk``). The CPU's concatenation also casts out of
    place, tensor by tensor (``cat_out_cpu``: ``cast_common_dtype_to_outputs``).

    Args:
        weights: The parameters that have a gradient.
        plan: The reduce dtype.
        device: Whose kernels run.
        accumulated: Whether the gradients have the reduce dtype already.
    """
    reduced = reduce_width(plan)
    casting = [w for w in weights if reduced and not accumulated and w.dtype != plan.reduce_dtype]
    if device.fused_copy_in and all((w.dtype, plan.reduce_dtype) == _FUSED_CAST for w in casting):
        return None
    padded = [w for w in weights if w.whole != w.parameter.numel]
    copies = [w.whole * (reduced if accumulated and reduced else w.computed) for w in padded]
    if casting and not device.fused_copy_in:
        copies.append(max(w.whole * w.computed for w in casting))
    if not copies:
        return None
    return Block(REDUCE, rounded_sum(copies, device.grain), tuple(copies), COMPUTE)


def backend_copy(whole: Block) -> Block:
    """Return the memory that gloo takes while a collective runs (torch 2.13, ``ProcessGroupGloo.cpp``).

    An all-gather receives into a flat buffer of its output's size. A reduce-scatter is an all-reduce of a
    copy of its input.

    Args:
        whole: The output of the all-gather, or the input of the reduce-scatter.
    """
    return Block(STAGING, whole.total, whole.sizes)


def replicated_messages(plan: UnitPlan, grain: int) -> list[Block]:
    """Return the all-reduces of gradients FSDP does not manage: one message per dtype, at least fp32."""
    by_dtype: dict[str, int] = {}
    for parameter in plan.ignored:
        if parameter.trainable:
            dtype = stored_dtype(parameter, plan)
            by_dtype[dtype] = by_dtype.get(dtype, 0) + parameter.numel
    messages = []
    for dtype, count in by_dtype.items():
        size = count * max(WIDTH.get(dtype, 4), 4)
        # What is not wide enough is cast before it is put together.
        sizes = (size, size) if WIDTH.get(dtype, 4) < 4 else (size,)
        messages.append(Block(ALL_REDUCE, rounded_sum(sizes, grain), sizes))
    return messages


def gradient_buckets(plan: UnitPlan, grain: int) -> Block | None:
    """Return the buckets in which plain data parallelism sums gradients: as many bytes as these, all along.

    They fill in the order of backward, the first up to 1 MiB and each other one up to 25 MiB (torch 2.13,
    ``csrc/distributed/c10d/reducer.cpp:compute_bucket_assignment_by_size``). Programs leave
    ``gradient_as_bucket_view`` off, which would make the gradients views of them. None where FSDP manages
    everything that is trained.
    """
    filled: dict[str, list[int]] = {}
    for parameter in reversed(plan.ignored):
        if parameter.trainable:
            dtype = stored_dtype(parameter, plan)
            buckets = filled.setdefault(dtype, [0])
            if buckets[-1] >= (_FIRST_BUCKET if len(buckets) == 1 else _BUCKET):
                buckets.append(0)
            buckets[-1] += parameter.numel * WIDTH.get(dtype, 4)
    sizes = tuple(size for buckets in filled.values() for size in buckets)
    return Block(ALL_REDUCE, rounded_sum(sizes, grain), sizes) if sizes else None


def full_tensor(weights: ShardedParameter, width: int, device: MemoryDevice, ranks: int) -> tuple[int, ...]:
    """Return the allocations behind one whole tensor of a full checkpoint.

    ``full_tensor`` gathers padded rows; uneven ones are cut by a copy, and parts of another dimension are
    put together by one (torch 2.13, ``placement_types.py``, ``Shard._to_replicate_tensor``). The CPU
    backend receives into memory of its own.

    Args:
        weights: The parameter.
        width: Bytes per element.
        device: Where.
        ranks: Ranks that share one copy.
    """
    whole = weights.whole * width
    if device.copying and ranks > 1:
        return whole, whole
    if weights.dimension:
        return whole, whole
    if weights.whole != weights.parameter.numel:
        return whole, weights.parameter.numel * width
    return (whole,)


@lru_cache(maxsize=4096)
def gradient_block(size: int) -> Block:
    """Return a parameter's unsharded gradient as the trace made it."""
    return Block(UNSHARDED_GRADIENTS, size, (size,), COMPUTE)


def widened(weights: ShardedParameter, plan: UnitPlan, grain: int) -> Block | None:
    """Return an unsharded gradient in the reduce dtype, or None where it stays as it is."""
    width = reduce_width(plan)
    if width is None or width == weights.computed:
        return None
    size = weights.parameter.numel * width
    return Block(UNSHARDED_GRADIENTS, rounded(size, grain), (size,), COMPUTE)
