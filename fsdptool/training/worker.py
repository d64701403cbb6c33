"""What every rank runs: ``python -m fsdptool.training.worker RUN_FOLDER`` under torchrun."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.runs.events import WorkerPhase
from fsdptool.runs.watchdog import report_phase, watched
from fsdptool.training.worker_entry import guard

if TYPE_CHECKING:
    from fsdptool.runs.events import EventLog
    from fsdptool.runs.signals import SignalFlag


def main(arguments: list[str]) -> int:
    """Run one worker and return its exit status."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m fsdptool.training.worker RUN_FOLDER\n")
        return 2
    folder = Path(arguments[0])
    return guard(folder, lambda events, flag: work(folder, events, flag))


def work(folder: Path, events: EventLog, flag: SignalFlag) -> Mapping[str, Any]:
    """Train what ``folder`` describes; returns the fields of the closing ``finished`` event."""
    with watched(events):
        return _work(folder, events, flag)


def _work(folder: Path, events: EventLog, flag: SignalFlag) -> Mapping[str, Any]:
    report_phase(events, WorkerPhase.IMPORTING)
    import torch

    from fsdptool.distributed.session import close_session, open_session
    from fsdptool.runs.folder import read_inputs, read_prediction
    from fsdptool.training.assemble import assemble
    from fsdptool.training.data import build_batches, build_evaluation
    from fsdptool.training.loop import Loop
    from fsdptool.training.parts import open_parts
    from fsdptool.training.sampling import open_sampler

    inputs = read_inputs(folder)
    recipe = inputs.recipe
    session = open_session(inputs.settings)
    mesh = {name: value for name, value in asdict(session.sizes).items() if value is not None}
    parts = open_parts(
        folder, recipe, inputs.settings, device=session.device, events=events, stop=flag, mesh=mesh
    )
    torch.manual_seed(recipe.seed)

    with parts.meter.moment("load"):
        assembled = assemble(inputs, session, phase=partial(report_phase, events))
    if session.is_main:
        events.emit("proof", **assembled.proof)
        for note in assembled.notes:
            events.emit("warning", message=note)
    rank, world = session.data_rank, session.data_ranks
    pinned = session.device.type == "cuda"
    batches = build_batches(recipe, inputs.spec, rank=rank, world=world, pin_memory=pinned)
    validation = build_evaluation(recipe, inputs.spec, rank=rank, world=world)
    sampler = open_sampler(recipe, inputs.spec, assembled.objective, session, folder, validation or batches)
    prediction = read_prediction(folder)
    loop = Loop(
        recipe,
        assembled,
        batches,
        validation,
        parts,
        session,
        step_flops=prediction.step_flops if prediction is not None else None,
        peak_flops=prediction.peak_flops if prediction is not None and pinned else None,
        sampler=sampler,
    )
    report_phase(events, WorkerPhase.TRAINING)
    ended = loop.run()
    batches.close()
    if validation is not None:
        validation.close()
    close_session()
    return {
        "status": ended.status,
        "step": ended.step,
        "signal": ended.signal,
        "loss": ended.last_loss,
        "instrument": parts.meter.instrument,
        "peaks": list(parts.meter.peaks()),
        "moments": parts.meter.moments(),
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
