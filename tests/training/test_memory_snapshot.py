"""Recognising that memory ran out, whoever says so, and what a report says."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import nn

from fsdptool.training import memory_snapshot
from fsdptool.training.memory_snapshot import describe_out_of_memory, is_out_of_memory

REFUSALS = [
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported at some other API call",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to"
    " allocate 8 bytes. Error code 12 (Cannot allocate memory)",
    "NCCL error in: ProcessGroupNCCL.cpp:94, unhandled cuda error, NCCL version 2.28.9\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'",
    "NCCL error: unhandled cuda error\nLast error:\nFailed to CUDA calloc async 4194304 bytes",
]
OTHERS = [
    "CUDA error: an illegal memory access was encountered",
    "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`",
    "NCCL error: remote process exited or there was a network error",
    "mat1 and mat2 shapes cannot be multiplied",
]


@pytest.mark.parametrize("text", REFUSALS)
def test_every_allocators_refusal_is_recognised(text: str) -> None:
    assert is_out_of_memory(RuntimeError(text))


@pytest.mark.parametrize("text", OTHERS)
def test_other_errors_are_not(text: str) -> None:
    assert not is_out_of_memory(RuntimeError(text))


def test_torchs_own_errors_are_recognised_by_class() -> None:
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory."))
    assert is_out_of_memory(MemoryError())


@pytest.mark.slow
def test_what_only_autograd_holds_is_part_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector lists no tensor that only a node of the graph holds: the allocator counts it."""
    model = nn.Linear(64, 64)
    gc.collect()
    before = sum(memory_snapshot._storages().values())
    loss = (model(torch.randn(256, 64)).exp().exp() * 2).sum()  # each keeps its result for backward
    hidden = 2 * 256 * 64 * 4
    assert sum(memory_snapshot._storages().values()) < before + hidden
    seen = sum(memory_snapshot._storages().values())
    monkeypatch.setattr(memory_snapshot, "_allocated", lambda _: seen + hidden)
    report = describe_out_of_memory(RuntimeError("CUDA out of memory. Tried to allocate 2.00 MiB."))
    assert sum(line["bytes"] for line in report["live"]) == report["allocated_bytes"] == seen + hidden
    unnamed = next(line for line in report["live"] if line["name"] == memory_snapshot._UNNAMED)
    assert unnamed["bytes"] >= hidden and report["requested_bytes"] == 2 << 20
    loss.backward()
