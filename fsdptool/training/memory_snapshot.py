"""What was alive when a rank ran out of memory, and at which moment of the step it was.

The exception's traceback keeps the frames of the failed call alive, and with them what they held, so
the tensors can still be counted and named after the fact. What only autograd's nodes hold has no Python
object, so the garbage collector does not list it; on a GPU the allocator's own counter includes it.
"""

from __future__ import annotations

import gc
import re
from collections import defaultdict
from types import TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn

_REFUSALS = (
    "DefaultCPUAllocator: can't allocate memory",
    "CUDA error: out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
)
"""Messages of those that have no exception class of their own (torch 2.13): the CPU's allocator
(c10/core/impl/alloc_cpu.cpp), the CUDA runtime outside the caching allocator (c10/cuda/CUDAException.cpp),
cuBLAS and cuDNN (aten/src/ATen/cuda/CUDAContextLight.h, aten/src/ATen/cudnn/Exceptions.h)."""

_NCCL_REFUSAL = re.compile(r"NCCL.*(Cuda failure( \d+)? 'out of memory'|Failed to CUDA calloc)", re.DOTALL)
"""NCCL allocates its buffers itself and quotes the runtime (NCCL 2.28, src/include/alloc.h, checks.h)."""

_UNNAMED = "activations, gradients and temporaries"
_SHOWN = 16
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def is_out_of_memory(error: BaseException) -> bool:
    """Say whether an error is an allocator's refusal: torch's, the runtime's, a library's or the host's."""
    if type(error).__name__ == "OutOfMemoryError" or isinstance(error, MemoryError):
        return True
    text = str(error)
    return any(refusal in text for refusal in _REFUSALS) or _NCCL_REFUSAL.search(text) is not None


def describe_out_of_memory(error: BaseException) -> dict[str, Any]:
    """Return one rank's report as plain data.

    Keys: ``moment`` (in the plan's words: ``forward model.layers.3``, ``backward``, ``optimizer
    step``), ``requested_bytes`` (None if the message does not say), ``device``,
    ``allocated_bytes``, ``reserved_bytes``, ``device_bytes`` and ``live``: what held memory, by kind
    and by name, largest first.
    """
    import torch

    roots = _roots()
    kinds, names = _owners(roots)
    by_kind: dict[str, int] = defaultdict(int)
    by_name: dict[str, int] = defaultdict(int)
    storages = _storages()
    for key, size in storages.items():
        by_kind[kinds.get(key, _UNNAMED)] += size
        by_name[names.get(key, _UNNAMED)] += size
    on_cuda = _on_cuda()
    allocated = _allocated(storages)
    if (unseen := allocated - sum(storages.values())) > 0:
        by_kind[_UNNAMED] += unseen
        by_name[_UNNAMED] += unseen
    return {
        "moment": _moment(error.__traceback__, roots),
        "requested_bytes": _requested(str(error)),
        "device": "cuda" if on_cuda else "cpu",
        "allocated_bytes": allocated,
        "reserved_bytes": torch.cuda.memory_reserved() if on_cuda else None,
        "device_bytes": torch.cuda.mem_get_info()[1] if on_cuda else None,
        "live": _largest(by_kind),
        "largest": _largest(by_name),
    }


def _largest(held: dict[str, int]) -> list[dict[str, Any]]:
    ranked = sorted(held.items(), key=lambda item: (-item[1], item[0]))[:_SHOWN]
    return [{"name": name, "bytes": size} for name, size in ranked if size]


def _roots() -> list[nn.Module]:
    """Return the live modules that no other module holds."""
    from torch import nn

    every = [item for item in gc.get_objects() if issubclass(type(item), nn.Module)]
    children = {id(child) for module in every for child in module.children()}
    return [module for module in every if id(module) not in children]


def _owners(roots: list[nn.Module]) -> tuple[dict[int, str], dict[int, str]]:
    """Map storages to what they are for, and to a name."""
    import torch

    kinds: dict[int, str] = {}
    names: dict[int, str] = {}

    def claim(tensor: Any, kind: str, name: str) -> None:
        if isinstance(tensor, torch.Tensor):
            key = _key(tensor)
            kinds.setdefault(key, kind)
            names.setdefault(key, name)

    known: dict[int, str] = {}
    for root in roots:
        for name, parameter in root.named_parameters():
            known[id(parameter)] = name
            claim(parameter, "parameters", name)
            claim(_gradient(parameter), "gradients", f"gradient of {name}")
        for name, buffer in root.named_buffers():
            claim(buffer, "buffers", name)
    for item in gc.get_objects():
        if issubclass(type(item), torch.optim.Optimizer):
            for parameter, states in item.state.items():
                for label, value in states.items():
                    claim(value, "optimizer", f"{label} of {known.get(id(parameter), 'a parameter')}")
    return kinds, names


def _gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    try:
        return parameter.grad
    except RuntimeError:
        return None


def _local(tensor: Any) -> torch.Tensor:
    from torch.distributed.tensor import DTensor

    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _key(tensor: torch.Tensor) -> int:
    return int(_local(tensor).untyped_storage()._cdata)


def _on_cuda() -> bool:
    import torch

    # is_initialized is not annotated in torch 2.13.
    initialised: Any = torch.cuda.is_initialized
    return torch.cuda.is_available() and bool(initialised())


def _allocated(storages: dict[int, int]) -> int:
    """Return the allocator's own count on a GPU; the CPU's allocator keeps none."""
    import torch

    return torch.cuda.memory_allocated() if _on_cuda() else sum(storages.values())


def _storages() -> dict[int, int]:
    """Return the bytes of every storage that a live tensor of this rank's device holds."""
    import torch

    device_type = "cuda" if _on_cuda() else "cpu"
    sizes: dict[int, int] = {}
    for item in gc.get_objects():
        if issubclass(type(item), torch.Tensor):
            tensor = _local(item)
            if tensor.device.type == device_type:
                storage = tensor.untyped_storage()
                sizes[storage._cdata] = storage.nbytes()
    return sizes


def _moment(trace: TracebackType | None, roots: list[nn.Module]) -> str:
    """Return the plan's word for where the failing frames were."""
    from torch import nn

    paths = {id(module): path for root in roots for path, module in root.named_modules()}
    phase, deepest = "", ""
    while trace is not None:
        frame = trace.tb_frame
        place = frame.f_code.co_filename
        owner = frame.f_locals.get("self")
        if "torch/optim/" in place or "training/optimizer" in place:
            phase = "optimizer step"
        elif place.endswith("torch/autograd/graph.py") or frame.f_code.co_name == "backward":
            phase = phase or "backward"
        elif isinstance(owner, nn.Module) and paths.get(id(owner)):
            phase, deepest = phase or "forward", paths[id(owner)]
        trace = trace.tb_next
    if not phase:
        return "outside the step"
    return f"{phase} {deepest}".strip() if phase != "optimizer step" else phase


def _requested(text: str) -> int | None:
    """Read the size out of CUDA's or the CPU allocator's message."""
    match = re.search(r"[Tt]ried to allocate ([0-9.]+) (bytes|[KMG]iB)", text)
    return int(float(match[1]) * _UNITS[match[2]]) if match else None
