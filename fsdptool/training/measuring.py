"""Measures devices: products, copies, attention kernels with their workspaces, the launch of an operator; as
one of several ranks also the memory of contexts and communicators, rates, and attempts.

``fsdptool doctor --gpu`` starts this module through torchrun, and ``benchmarks/gpu`` calls it. It runs on
GPUs and, smaller, on CPUs. Rank 0 writes ``measured.json`` into the folder, again after each part, so that
what was measured survives whatever comes after it.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from fsdptool.distributed.devices import used_by_driver
from fsdptool.distributed.session import Session, close_session, open_session
from fsdptool.distributed.shard import local
from fsdptool.errors import FsdptoolError, WorkerError
from fsdptool.garbage import skip_last_collection
from fsdptool.inspection import inspect
from fsdptool.modeling.resolve import resolve_run
from fsdptool.modeling.units import plan_units
from fsdptool.records.codec import to_json
from fsdptool.records.measurements import (
    MEASURED,
    Attempt,
    AttemptKind,
    CollectiveRate,
    CopyKind,
    CopyRate,
    Masking,
    MeasuredAttention,
    ProductRate,
    RankMeasurements,
)
from fsdptool.records.recipe import Batch, Checkpoints, Data, ModelChoice, Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.runs.events import EventLog
from fsdptool.runs.folder import CHECKPOINTS, EVENTS, RunInputs
from fsdptool.runs.manifest import Kind
from fsdptool.source import resolve
from fsdptool.training.checkpoint.checkpointer import RunCheckpointer
from fsdptool.training.data.build import build_batches
from fsdptool.training.kernel_times import measure_kernels, wait
from fsdptool.training.state import RunState
from fsdptool.training.step import Stepper
from fsdptool.training.trainer import assemble

_BUDGET_SECONDS = {"cuda": 0.2, "cpu": 0.02}
"""Seconds for which each figure is measured, by kind of device. The largest products run for longer, so that
clocks settle. On CPUs that is a rehearsal, whose figures calibrate nothing."""

_KERNELS = {
    "cuda": ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"),
    "cpu": ("FLASH_ATTENTION", "MATH"),
}
_MATH_BYTES = 8 << 30
"""Plain products keep every score: they are left out where that would take more."""


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call: an average over as many as the device's budget holds, two at least."""
    call()
    wait(device)
    began = time.perf_counter()
    call()
    wait(device)
    budget = _BUDGET_SECONDS["cuda" if device.type == "cuda" else "cpu"]
    repeats = max(2, min(1000, int(budget / max(time.perf_counter() - began, 1e-6))))
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    wait(device)
    return (time.perf_counter() - began) / repeats


def measure_products(device: torch.device, *, small: bool = False) -> Iterator[ProductRate]:
    """Yield rates of products: squares, and the shapes of an 8 B decoder over 2,048 tokens.

    Operands are random: a GPU computes faster on zeros, because its clock follows its power.
    """
    squares = (64, 128) if small else (1024, 2048, 4096, 8192, 16384)
    shapes = [("bfloat16", size, size, size) for size in squares]
    shapes += [("float32", size, size, size) for size in squares[:3]]
    if not small:
        sides = ((4096, 4096), (4096, 14336), (14336, 4096), (4096, 128256))
        shapes += [("bfloat16", 2048, k, n) for k, n in sides]
    for dtype, m, k, n in shapes:
        a = torch.randn(m, k, device=device).to(getattr(torch, dtype))
        b = torch.randn(k, n, device=device).to(getattr(torch, dtype))
        took = seconds(lambda a=a, b=b: a @ b, device)  # type: ignore[misc]
        yield ProductRate(dtype, m, k, n, took)


def measure_copies(device: torch.device, *, small: bool = False) -> Iterator[CopyRate]:
    """Yield rates of copies within the device, and on GPUs to and from page-locked memory."""
    for size in (1 << 20,) if small else (1 << 24, 1 << 28, 1 << 30):
        a = torch.zeros(size, dtype=torch.uint8, device=device)
        b = torch.empty_like(a)
        yield CopyRate("device", size, seconds(lambda a=a, b=b: b.copy_(a), device))  # type: ignore[misc]
    if device.type == "cuda":
        size = 1 << 28
        there = torch.empty(size, dtype=torch.uint8, device=device)
        here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        pairs: tuple[tuple[CopyKind, Any, Any], ...] = (
            ("host_to_device", there, here),
            ("device_to_host", here, there),
        )
        for kind, to, source in pairs:
            took = seconds(lambda to=to, source=source: to.copy_(source), device)  # type: ignore[misc]
            yield CopyRate(kind, size, took)


