"""Rows of the stage ``smoke``: whether things work at all, and what the machine's ceilings are."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from fsdptool.distributed.devices import gpu_name, used_by_driver
from fsdptool.records.codec import to_json
from fsdptool.training.measuring import (
    kernel_latency,
    measure_attention,
    measure_copies,
    measure_products,
    usual_shapes,
)

Write = Callable[[Mapping[str, Any]], None]


def device(small: bool) -> torch.device:
    """Return the device to measure."""
    return torch.device("cpu" if small or not torch.cuda.is_available() else "cuda")


def machine(write: Write, folder: Path, small: bool) -> None:
    """Versions, the device, the context's bytes, and ``doctor`` with its probe of FSDP2 over NCCL."""
    from fsdptool.records.diagnostic import library_versions

    write({"versions": library_versions(), "cuda": str(torch.version.cuda)})
    if device(small).type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        before = used_by_driver()
        torch.zeros(1, device="cuda")
        free, total = torch.cuda.mem_get_info()
        write(
            {
                "gpu": {
                    "name": properties.name,
                    "total_memory": properties.total_memory,
                    "name_by_driver": gpu_name(),
                },
                "context": {
                    "before_bytes": before.get(f"GPU-{properties.uuid}"),
                    "after_bytes": total - free,
                    "torch_reserved_bytes": torch.cuda.memory_reserved(),
                },
                "cudnn": _cudnn_version(),
                "nccl": ".".join(map(str, _nccl_version())),
            }
        )
    done = subprocess.run(
        [sys.executable, "-m", "fsdptool", "doctor", "--format", "json"],
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    document = json.loads(done.stdout)
    write({"probes": document["probes"], "findings": [item["message"] for item in document["diagnostics"]]})
    write({"summary": ", ".join(f"{item['device']} {item['ok']}" for item in document["probes"])})


_cudnn_version: Any = torch.backends.cudnn.version
_nccl_version: Any = torch.cuda.nccl.version
_backward: Any = torch.Tensor.backward
"""Not annotated in torch 2.13."""


def workspaces(write: Write, folder: Path, small: bool) -> None:
    """What cuBLAS takes from torch's allocator for the thread of forward and for autograd's own."""
    where = device(small)
    if where.type != "cuda":
        write({"summary": "no allocator counter on the CPU"})
        return
    a, b = (torch.randn(1024, 1024, device=where, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    base = torch.cuda.memory_allocated()
    out = a @ b
    forward = torch.cuda.memory_allocated() - base - out.untyped_storage().nbytes()
    _backward(out.sum())
    gradients = sum(t.grad.untyped_storage().nbytes() for t in (a, b) if t.grad is not None)
    both = torch.cuda.memory_allocated() - base - out.untyped_storage().nbytes() - gradients
    size = getattr(torch.backends.cuda, "cublas_workspace_size", None)  # torch 2.13 has it, 2.11 has not
    write({"forward_bytes": forward, "both_threads_bytes": both, "torch_says": size() if size else None})
    write({"summary": f"{forward} B, {both} B"})


def ceilings(write: Write, folder: Path, small: bool) -> None:
    """Rates of matrix products by dtype and size, of copies by size, and the launch of an operator."""
    where = device(small)
    products = tuple(measure_products(where, small=small))
    write({"products": to_json(products), "launch_seconds": kernel_latency(where)})
    copies = tuple(measure_copies(where, small=small))
    write({"copies": to_json(copies)})
    best = max(item.flops_per_second for item in products)
    streamed = max(item.traffic_per_second for item in copies)
    write({"summary": f"{best / 1e12:.1f} TFLOP/s, {streamed / 1e9:.0f} GB/s"})


def attention(write: Write, folder: Path, small: bool) -> None:
    """Which kernel torch takes at the usual shapes, and each kernel's rate and workspaces."""
    rows = []
    for row in measure_attention(device(small), usual_shapes(small=small)):
        rows.append(row)
        write({"rates": to_json(tuple(rows))})
    chosen = (
        f"{row.masking} {row.dtype} {row.heads}/{row.key_heads}: {row.kernel}" for row in rows if row.chosen
    )
    write({"summary": ", ".join(chosen)})


def ring(write: Write, folder: Path, small: bool) -> None:
    """The kernels behind context parallelism against fp32 mathematics, forward and backward."""
    from fsdptool.families.objectives import context_attention

    where = device(small)
    rows: list[dict[str, Any]] = []
    for dtype, size in ((torch.float32, 64), (torch.bfloat16, 128), (torch.bfloat16, 80)):
        for causal in (False, True):
            sample = torch.empty(1, 1, 1, size, dtype=dtype, device=where)
            kernel = context_attention.kernel_for(sample, sample)
            torch.manual_seed(0)
            length = 64 if small else 512
            operands: Any = [torch.randn(1, 4, length, size, device=where, dtype=dtype) for _ in range(3)]
            gradient = torch.randn(1, 4, length, size, device=where, dtype=dtype)
            out, lse = kernel.forward(operands[0], operands[1], operands[2], causal, None)
            grads = kernel.backward(gradient, (*operands, out, lse), causal, None)
            wide = [item.double().requires_grad_() for item in operands]
            scores = wide[0] @ wide[1].transpose(-1, -2) * size**-0.5
            if causal:
                scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
            expected = scores.softmax(-1) @ wide[2]
            exact = torch.autograd.grad(expected, wide, gradient.double())
            rows.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "head_size": size,
                    "causal": causal,
                    "kernel": type(kernel).__name__,
                    "output_error": float((out.double() - expected).abs().max()),
                    "gradient_error": max(
                        float((a.double() - b).abs().max()) for a, b in zip(grads, exact, strict=True)
                    ),
                    "log_sum_exp_error": float(
                        (lse.double()[..., :length] - scores.logsumexp(-1)).abs().max()
                    ),
                }
            )
    write({"rows": rows, "summary": f"worst gradient error {max(r['gradient_error'] for r in rows):.3g}"})


def lower_right(write: Write, folder: Path, small: bool) -> None:
    """Masks aligned to the lower right, which gathered keys and values need: error, memory, kernel."""
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    where = device(small)
    queries, keys = (32, 64) if small else (2048, 8192)
    rows: list[dict[str, Any]] = []
    for dtype in (torch.bfloat16, torch.float32):
        torch.manual_seed(0)
        lengths = (queries, keys, keys)
        operands: Any = [
            torch.randn(1, 4, n, 64, device=where, dtype=dtype, requires_grad=True) for n in lengths
        ]
        if where.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
        out = sdpa(operands[0], operands[1], operands[2], causal_lower_right(queries, keys))
        _backward(out.sum())
        row: dict[str, Any] = {"dtype": str(dtype).removeprefix("torch."), "queries": queries, "keys": keys}
        if where.type == "cuda":
            # A mask with values would show here: queries x keys elements per head.
            row["peak_bytes"] = torch.cuda.max_memory_allocated() - base
        wide = [item.detach().double() for item in operands]
        scores = wide[0] @ wide[1].transpose(-1, -2) * 64**-0.5
        seen = torch.ones(queries, keys, dtype=torch.bool, device=where).tril(keys - queries)
        expected = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ wide[2]
        rows.append(
            {
                **row,
                "output_error": float((out.detach().double() - expected).abs().max()),
                "node": str(out.grad_fn)[:80],
            }
        )
    write({"rows": rows, "summary": f"worst error {max(r['output_error'] for r in rows):.3g}"})


ROWS: dict[str, tuple[float, Callable[[Write, Path, bool], None]]] = {
    "machine and doctor": (170.0, machine),
    "cublas workspaces": (40.0, workspaces),
    "attention kernels": (60.0, attention),
    "ceilings": (60.0, ceilings),
    "ring kernels": (40.0, ring),
    "lower-right masks": (40.0, lower_right),
}
"""Time limit and function by name."""
