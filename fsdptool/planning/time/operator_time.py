"""Seconds of operators on a GPU: a roofline for each matrix product, attention kernel and elementwise run.

A product takes the larger of its arithmetic and its traffic. Attention computes half under a causal mask,
and is slower at short sequences. Everything else moves memory. The host launches every operator, and a module
never runs faster than that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from fsdptool.planning.time.measured_kernels import measured_operation, measured_traffic
from fsdptool.records.cluster import Gpu, Machine
from fsdptool.records.trace import Operation, Segment

_HALF_SPEED = {("attention", False): 100, ("attention", True): 300}
_HALF_SPEED |= {("attention_backward", False): 240, ("attention_backward", True): 500}
"""Positions at which an attention kernel, causal or not, runs at half of its rate at long sequences.

From the rates of FlashAttention-2 on an H100 at 512 to 16,384 positions and head size 128 (Shah et al. 2024,
figures 5 and 6): forward 309 to 370 TFLOP/s, causal 191 to 335; backward 214 to 322. The figure for the
causal backward kernel is assumed.
"""


def peak_flops(gpu: Gpu, dtype: str) -> float:
    """Return the dtype's peak; bfloat16 without tensor cores for it runs at fp32's rate.

    fp32 is taken without TF32, which torch leaves off for matrix products by default (2.13).
    """
    name = "float8" if dtype.startswith("float8") else dtype
    return gpu.flops.get(name, gpu.flops["float32"])


def operation_seconds(operation: Operation, gpu: Gpu, machine: Machine) -> float:
    """Return the time of one product or attention kernel: the larger of arithmetic and traffic.

    Where kernels of the machine were timed, that of the nearest sizes counts instead.
    """
    if (measured := measured_operation(operation, machine)) is not None:
        return measured
    peak = peak_flops(gpu, operation.dtype)
    if operation.kind == "product" or not operation.head_size:
        arithmetic = operation.flops / (peak * machine.matmul_efficiency)
    else:
        arithmetic = operation.flops / (peak * _attention_rate(operation, machine))
        if operation.causal:
            arithmetic /= 2
    return max(arithmetic, operation.bytes_moved / memory_rate(gpu, machine))


Float8Scaling = Literal["tensor", "row", "block"]
"""What shares a scale in float8 products: a whole operand, a row of it, or 32 numbers (MXFP8)."""

_ROWWISE_RATE = 0.7
"""Rate of products that are scaled by row, over that of those scaled by tensor.

Fitted to two pairs of published steps on 8 H100 (torchao's training tables; torchtitan, pull requests 833 and
820): with the same casts, rows take 1.12 to 1.14 times as long as tensors.
"""


def float8_seconds(
    operation: Operation, gpu: Gpu, machine: Machine, scaling: Float8Scaling = "tensor"
) -> float:
    """Return the time of a compiled linear layer's product in float8, with the casts of its inputs.

    Each input is read for its largest magnitude, read again, and written in 8 bits (torchao,
    ``float8/float8_scaling_utils.py:hp_tensor_to_float8_dynamic``); the output stays in 16. Two of the three
    matrices of a product are inputs, which are taken to be of equal size. Without float8 units, nothing is
    gained. Blocks of 32 need no pass for the largest magnitude (torchao, ``prototype/mx_formats``).
    """
    if operation.kind != "product" or not gpu.native_fp8 or operation.dtype != "bfloat16":
        return operation_seconds(operation, gpu, machine)
    rate_of_kernel = machine.matmul_efficiency * (_ROWWISE_RATE if scaling == "row" else 1.0)
    arithmetic = operation.flops / (peak_flops(gpu, "float8") * rate_of_kernel)
    multiplied = operation.bytes_moved * 2 / 3
    rate = memory_rate(gpu, machine)
    cast = cast_traffic(operation.bytes_moved) * (0.6 if scaling == "block" else 1.0)  # one read, not two
    return max(arithmetic, multiplied / rate) + cast / rate


def cast_traffic(size: float) -> float:
    """Return the bytes that casts to float8 move in a product of matrices of ``size`` bytes in 16 bits.

    Of each matrix, two thirds are counted: the average over the three products of a layer, in two of which
    each of the three is an input.
    """
    return size * 2 / 3 * (1 + 1 + 1 / 2)


def memory_rate(gpu: Gpu, machine: Machine) -> float:
    """Return the bytes per second that elementwise operators reach."""
    return gpu.memory_bandwidth * machine.memory_efficiency


def segment_seconds(
    segment: Segment,
    operations: Sequence[Operation],
    seconds: Sequence[float],
    gpu: Gpu,
    machine: Machine,
    *,
    traffic: float = 1.0,
    launches: float = 1.0,
) -> tuple[float, float]:
    """Return the device's and the host's seconds for one segment.

    Args:
        segment: Between two module boundaries.
        operations: The trace's (:attr:`~fsdptool.records.trace.Trace.operations`).
        seconds: The time of each of them (:func:`operation_seconds`).
        gpu, machine: The hardware.
        traffic, launches: What fused kernels leave of the traffic and the launches of elementwise operators.
    """
    costly = segment.operations
    moved = max(segment.bytes_moved - sum(operations[number].bytes_moved for number in costly), 0)
    kernels = max(segment.kernels - len(costly), 0)
    launched = len(costly) + launches * kernels
    device = sum(seconds[number] for number in costly)
    each = measured_traffic("elementwise", moved / kernels, machine) if kernels else None
    if each is not None:
        device += traffic * kernels * each
    elif kernels:
        device += traffic * moved * _uncached(moved / kernels, machine) / memory_rate(gpu, machine)
    return device, launched * machine.kernel_latency


def _uncached(traffic: float, machine: Machine) -> float:
    """Return the part of its time that an operator of ``traffic`` bytes keeps for what the cache holds.

    All of its traffic gains while it fits into the cache, none from twice that size on.
    """
    if not machine.cache_bytes:
        return 1.0
    cached = min(max(2.0 - traffic / machine.cache_bytes, 0.0), 1.0)
    return 1.0 - cached + cached / machine.cached_speedup


def _attention_rate(operation: Operation, machine: Machine) -> float:
    rate = machine.matmul_efficiency
    backward = operation.kind == "attention_backward"
    if machine.attention:
        sizes = sorted(machine.attention, key=lambda item: item.head_size)
        row = next((item for item in sizes if item.head_size >= operation.head_size), sizes[-1])
        rate = row.backward if backward else row.forward
    if not operation.fused:
        rate *= machine.efficient_attention
    if operation.queries:
        rate *= operation.queries / (operation.queries + _HALF_SPEED[operation.kind, operation.causal])
    return rate
