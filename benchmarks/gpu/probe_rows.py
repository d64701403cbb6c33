"""Rows of the stage ``smoke``: whether things work at all, and what the machine's ceilings are."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

Write = Callable[[Mapping[str, Any]], None]


def device(small: bool) -> torch.device:
    """Return the device to measure."""
    return torch.device("cpu" if small or not torch.cuda.is_available() else "cuda")


def seconds(call: Callable[[], Any], where: torch.device, *, repeats: int) -> float:
    """Return the seconds of one call, averaged over ``repeats`` after two that warm up."""
    for _ in range(2):
        call()
    if where.type == "cuda":
        torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    if where.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / repeats


def machine(write: Write, folder: Path, small: bool) -> None:
    """Versions, the device, the context's bytes, and ``doctor`` with its probe of FSDP2 over NCCL."""
    from fsdptool.distributed.devices import gpu_name
    from fsdptool.records.diagnostic import library_versions

    write({"versions": library_versions(), "cuda": str(torch.version.cuda)})
    if device(small).type == "cuda":
        properties = torch.cuda.get_device_properties(0)
        before = _driver_used()
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
                    "before_bytes": before,
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


def _driver_used() -> int | None:
    """Return what the driver says is used before this process has a context, in bytes."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    try:
        text = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
        return int(text.split()[0]) << 20
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


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
    """Rates of matrix products by dtype and size, and of copies by size."""
    where = device(small)
    repeats = 2 if small else 20
    sizes = [64, 128] if small else [512, 1024, 2048, 4096, 8192, 16384]
    products: list[dict[str, Any]] = []
    copies: list[dict[str, Any]] = []
    for name in ("bfloat16", "float32"):
        dtype = getattr(torch, name)
        for size in sizes if name == "bfloat16" else sizes[:4]:
            a, b = (torch.randn(size, size, device=where).to(dtype) for _ in range(2))
            took = seconds(lambda a=a, b=b: a @ b, where, repeats=repeats)  # type: ignore[misc]
            products.append(
                {"dtype": name, "m": size, "n": size, "k": size, "flops_per_second": 2 * size**3 / took}
            )
    if not small:
        # Shapes of an 8 B decoder over 2,048 tokens: projections, the MLP and the vocabulary.
        for m, k, n in ((2048, 4096, 4096), (2048, 4096, 14336), (2048, 14336, 4096), (2048, 4096, 128256)):
            a = torch.randn(m, k, device=where, dtype=torch.bfloat16)
            b = torch.randn(k, n, device=where, dtype=torch.bfloat16)
            took = seconds(lambda a=a, b=b: a @ b, where, repeats=repeats)  # type: ignore[misc]
            products.append(
                {"dtype": "bfloat16", "m": m, "n": n, "k": k, "flops_per_second": 2 * m * n * k / took}
            )
    write({"products": products})
    for size in (1 << 20,) if small else (1 << 20, 1 << 24, 1 << 28, 1 << 30):
        a, b = (torch.empty(size // 4, device=where) for _ in range(2))
        took = seconds(lambda a=a, b=b: b.copy_(a), where, repeats=repeats)  # type: ignore[misc]
        copies.append({"bytes": size, "moved_bytes_per_second": 2 * size / took})
    write({"copies": copies})
    if where.type == "cuda":
        tiny = torch.zeros(1, device=where)
        write({"launch_seconds": seconds(lambda: tiny.add_(1), where, repeats=2000)})
        host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
        there = torch.empty(1 << 28, dtype=torch.uint8, device=where)
        to = seconds(lambda: there.copy_(host), where, repeats=5)
        back = seconds(lambda: host.copy_(there), where, repeats=5)
        write({"host_to_device_per_second": (1 << 28) / to, "device_to_host_per_second": (1 << 28) / back})
    best = max(item["flops_per_second"] for item in products)
    write({"summary": f"{best / 1e12:.1f} TFLOP/s, {copies[-1]['moved_bytes_per_second'] / 1e9:.0f} GB/s"})


def attention(write: Write, folder: Path, small: bool) -> None:
    """Which kernel torch takes with and without a mask, and each kernel's rate and memory."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    where = device(small)
    shapes = [(1, 2, 64, 16)] if small else [(1, 32, 2048, 128), (1, 32, 8192, 128), (1, 16, 2048, 64)]
    backends = (
        ["MATH"] if where.type == "cpu" else ["CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"]
    )
    chosen, rates = [], []
    for shape in shapes:
        query, key, value = (
            torch.randn(shape, device=where, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        length = shape[2]
        allowed = torch.ones(length, length, device=where, dtype=torch.bool).tril_()
        mask = allowed.expand(shape[0], 1, length, length)
        for masked in (False, True):
            options: dict[str, Any] = {"attn_mask": mask} if masked else {"is_causal": True}
            choice = torch._fused_sdp_choice(query, key, value, **options)
            name = SDPBackend(choice).name
            chosen.append({"shape": shape, "masked": masked, "backend": name})
            for backend in backends:
                row: dict[str, Any] = {"shape": shape, "masked": masked, "backend": backend}

                def step(
                    backend: str = backend,
                    options: dict[str, Any] = options,
                    operands: Any = (query, key, value),
                ) -> None:
                    with sdpa_kernel([getattr(SDPBackend, backend)]):
                        _backward(sdpa(*operands, **options).sum())

                try:
                    if where.type == "cuda":
                        torch.cuda.reset_peak_memory_stats()
                        base = torch.cuda.memory_allocated()
                    took = seconds(step, where, repeats=2 if small else 10)
                except RuntimeError as error:
                    rates.append({**row, "refused": str(error).splitlines()[0][:120]})
                    continue
                if where.type == "cuda":
                    row["peak_bytes"] = torch.cuda.max_memory_allocated() - base
                flops = 14 * shape[0] * shape[1] * length * length * shape[3]
                rates.append({**row, "seconds": took, "flops_per_second_whole_square": flops / took})
        write({"chosen": chosen, "rates": rates})
    write(
        {
            "summary": ", ".join(
                f"{'masked' if c['masked'] else 'unmasked'}: {c['backend']}" for c in chosen[:2]
            )
        }
    )


def ring(write: Write, folder: Path, small: bool) -> None:
    """The kernels behind context parallelism against fp32 mathematics, forward and backward."""
    from fsdptool.families.objectives import context_ring

    where = device(small)
    rows: list[dict[str, Any]] = []
    for dtype, size in ((torch.float32, 64), (torch.bfloat16, 128), (torch.bfloat16, 80)):
        for causal in (False, True):
            sample = torch.empty(1, 1, 1, size, dtype=dtype, device=where)
            kernel = context_ring.kernel_for(sample, sample)
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
