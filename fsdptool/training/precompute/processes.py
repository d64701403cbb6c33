"""Precompute in several processes of this machine, or as one of torchrun's or Slurm's."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping
from multiprocessing import get_context, parent_process
from typing import Any

from fsdptool import errors
from fsdptool.errors import ConfigError, FsdptoolError, WorkerError
from fsdptool.training.precompute.run import Done, Tell, Work, run_work


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
        return run_work(work, rank=rank, world=world, device=device or device_for(rank), tell=tell)
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
    done = run_work(work, rank=0, world=1, device=device or "cpu", tell=tell)
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
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
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
        done = run_work(
            work,
            rank=rank,
            world=world,
            device=device or device_for(rank),
            tell=lambda text: queue.put(("tell", f"process {rank}: {text}")),
        )
    except FsdptoolError as error:
        queue.put(("error", (type(error).__name__, error.message, error.help)))
        return
    queue.put(("done", done.made))