def kernel_latency(device: torch.device) -> float:
    """Return the seconds that the host needs to launch one operator."""
    tiny = torch.zeros(1, device=device)
    return seconds(lambda: tiny.add_(1), device)


@dataclass(frozen=True, slots=True)
class MeasuredShape:
    """Operands of attention, and how they are masked; fields as in :class:`MeasuredAttention`."""

    dtype: str
    sequences: int
    heads: int
    key_heads: int
    length: int
    head_size: int
    masking: Masking = "causal"
    repeated: bool = False

    def flops(self) -> float:
        """FLOPs of forward that a kernel does not skip; documents are four of equal length."""
        whole = 4.0 * self.sequences * self.heads * self.length**2 * self.head_size
        return whole / {"mask": 1, "causal": 2, "documents": 8}[self.masking]

    def operands(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return random queries, keys and values of ``[sequences, heads, length, head size]``."""
        sizes = (self.heads, *((self.heads if self.repeated else self.key_heads,) * 2))
        query, key, value = (
            torch.randn(
                *(self.sequences, heads, self.length, self.head_size),
                device=device,
                dtype=getattr(torch, self.dtype),
                requires_grad=True,
            )
            for heads in sizes
        )
        return query, key, value


def usual_shapes(*, small: bool = False) -> tuple[MeasuredShape, ...]:
    """Return the shapes that decide which kernel language models get: grouped queries, masks, fp32."""
    length, heads, grouped = (64, 4, 2) if small else (4096, 32, 8)
    half = MeasuredShape("bfloat16", 1, heads, grouped, length, 16 if small else 128)
    plain = replace(half, key_heads=heads)
    wide = replace(half, dtype="float32", length=length // 2)
    return (
        plain,
        half,
        replace(half, masking="documents"),
        replace(plain, masking="mask"),
        replace(half, masking="mask", repeated=True),
        replace(plain, head_size=8 if small else 64),
        wide,
        replace(wide, repeated=True),
        *(() if small else (replace(half, length=8192), replace(plain, head_size=256))),
    )


def measure_attention(device: torch.device, shapes: Sequence[MeasuredShape]) -> Iterator[MeasuredAttention]:
    """Yield every kernel that could run each shape, with its time and workspaces or why it refuses."""
    for shape in shapes:
        if shape.masking == "documents":
            yield _measured(shape, "VARLEN", True, device, _varlen(shape, device))
            continue
        operands = shape.operands(device)
        options: dict[str, Any] = {"is_causal": True} if shape.masking == "causal" else {}
        if shape.masking == "mask":
            mask = torch.ones(shape.length, shape.length, device=device, dtype=torch.bool).tril_()
            options["attn_mask"] = mask.expand(shape.sequences, 1, -1, -1)
        options["enable_gqa"] = operands[1].shape[1] != shape.heads
        chosen = SDPBackend(torch._fused_sdp_choice(*operands, **options)).name
        for kernel in _KERNELS[device.type]:
            scores = shape.sequences * shape.heads * shape.length**2 * operands[0].element_size()
            if kernel == "MATH" and 4 * scores > _MATH_BYTES and kernel != chosen:
                continue

            def attend(
                kernel: str = kernel, operands: Any = operands, options: dict[str, Any] = options
            ) -> Any:
                with sdpa_kernel([getattr(SDPBackend, kernel)]):
                    return scaled_dot_product_attention(*operands, **options)

            yield _measured(shape, kernel, kernel == chosen, device, attend)


def _varlen(shape: MeasuredShape, device: torch.device) -> Callable[[], torch.Tensor]:
    """Return attention over four packed documents by torch's variable-length kernel (2.13)."""
    quarter = shape.length // 4
    ends = torch.arange(0, shape.length + 1, quarter, dtype=torch.int32, device=device)
    query, key, value = (
        part.detach().transpose(1, 2).flatten(0, 1).requires_grad_() for part in shape.operands(device)
    )

    def attend() -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        grouped: dict[str, Any] = {"enable_gqa": True} if shape.key_heads != shape.heads else {}
        out: Any = varlen_attn(
            query, key, value, ends, ends, quarter, quarter, window_size=(-1, 0), **grouped
        )
        attended: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return attended

    return attend


def _measured(
    shape: MeasuredShape, kernel: str, chosen: bool, device: torch.device, attend: Callable[[], torch.Tensor]
) -> MeasuredAttention:
    """Return the time and the workspaces of a kernel at a shape."""
    row = MeasuredAttention(
        *(shape.dtype, shape.sequences, shape.heads, shape.key_heads, shape.length, shape.head_size),
        masking=shape.masking,
        repeated=shape.repeated,
        kernel=kernel,
        chosen=chosen,
        flops=shape.flops(),
    )
    differentiate: Any = torch.autograd.backward
    try:
        with _Workspace(device) as forward:
            out = attend()
        gradient = torch.randn_like(out)
        with _Workspace(device) as backward:
            differentiate(out, gradient)
        del out
        took = seconds(attend, device)
        both = seconds(lambda: differentiate(attend(), gradient), device)
    except (RuntimeError, NotImplementedError, TypeError, ImportError) as error:
        return replace(row, refused=str(error).strip().splitlines()[0][:160])
    return replace(
        row,
        forward_seconds=took,
        backward_seconds=max(both - took, 0.0),
        forward_workspace_bytes=forward.bytes,
        backward_workspace_bytes=backward.bytes,
    )


class _Workspace:
    """Counts what a call takes from the device beyond what it leaves or found: its temporary memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self.bytes: int | None = None

    def __enter__(self) -> _Workspace:
        if self._device is not None:
            torch.cuda.reset_peak_memory_stats(self._device)
            self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *error: object) -> None:
        if self._device is not None:
            kept = max(self._before, torch.cuda.memory_allocated(self._device))
            self.bytes = torch.cuda.max_memory_allocated(self._device) - kept


_MODEL = "qwen3:tiny"
_LENGTH = 128


def measure(folder: Path, *, cpu: bool, kernels: bool = False) -> None:
    """Measure this machine; every rank calls it.

    Args:
        folder: Where results and checkpoints go.
        cpu: Rehearse with small sizes, over gloo.
        kernels: Time operators by size, and try nothing.
    """
    found, session = _open(cpu=cpu)
    device = session.device
    if cpu and kernels:
        torch.set_num_threads(1)

    def keep(**parts: object) -> None:
        nonlocal found
        found = replace(found, **parts)  # type: ignore[arg-type]
        if session.is_main:
            temporary = folder / f"{MEASURED}.part"
            temporary.write_text(json.dumps(to_json(found)), encoding="utf-8")
            temporary.replace(folder / MEASURED)

    keep(collectives=tuple(_collectives(session, small=cpu)))
    attempts: list[Attempt] = []
    for attempt in () if kernels else _attempts(session, folder, cpu=cpu):
        attempts.append(attempt)
        keep(attempts=tuple(attempts))
    close_session()
    # The other GPUs are idle from here on, as the figures of one assume.
    if not session.is_main:
        return
    keep(kernel_latency=kernel_latency(device))
    keep(copies=tuple(measure_copies(device, small=cpu)))
    if kernels:
        times = []
        for item in measure_kernels(device):
            times.append(item)
            keep(kernels=tuple(times))
        return
    keep(attention=tuple(measure_attention(device, usual_shapes(small=cpu))))
    # Last: the longest of them, and they heat the GPU.
    keep(products=tuple(measure_products(device, small=cpu)))


def _open(*, cpu: bool) -> tuple[RankMeasurements, Session]:
    """Join the others; return what that took of the device, as its driver counts it."""
    before = {} if cpu else used_by_driver()
    settings = _settings(cpu=cpu)
    if cpu:
        session = open_session(settings)
        processes, backend = session.world_size, str(dist.get_backend())
        return RankMeasurements(
            platform.processor() or platform.machine(), None, None, processes, backend
        ), session
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.zeros(1, device=device)
    gpu = torch.cuda.get_device_properties(device)
    alone = _used(device)
    session = open_session(settings)
    session.sum(torch.ones(1, device=device))
    first = _used(device)
    dist.all_reduce(torch.ones(1, device=device), group=dist.new_group())
    second = _used(device)
    held = before.get(f"GPU-{gpu.uuid}")
    several = session.world_size > 1
    found = RankMeasurements(
        gpu.name,
        f"{gpu.major}.{gpu.minor}",
        gpu.total_memory,
        session.world_size,
        str(dist.get_backend()),
        context_bytes=max(alone - held, 0) if held is not None else None,
        communicator_bytes=max(first - alone, 0) if several else None,
        further_communicator_bytes=max(second - first, 0) if several else None,
    )
    return found, session


def _used(device: torch.device) -> int:
    """Return the bytes in use on a GPU besides what torch's allocator holds."""
    wait(device)
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _collectives(session: Session, *, small: bool) -> Iterator[CollectiveRate]:
    ranks, device = session.world_size, session.device
    if ranks == 1:
        return
    for size in (1 << 12, 1 << 20) if small else (1 << 16, 1 << 24, 1 << 28, 1 << 30):
        part = torch.randn(size // 2 // ranks, device=device).to(torch.bfloat16)
        whole = part.repeat(ranks)
        calls: dict[str, Callable[[], object]] = {
            "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),  # type: ignore[misc]
            "reduce_scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),  # type: ignore[misc]
        }
        for kind, call in calls.items():
            # Equally many on every rank, whatever its clock says.
            for _ in range(3):
                call()
            wait(device)
            dist.barrier()
            repeats = 3 if small else 10
            began = time.perf_counter()
            for _ in range(repeats):
                call()
            wait(device)
            took = (time.perf_counter() - began) / repeats
            yield CollectiveRate(kind, ranks, whole.numel() * whole.element_size(), took)  # type: ignore[arg-type]


def _settings(*, cpu: bool, offload: bool = False) -> FsdpSettings:
    return FsdpSettings(use_cpu=cpu, mixed_precision="no" if cpu else "bf16", cpu_offload=offload)


def _attempts(session: Session, folder: Path, *, cpu: bool) -> Iterator[Attempt]:
    """Train, save and load in the ways that differ on GPUs, once each, by the trainer's own functions."""
    recipe = Recipe(
        model=ModelChoice(_MODEL, weights="random"),
        data=Data(source="synthetic"),
        batch=Batch(micro_batch=1, sequence_length=_LENGTH),
        steps=4,
    )
    spec = resolve(_MODEL)
    anatomy = inspect(spec)
    for offload in (True, False):
        settings = _settings(cpu=cpu, offload=offload)
        run = resolve_run(recipe, settings, ranks=session.world_size)
        run = resolve_run(recipe, settings, ranks=session.world_size)
        inputs = RunInputs(folder, recipe, settings, spec, plan_units(anatomy, run))
        name: AttemptKind = "offload" if offload else "asynchronous_save"
        began = time.perf_counter()
        try:
            result = assemble(inputs, session)
            batches = build_batches(recipe, spec, rank=session.data_rank, world=session.data_ranks)
            state = RunState(result.model, result.optimizer, batches, 0, session.rank)

            for _ in range(2):
                _step(result.stepper, state)
            if offload:
                yield Attempt(name, True, time.perf_counter() - began)
                continue
            for name in ("asynchronous_save", "full_save"):
                began = time.perf_counter()
                _save(name, result.stepper, state, folder / name)
                yield Attempt(name, True, time.perf_counter() - began)
        except (FsdptoolError, RuntimeError) as error:
            lines = str(error).strip().splitlines()
            yield Attempt(name, False, time.perf_counter() - began, lines[0][:300] if lines else repr(error))
            return


def _step(stepper: Stepper, state: RunState) -> None:
    """Take a step.

    Raises:
        WorkerError: Its loss is not finite.
    """
    outcome = stepper.run(next(state.batches), rate=1e-4)
    if not outcome.finite:
        raise WorkerError(f"the loss after {state.step} steps is {outcome.loss}")
    state.step += 1


def _save(name: AttemptKind, stepper: Stepper, state: RunState, folder: Path) -> None:
    """Save, train on beside it, and load what was saved.

    Raises:
        WorkerError: What was loaded is not what was saved.
    """
    kind: Kind = "full" if name == "full_save" else "sharded"
    policy = Checkpoints(every_steps=1, mode="async" if kind == "sharded" else "sync")
    (folder / EVENTS).mkdir(parents=True, exist_ok=True)
    checkpointer = RunCheckpointer(
        folder / CHECKPOINTS, policy, kind=kind, events=EventLog(folder, state.rank, 0)
    )
    saved = state.step
    before = {name: local(tensor).clone() for name, tensor in state.tensors().items()}
    checkpointer.save(state)
    _step(stepper, state)
    checkpointer.close()
    checkpointer.rollback(state)
    same = all(torch.equal(local(tensor), before[name]) for name, tensor in state.tensors().items())
    if state.step != saved or not same:
        raise WorkerError(f"step {saved} was saved, and what was loaded differs from it (step {state.step})")


def main(arguments: list[str]) -> int:
    """Measure in the folder ``arguments[0]`` on ``arguments[1]``, ``cpu`` or ``cuda``; with ``kernels`` after
    them, time operators by size."""
    skip_last_collection()
    measure(Path(arguments[0]), cpu=arguments[1] == "cpu", kernels="kernels" in arguments[2:])
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: what was found is written, and torch's threads can abort while the interpreter ends.
    os._exit(status)
