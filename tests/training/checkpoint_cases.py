"""What the pool's ranks do with checkpoints: a small state of awkward tensors, saved and loaded."""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdptool.distributed.session import limit_collectives
from fsdptool.errors import FsdptoolError
from fsdptool.records.recipe import Checkpoints
from fsdptool.runs.events import EventLog
from fsdptool.runs.watchdog import TIMEOUT
from fsdptool.training.checkpoint.checkpointer import RunCheckpointer
from fsdptool.training.worker import describe

SHAPES = {
    "model/uneven": ((5, 3), torch.float32),
    "model/one_row": ((1, 4), torch.float32),
    "model/half": ((8, 2), torch.bfloat16),
    "optimizer/uneven/exp_avg": ((5, 3), torch.float32),
    "optimizer/wide": ((7,), torch.float64),
}


def whole(name: str, step: int) -> torch.Tensor:
    """Return the full value a tensor has after ``step`` steps."""
    shape, dtype = SHAPES[name]
    generator = torch.Generator().manual_seed(1000 * step + sorted(SHAPES).index(name))
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


class State:
    """A ``TrainState`` whose values follow from its step."""

    def __init__(self, step: int, replicate: int = 1) -> None:
        world = dist.get_world_size()
        sizes = (replicate, world // replicate)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard"))
        self.step = step
        self.own: Mapping[str, torch.Tensor] | None = None
        self._tensors: dict[str, torch.Tensor] = {
            name: distribute_tensor(whole(name, step), mesh, [Replicate(), Shard(0)]) for name in SHAPES
        }
        self._tensors["optimizer/step"] = torch.tensor(float(step))

    def tensors(self) -> dict[str, torch.Tensor]:
        return self._tensors

    def progress(self) -> dict[str, Any]:
        return {"step": self.step, "data": {"samples": 10 * self.step}}

    def rank_tensors(self) -> dict[str, torch.Tensor]:
        return {"rng": torch.tensor([self.step, dist.get_rank()], dtype=torch.uint8)}

    def restore(self, progress: Mapping[str, Any], rank_tensors: Mapping[str, torch.Tensor] | None) -> None:
        self.step = int(progress["step"])
        self.own = rank_tensors

    def holds(self, step: int) -> bool:
        """Say whether every tensor has the value of ``step``."""
        whole_now = {name: self._tensors[name].full_tensor() for name in SHAPES}  # type: ignore[attr-defined]
        return float(self._tensors["optimizer/step"]) == step and all(
            torch.equal(whole_now[name], whole(name, step)) for name in SHAPES
        )


class GpuState(State):
    """One that also has the random generator of a GPU."""

    def rank_tensors(self) -> dict[str, torch.Tensor]:
        return {**super().rank_tensors(), "rng_cuda": torch.zeros(16, dtype=torch.uint8)}


def checkpointer(
    folder: str, *, resume: str | None = None, origin: str | None = None, **policy: Any
) -> RunCheckpointer:
    kind = policy.pop("kind", "sharded")
    events = EventLog(Path(folder), dist.get_rank(), 0)
    return RunCheckpointer(
        Path(folder, "checkpoints"),
        Checkpoints(**policy),
        kind=kind,
        events=events,
        resume=resume,
        origin=origin,
    )


def save_steps(folder: str, steps: list[int], policy: dict[str, Any], replicate: int = 1) -> None:
    """Save a checkpoint for each step, as a loop would, and overwrite the live tensors meanwhile."""
    saver = checkpointer(folder, **policy)
    for step in steps:
        state = State(step, replicate)
        saver.save(state)
        for tensor in state.tensors().values():
            tensor.mul_(0)
        saver.poll()
    saver.close()


def ask_alone(folder: str) -> str | None:
    """Let only rank 0 ask how a save is doing; returns what it is told."""
    saver = checkpointer(folder)
    with mock.patch.dict(os.environ, {TIMEOUT: "3"}):
        limit_collectives([dist.group.WORLD])
    saver.save(State(3))
    said = None
    if dist.get_rank() == 0:
        try:
            saver.poll()
        except RuntimeError as error:
            said = str(error)
    saver.close()
    dist.barrier(group=saver._group)
    # After a timeout nothing else can use the group of the pool.
    dist.destroy_process_group()
    return said


def load_newest(
    folder: str, resume: str = "auto", replicate: int = 1, origin: str | None = None, on_gpu: bool = False
) -> dict[str, Any]:
    """Load what ``resume`` names into a state of zeros, and say what arrived."""
    state = GpuState(0, replicate) if on_gpu else State(0, replicate)
    for tensor in state.tensors().values():
        tensor.mul_(0)
    step = checkpointer(folder, resume=resume, origin=origin).load(state)
    own = state.own["rng"].tolist() if state.own is not None else None
    return {"step": step, "right": step is not None and state.holds(step), "own": own}


def save_with_full_disk(folder: str, victim: int, policy: dict[str, Any]) -> str:
    """Save once; then one rank may write no more than 64 bytes to any file. Returns the error."""
    saver = checkpointer(folder, **policy)
    saver.save(State(1), wait=True)
    # Made before the limit: the pool's own rendezvous store is a file, too.
    state = State(2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == victim:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, hard))
    try:
        saver.save(state)
        saver.close()
    except FsdptoolError as error:
        return error.message
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "no error"


def load_error(folder: str, resume: str) -> str:
    """Return the error of a load."""
    try:
        checkpointer(folder, resume=resume).load(State(0))
    except FsdptoolError as error:
        return error.message
    return "no error"


def continue_from(folder: str, resume: str, steps: list[int], policy: dict[str, Any]) -> None:
    """Load a checkpoint and save further ones, as a resumed run would."""
    saver = checkpointer(folder, resume=resume, **policy)
    saver.load(State(0))
    for step in steps:
        saver.save(State(step), wait=True)
    saver.close()


def land_without_peer(rank: int, store: str, folder: str, answers: Any) -> None:
    """Rank 1 dies; rank 0 saves in the background and says what landing that save raises."""
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    saver = checkpointer(folder)
    state = State(1)
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    saver.save(state)
    try:
        saver.close()
    except BaseException as error:
        answers.put(describe(error))
    else:
        answers.put({"error": "none"})
    answers.close()
    answers.join_thread()
    os._exit(0)
