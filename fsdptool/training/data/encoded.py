"""Samples that are encoded once before training (docs/how-to/train-on-pictures.md).

A family says what is encoded, and how (``Family.encoded_data``). The work runs in one or in several processes
of this machine, or in those of torchrun or Slurm.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fsdptool import errors
from fsdptool.errors import ConfigError, FsdptoolError, WorkerError
from fsdptool.families.registry import family_of
from fsdptool.records.anatomy import ModelSpec
from fsdptool.records.command_documents import BucketCount, PrecomputeReport
from fsdptool.records.recipe import Data, Recipe
from fsdptool.training.data.images import Bucket
from fsdptool.training.data.loader import Opened

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Done:
    """What a process did: shards made and found, and whether the folder is finished."""

    folder: Path
    pictures: int
    buckets: tuple[tuple[Bucket, int], ...]
    shards: int
    made: int
    finished: bool


class Work(Protocol):
    """What is to be encoded, the same for every process; it is pickled."""

    @property
    def key(self) -> str:
        """Digest of everything that decides the result."""

    def run(self, *, rank: int, world: int, device: str, tell: Tell) -> Done:
        """Encode this process's shards that are not there yet.

        Raises:
            ConfigError: A sample or an encoder cannot be read, or the folder holds something else.
            StorageError: The folder cannot be written.
        """


class Decoder(Protocol):
    """Makes pictures of latents."""

    def decode(self, latents: Tensor) -> list[Image]:
        """Return the pictures of normalised latents ``[channels, (frames,) height, width]``."""

    def move(self, device: str) -> None:
        """Work on another device from now on."""

    def unload(self) -> None:
        """Give the memory back."""


class EncodedData(Protocol):
    """How a family's samples are encoded, and read again."""

    def plan(self, recipe: Recipe, spec: ModelSpec, cache: Path) -> Work:
        """Return what ``precompute`` encodes for a recipe, and where below ``cache``.

        Raises:
            ConfigError: The recipe names no images, sizes or pipeline, or they do not fit together.
        """

    def open_samples(self, recipe: Recipe, spec: ModelSpec, data: Data, cache: Path, part: str) -> Opened:
        """Return the encoded samples of a part: ``train``, ``held_out`` or ``all``.

        Raises:
            ConfigError: They are not there or cannot be used.
        """

    def decoder(self, recipe: Recipe, spec: ModelSpec, device: str) -> Decoder:
        """Return what makes pictures of the latents that the model writes.

        Raises:
            ConfigError: The model's pipeline is not at hand.
        """


def encoded_data(spec: ModelSpec) -> EncodedData:
    """Return how the samples of a model's family are encoded.

    Raises:
        ConfigError: The family is not trained on encoded samples.
    """
    named = family_of(spec).encoded_data
    if named is None:
        raise ConfigError(
            f"{spec.model_class} is not trained on latents", help="choose another data.source, or synthetic"
        )
    module, _, name = named.partition(":")
    data: EncodedData = getattr(import_module(module), name)
    return data


def precompute_report(done: Done, device: str) -> PrecomputeReport:
    """Return what a precompute did, as ``fsdptool precompute --format json`` prints it."""
    return PrecomputeReport(
        folder=str(done.folder),
        pictures=done.pictures,
        buckets=tuple(BucketCount(b.height, b.width, b.frames, count) for b, count in done.buckets),
        shards=done.shards,
        made=done.made,
        finished=done.finished,
        device=device,
    )


def place_of(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """Return rank and number of ranks that torchrun or Slurm gave this process, or None."""
    for rank, world in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
        if rank in environment and world in environment:
            return int(environment[rank]), int(environment[world])
    return None


def device_for(rank: int) -> str:
    """Return the device of a process: a GPU by its local rank if there is one, else the CPU."""
    import torch

    if not torch.cuda.is_available():
        return "cpu"
    local = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", rank)))
    return f"cuda:{local % torch.cuda.device_count()}"


def run_processes(work: Work, *, processes: int, device: str | None, tell: Tell) -> Done:
    """Do ``work`` in this process, or in ``processes`` new ones.

    Raises:
        ConfigError: ``processes`` is not positive.
        WorkerError: A process died; what it finished is kept.
        FsdptoolError: As a process met it.
    """
    if processes < 1:
        raise ConfigError(f"--processes {processes} is not positive", help="give 1 or more")
    given = place_of(os.environ)
    if given is not None or processes == 1:
        rank, world = given or (0, 1)
        return work.run(rank=rank, world=world, device=device or device_for(rank), tell=tell)
    context = get_context("spawn")
    queue: Any = context.SimpleQueue()
    started = [
        context.Process(target=_one, args=(work, rank, processes, device, queue), name=f"precompute-{rank}")
        for rank in range(processes)
    ]
    for process in started:
        process.start()
    made = 0
    try:
        made = _gather(started, queue, tell)
    finally:
        for process in started:
            if process.is_alive():
                process.terminate()
            process.join()
    done = work.run(rank=0, world=1, device=device or "cpu", tell=tell)
    return Done(done.folder, done.pictures, done.buckets, done.shards, made, done.finished)


def _gather(started: list[Any], queue: Any, tell: Tell) -> int:
    """Read what the processes say until each has ended, or one has failed."""
    made, waiting = 0, len(started)
    while waiting:
        if queue.empty():
            for process in started:
                process.join(0.05 / len(started))
                if process.exitcode not in (None, 0) and queue.empty():
                    raise WorkerError(
                        f"{process.name} (pid {process.pid}) died with status {process.exitcode}",
                        help="run the command again: it continues with what is missing",
                    )
            continue
        kind, content = queue.get()
        if kind == "tell":
            tell(content)
        elif kind == "error":
            name, message, advice = content
            raise getattr(errors, name, FsdptoolError)(message, help=advice)
        else:
            made += content
            waiting -= 1
    return made


def _follow_parent() -> None:
    """Leave the stop signals to the parent, which ends us; end when it has gone without doing so."""
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # An exception, so that what is half written is removed.
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(1))
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def _one(work: Work, rank: int, world: int, device: str | None, queue: Any) -> None:
    _follow_parent()
    os.environ["LOCAL_RANK"] = str(rank)
    try:
        done = work.run(
            rank=rank,
            world=world,
            device=device or device_for(rank),
            tell=lambda text: queue.put(("tell", f"process {rank}: {text}")),
        )
    except FsdptoolError as error:
        queue.put(("error", (type(error).__name__, error.message, error.help)))
        return
    queue.put(("done", done.made))
