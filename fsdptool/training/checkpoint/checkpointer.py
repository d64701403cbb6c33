"""When to save, where, and what to continue from: the trainer's one way to checkpoints."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from fsdptool.distributed.session import LongWait
from fsdptool.distributed.shard import local, sharded_like
from fsdptool.errors import StorageError
from fsdptool.files.safetensors_writer import Written
from fsdptool.records.recipe import Checkpoints
from fsdptool.runs import watchdog
from fsdptool.runs.folder import CHECKPOINTS, read_start
from fsdptool.runs.manifest import (
    FORMAT,
    Kind,
    Manifest,
    aside_name,
    folder_name,
    prune,
    publish,
    supersede,
    sweep,
    write_manifest,
)
from fsdptool.training.checkpoint.split_tensors import UNDIVIDED, Division
from fsdptool.training.checkpoint.storage import Staged, choose, load_into, save_full, save_sharded, share

if TYPE_CHECKING:
    from fsdptool.records.recipe import Recipe
    from fsdptool.records.sharding import FsdpSettings
    from fsdptool.runs.events import EventLog
    from fsdptool.training.checkpoint.storage import TrainState


@dataclass(slots=True)
class _Flight:
    """A save in progress on this rank."""

    step: int
    thread: threading.Thread
    error: BaseException | None = None
    done: threading.Event = field(default_factory=threading.Event)


class RunCheckpointer:
    """Saves and loads the checkpoints of one run.

    Args:
        folder: ``checkpoints/`` of the run.
        policy: When to save and what to keep.
        kind: ``sharded`` or ``full``.
        events: Told of every save and load.
        resume: Checkpoint folder, ``auto`` or None.
        origin: What this run starts from, or None; ``auto`` falls back to it while the run has no checkpoint
            of its own.
        mesh: Mesh sizes, for the manifest.
        division: Which tensors a tensor-parallel group divides.
        timeout: Seconds the collectives of saving and loading may take, and a save without progress.
    """

    def __init__(
        self,
        folder: Path,
        policy: Checkpoints,
        *,
        kind: Kind,
        events: EventLog,
        resume: str | None = None,
        origin: str | None = None,
        mesh: Mapping[str, int] | None = None,
        division: Division = UNDIVIDED,
        timeout: float = 1800.0,
    ) -> None:
        self._folder = folder
        self._policy = policy
        self._kind = kind
        self._events = events
        self._resume = resume
        self._origin = origin
        self._mesh = dict(mesh or {})
        self._division = division
        self._flight: _Flight | None = None
        self._last_saved: int | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._group: dist.ProcessGroup | None = None
        self._patience = timeout
        self.rank = 0
        self.world_size = 1
        if dist.is_initialized():
            self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
            # A group of its own: saves run beside training's collectives, on the CPU.
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))

    def due(self, step: int) -> bool:
        """Say whether the recipe wants a checkpoint after ``step``."""
        every = self._policy.every_steps
        return every is not None and step > 0 and step % every == 0

    def save(self, state: TrainState, *, wait: bool = False) -> None:
        """Write a checkpoint; without ``wait`` and in asynchronous mode, return once it is staged.

        Raises:
            StorageError: This save, or an earlier one still in flight, failed on some rank.
        """
        self._land()
        began = time.monotonic()
        progress = dict(state.progress())
        step = int(progress["step"])
        if self._last_saved == step:
            return
        asynchronous = self._policy.mode == "async" and not wait and self._kind == "sharded"
        staged = self._stage(state, copy=asynchronous)
        self._events.emit("checkpoint_started", step=step, asynchronous=asynchronous)
        if asynchronous:
            flight = _Flight(step, threading.Thread())
            flight.thread = threading.Thread(
                target=self._fly, args=(flight, staged, progress), name="checkpoint", daemon=True
            )
            self._flight = flight
            flight.thread.start()
            self._events.emit("checkpoint_stalled", step=step, seconds=time.monotonic() - began)
            return
        self._write(step, staged, progress)
        self._landed(step, time.monotonic() - began)
        self._events.emit("checkpoint_stalled", step=step, seconds=time.monotonic() - began)

    def poll(self) -> None:
        """Settle a save in flight once every rank has finished its part.

        Raises:
            StorageError: It failed on some rank; raised on every rank at the same step.
        """
        flight = self._flight
        if flight is None:
            return
        done = torch.tensor([int(flight.done.is_set())])
        if self._group is not None:
            # Over the group of training, whose thread asks: the other one is busy with the save.
            dist.all_reduce(done, op=dist.ReduceOp.MIN)
        if done[0]:
            self._land()

    def load(self, state: TrainState) -> int | None:
        """Load what the run is to continue from; returns its step, or None for a fresh start.

        Raises:
            ConfigError: The checkpoint asked for (or every one there is) is damaged, or does not suit the
                model or the recipe.
            StorageError: It cannot be read.
        """
        chosen = None
        # Rank 0 decides: torchrun counts restarts per machine, and one may have joined later.
        candidates = [resume for resume in (self._resume, self._origin) if resume is not None]
        for resume in share(candidates, self._group):
            chosen = choose(resume, self._folder, self._group, self._events)
            if chosen is not None:
                break
        self._clean()
        return self._restore(state, chosen)

    def rollback(self, state: TrainState) -> int | None:
        """Load the newest good checkpoint of this very run; returns its step, or None if there is none."""
        self._land()
        return self._restore(state, choose("auto", self._folder, self._group, self._events))

    def _restore(self, state: TrainState, chosen: tuple[Path, Manifest] | None) -> int | None:
        if chosen is None:
            if lost := self._events.rewind(0):
                count = f"{lost} step{'s are' if lost > 1 else ' is'} lost"
                self._events.emit("warning", message=f"no checkpoint exists: {count}, the run starts over")
            return None
        path, manifest = chosen
        load_into(state, path, manifest, self._group, self._division)
        self._last_saved = manifest.step
        # Only now: a checkpoint that does not load costs nothing.
        self._events.rewind(manifest.step)
        if self.rank == 0:
            for left in supersede(self._folder, manifest.step):
                self._events.emit("checkpoint_superseded", path=str(left), step=manifest.step)
            self._events.emit("resumed", step=manifest.step, path=str(path), written_by=manifest.world_size)
        return manifest.step

    def close(self) -> None:
        """Wait for a save in flight.

        Raises:
            StorageError: It failed.
        """
        self._land()

    def _clean(self) -> None:
        if self.rank == 0:
            sweep(self._folder)
        if self._group is not None:
            dist.barrier(group=self._group)

    def _stage(self, state: TrainState, *, copy: bool) -> Staged:
        tensors = {name: value.detach() for name, value in state.tensors().items()}
        own = {name: value.detach().to("cpu", copy=True) for name, value in state.rank_tensors().items()}
        if not copy:
            return Staged(self._division.wrap(tensors), own)
        copies = {name: self._copy(name, value) for name, value in tensors.items()}
        if any(local(value).is_cuda for value in tensors.values()):
            # All copies are in flight together; the step that follows must not change what they read.
            torch.cuda.current_stream().synchronize()
        return Staged(self._division.wrap(copies), own)

    def _copy(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Copy into a host buffer that is kept for the next save (pinned beside an accelerator)."""
        rows = local(value)
        pinned = rows.device.type == "cuda"
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != rows.shape or buffer.dtype != rows.dtype:
            buffer = torch.empty(rows.shape, dtype=rows.dtype, device="cpu", pin_memory=pinned)
            self._buffers[name] = buffer
        buffer.copy_(rows, non_blocking=pinned)
        return sharded_like(buffer, value)

    def _fly(self, flight: _Flight, staged: Staged, progress: dict[str, object]) -> None:
        began = time.monotonic()
        try:
            # Not a sign of life of the training thread, which the watchdog watches.
            self._write(flight.step, staged, progress, beat=_ignore)
        except BaseException as error:
            flight.error = error
        else:
            self._landed(flight.step, time.monotonic() - began)
        finally:
            flight.done.set()

    def _write(
        self, step: int, staged: Staged, progress: dict[str, object], beat: Callable[[], None] = watchdog.beat
    ) -> None:
        pace = LongWait(self._group, patience=self._patience, beat=beat)
        aside, final = self._folder / aside_name(step), self._folder / folder_name(step)

        def commit(files: dict[str, Written]) -> None:
            manifest = Manifest(FORMAT, self._kind, step, self.world_size, self._mesh, progress, files)
            write_manifest(aside, manifest)
            publish(aside, final)
            prune(self._folder, keep_last=self._policy.keep_last, keep_every=self._policy.keep_every)

        self._prepare(aside)
        write = save_sharded if self._kind == "sharded" else save_full
        write(staged, aside, self._group, commit, pace)

    def _prepare(self, aside: Path) -> None:
        """Make the folder on rank 0; a failure there is every rank's."""
        reason: str | None = None
        if self.rank == 0:
            try:
                shutil.rmtree(aside, ignore_errors=True)
                aside.mkdir(parents=True)
            except OSError as error:
                reason = f"rank 0: {error}"
        if self._group is not None:
            shared = [reason]
            dist.broadcast_object_list(shared, src=0, group=self._group)
            reason = shared[0]
        if reason is not None:
            raise StorageError(f"the checkpoint cannot be written: {reason}")

    def _landed(self, step: int, seconds: float) -> None:
        self._last_saved = step
        if self.rank == 0:
            path = self._folder / folder_name(step)
            self._events.emit("checkpoint", step=step, path=str(path), seconds=seconds)

    def _land(self) -> None:
        flight, self._flight = self._flight, None
        if flight is None:
            return
        flight.done.wait()
        if flight.error is not None:
            # As it is: a peer that has gone (RuntimeError) can be helped by another start, a full disk
            # (StorageError) cannot.
            raise flight.error


def _ignore() -> None:
    """Take no notice of progress."""


def open_checkpointer(
    folder: Path,
    recipe: Recipe,
    settings: FsdpSettings,
    *,
    events: EventLog,
    mesh: Mapping[str, int],
    division: Division = UNDIVIDED,
) -> RunCheckpointer:
    """Return the checkpointer of a run folder. Collective: checkpoints get process groups of their own."""
    start = read_start(folder)
    return RunCheckpointer(
        folder / CHECKPOINTS,
        recipe.checkpoints,
        kind=settings.state_dict_type,
        events=events,
        resume="auto" if events.attempt > 0 else start.resume,
        # Every attempt until the first checkpoint begins there; later ones prefer what the run saved.
        origin=start.resume if start.resume != "auto" else None,
        mesh=mesh,
        division=division,
    )
