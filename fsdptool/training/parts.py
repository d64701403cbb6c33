"""Assembles what a worker needs besides the engine: events, stop flag, checkpoints, memory meter.

``training/worker.py`` is ``guard(folder, body)`` (``training/worker_entry.py``): the guard opens the flag
before anything slow is imported, then the events, and gives both to ``body``, which imports the rest
and calls :func:`open_parts` once the process group exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fsdptool.runs.events import EventLog
from fsdptool.runs.folder import CHECKPOINTS, read_start
from fsdptool.runs.signals import SignalFlag

if TYPE_CHECKING:
    import torch

    from fsdptool.records.recipe import Recipe
    from fsdptool.records.settings import FsdpSettings
    from fsdptool.training.checkpoint.checkpointer import RunCheckpointer
    from fsdptool.training.memory_meter import CpuMeter, CudaMeter


@dataclass(frozen=True, slots=True)
class Parts:
    """The runs room's side of a worker."""

    events: EventLog
    stop: SignalFlag
    checkpointer: RunCheckpointer
    meter: CpuMeter | CudaMeter


def open_parts(
    folder: Path,
    recipe: Recipe,
    settings: FsdpSettings,
    *,
    device: torch.device,
    events: EventLog,
    stop: SignalFlag,
    mesh: Mapping[str, int] | None = None,
) -> Parts:
    """Assemble the parts. Collective: checkpoints get process groups of their own."""
    from fsdptool.runs.trackers import open_trackers
    from fsdptool.training.checkpoint.checkpointer import RunCheckpointer
    from fsdptool.training.memory_meter import CpuMeter, CudaMeter

    start = read_start(folder)
    checkpointer = RunCheckpointer(
        folder / CHECKPOINTS,
        recipe.checkpoints,
        kind=settings.state_dict_type,
        events=events,
        resume="auto" if events.attempt > 0 else start.resume,
        # A relaunch before the first checkpoint begins where this start did.
        origin=start.resume if events.attempt > 0 and start.resume != "auto" else None,
        mesh=mesh,
    )
    if events.rank == 0:
        events.add_trackers(open_trackers(folder, recipe), every=recipe.tracking.log_every)
    meter = CudaMeter(device) if device.type == "cuda" else CpuMeter()
    return Parts(events, stop, checkpointer, meter)
