"""What each process of ``fsdptool doctor --gpu`` does: memory of contexts and communicators, rates, attempts.

Started by torchrun; rank 0 writes ``measured.json`` into the folder, again after each part, so that what was
measured survives whatever comes after it.
"""

from __future__ import annotations

import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from fsdptool.distributed.devices import used_by_driver
from fsdptool.distributed.session import Session, close_session, open_session
from fsdptool.distributed.shard import local
from fsdptool.errors import FsdptoolError, WorkerError
from fsdptool.garbage import skip_last_collection
from fsdptool.inspection import inspect
from fsdptool.modeling.units import plan_units
from fsdptool.records.codec import to_json
from fsdptool.records.measurements import MEASURED, Attempt, AttemptKind, CollectiveRate, RankMeasurements
from fsdptool.records.recipe import Batch, Checkpoints, Data, ModelChoice, Recipe
from fsdptool.records.sharding import FsdpSettings
from fsdptool.runs.events import EventLog
from fsdptool.runs.folder import CHECKPOINTS, EVENTS, RunInputs
from fsdptool.runs.manifest import Kind
from fsdptool.source import resolve
from fsdptool.training.checkpoint.checkpointer import RunCheckpointer
from fsdptool.training.data.build import build_batches
from fsdptool.training.measuring import (
    kernel_latency,
    measure_attention,
    measure_copies,
    measure_products,
    usual_shapes,
    wait,
)
from fsdptool.training.state import RunState
from fsdptool.training.step import Stepper
from fsdptool.training.trainer import assemble

_MODEL = "qwen3:tiny"
_LENGTH = 128


def measure(folder: Path, *, cpu: bool) -> None:
    """Measure this machine; every rank calls it.

    Args:
        folder: Where results and checkpoints go.
        cpu: Rehearse with small sizes, over gloo.
    """
    found, session = _open(cpu=cpu)
    device = session.device

    def keep(**parts: object) -> None:
        nonlocal found
        found = replace(found, **parts)  # type: ignore[arg-type]
        if session.is_main:
            temporary = folder / f"{MEASURED}.part"
            temporary.write_text(json.dumps(to_json(found)), encoding="utf-8")
            temporary.replace(folder / MEASURED)

    keep(collectives=tuple(_collectives(session, small=cpu)))
    attempts: list[Attempt] = []
    for attempt in _attempts(session, folder, cpu=cpu):
        attempts.append(attempt)
        keep(attempts=tuple(attempts))
    close_session()
    # The other GPUs are idle from here on, as the figures of one assume.
    if not session.is_main:
        return
    keep(kernel_latency=kernel_latency(device))
    keep(copies=tuple(measure_copies(device, small=cpu)))
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
        inputs = RunInputs(folder, recipe, settings, spec, plan_units(anatomy, recipe, settings))
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
    """Measure in the folder ``arguments[0]`` on ``arguments[1]``: ``cpu`` or ``cuda``."""
    skip_last_collection()
    measure(Path(arguments[0]), cpu=arguments[1] == "cpu")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
