"""Times operators of a device by size: products, attention, elementwise operators, optimizer updates.

``fsdptool calibrate --probe`` writes them to a machine table. On a CPU, the time of a call is the processor
time of this process, on one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention, silu
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fsdptool.memory.tracing.operators import launches, traffic
from fsdptool.records.cluster import KernelTime

_ROUNDS = 5
"""Averages of which the median counts."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is timed on a device.

    Attributes:
        tokens: Rows of products and of elementwise operators.
        layers: ``(inputs, outputs)`` of linear layers.
        lengths, heads: Positions and head sizes of attention.
        widths: Columns of elementwise operators.
        updates: Elements of an optimizer's update.
        budget: Seconds of one figure.
    """

    tokens: tuple[int, ...]
    layers: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]
    heads: tuple[int, ...]
    widths: tuple[int, ...]
    updates: tuple[int, ...]
    budget: float


_CUDA = Sizes(
    tokens=(512, 2048, 8192, 32768),
    layers=(
        *((1024, 1024), (2048, 2048), (4096, 1024), (4096, 4096), (4096, 14336), (8192, 8192)),
        *((5120, 27648), (2048, 152064), (4096, 128256), (100, 1000)),
    ),
    lengths=(512, 2048, 8192),
    heads=(64, 128, 256),
    widths=(1024, 4096, 16384),
    updates=(1 << 20, 1 << 26, 1 << 29),
    budget=0.2,
)
_CPU = Sizes(
    tokens=(32, 128, 512, 1024),
    layers=((64, 64), (64, 256), (200, 600), (256, 256), (256, 1024), (512, 512), (512, 2048), (1024, 1024)),
    lengths=(32, 128, 512),
    heads=(16, 32, 64, 128),
    widths=(64, 256, 1024, 4096),
    updates=(1 << 14, 1 << 18, 1 << 22, 1 << 24),
    budget=0.03,
)


def measure_kernels(device: torch.device, *, sizes: Sizes | None = None) -> Iterator[KernelTime]:
    """Yield the times of operators by size, in the dtypes that models compute in on the device.

    Args:
        device: What to measure.
        sizes: What to time; None: what suits the device.
    """
    cpu = device.type == "cpu"
    chosen = sizes or (_CPU if cpu else _CUDA)
    dtypes = (torch.float32, torch.bfloat16) if not cpu else (torch.float32,)
    for dtype in dtypes:
        yield from _products(device, dtype, chosen)
        yield from _attention(device, dtype, chosen)
        yield from _elementwise(device, dtype, chosen)
    yield from _updates(device, chosen)


def wait(device: torch.device) -> None:
    """Wait until a device has done everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def call_seconds(call: Callable[[], Any], device: torch.device, budget: float) -> float:
    """Return the seconds of one call: the median of averages, each over a part of ``budget`` seconds."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    call()
    wait(device)
    began = clock()
    call()
    wait(device)
    repeats = max(1, min(2000, int(budget / _ROUNDS / max(clock() - began, 1e-6))))
    averages = []
    for _ in range(_ROUNDS):
        began = clock()
        for _ in range(repeats):
            call()
        wait(device)
        averages.append((clock() - began) / repeats)
    return statistics.median(averages)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _products(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Iterator[KernelTime]:
    """Time linear layers: the average over forward's product and backward's two, which have one size."""
    for inputs, outputs in sizes.layers:
        weight = torch.randn(outputs, inputs, device=device, dtype=dtype)
        for tokens in sizes.tokens:
            x = torch.randn(tokens, inputs, device=device, dtype=dtype)
            y = torch.randn(tokens, outputs, device=device, dtype=dtype)

            def three(x: torch.Tensor = x, y: torch.Tensor = y, weight: torch.Tensor = weight) -> None:
                linear(x, weight)
                torch.mm(y, weight)
                torch.mm(y.t(), x)

            moved = (x.numel() + y.numel() + weight.numel()) * x.element_size()
            took = call_seconds(three, device, sizes.budget) / 3
            yield KernelTime("product", _name(dtype), took, moved, flops=2.0 * tokens * inputs * outputs)


def _attention(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Iterator[KernelTime]:
    differentiate: Any = torch.autograd.backward
    for head in sizes.heads:
        for length in sizes.lengths:
            heads = max(min(4096 // length, 32), 4)
            shape = (1, heads, length, head)
            parts = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
            gradient = torch.randn(shape, device=device, dtype=dtype)
            size = parts[0].numel() * parts[0].element_size()
            flops = 4.0 * heads * length**2 * head
            for causal in (True, False):

                def attend(parts: Any = parts, causal: bool = causal) -> torch.Tensor:
                    return scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=causal)

                def both(attend: Any = attend, gradient: torch.Tensor = gradient) -> None:
                    differentiate(attend(), gradient)

                forward = call_seconds(attend, device, sizes.budget)
                backward = max(call_seconds(both, device, sizes.budget) - forward, forward / 2)
                shared: dict[str, Any] = {"head_size": head, "queries": length, "causal": causal}
                yield KernelTime("attention", _name(dtype), forward, 4 * size, flops, **shared)
                yield KernelTime(
                    "attention_backward", _name(dtype), backward, 8 * size, 2.5 * flops, **shared
                )


class _Traffic(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operators and their traffic as traces do."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = self.kernels = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {id(leaf) for leaf in tree_iter((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        storages = {
            leaf.untyped_storage()._cdata
            for leaf in tree_iter((args, kwargs))
            if isinstance(leaf, torch.Tensor)
        }
        outputs = [leaf for leaf in tree_iter(out) if isinstance(leaf, torch.Tensor)]
        fresh = any(
            id(leaf) not in known and leaf.untyped_storage()._cdata not in storages for leaf in outputs
        )
        if (fresh or func._schema.is_mutable) and launches(func):
            self.bytes += traffic(func, args, kwargs, outputs)
            self.kernels += 1
        return out


def _elementwise(device: torch.device, dtype: torch.dtype, sizes: Sizes) -> Iterator[KernelTime]:
    """Time what lies between products of a block, forward and backward, per operator."""
    differentiate: Any = torch.autograd.backward
    for width in sizes.widths:
        for tokens in sizes.tokens:
            make: dict[str, Any] = {"device": device, "dtype": dtype, "requires_grad": True}
            x, gate, up, residual = (torch.randn(tokens, width, **make) for _ in range(4))
            weight, bias = torch.randn(width, **make), torch.randn(width, **make)
            angle = torch.randn(tokens, width, device=device, dtype=dtype)

            def block(
                x: Any = x,
                gate: Any = gate,
                up: Any = up,
                residual: Any = residual,
                weight: Any = weight,
                bias: Any = bias,
                angle: Any = angle,
            ) -> None:
                wide = x.float()
                normed = weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
                left, right = gate.chunk(2, -1)
                turned = gate * angle + torch.cat((-right, left), -1) * angle
                other = gelu(layer_norm(up, up.shape[-1:], weight, bias))
                out = residual + normed + silu(turned) * up + other
                differentiate(out, out.detach())
                for leaf in (x, gate, up, residual, weight, bias):
                    leaf.grad = None

            with _Traffic() as counted:
                block()
            took = call_seconds(block, device, sizes.budget) / counted.kernels
            yield KernelTime("elementwise", _name(dtype), took, max(counted.bytes // counted.kernels, 1))


def _updates(device: torch.device, sizes: Sizes) -> Iterator[KernelTime]:
    """Time AdamW's fused kernel, in one tensor, per byte that it moves."""
    for elements in sizes.updates:
        weight = torch.nn.Parameter(torch.randn(elements, device=device))
        weight.grad = torch.randn(elements, device=device)
        optimizer = torch.optim.AdamW([weight], fused=True)
        took = call_seconds(optimizer.step, device, sizes.budget)
        yield KernelTime("update", "float32", took, 28 * elements)
