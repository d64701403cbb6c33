"""What pages about runs need PyTorch for: a dry run, and an export."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any


def dry_run(
    progress: Callable[[str], None], *, recipe: str, config: str, output: str | None, cpu: bool, version: Any
) -> dict[str, Any]:
    """Check a run without starting it.

    Args:
        progress: Takes what is done.
        recipe, config, output, cpu: As ``fsdptool train`` takes them.
        version: State of the files: the answer is out of date when they change.
    """
    from fsdptool.launch.options import StartOptions
    from fsdptool.launch.start import open_run
    from fsdptool.records.codec import to_json

    progress("checking the recipe, the configuration, the model and the data")
    place = Path(output) if output is not None else None
    # The folder is checked when the run joins the queue; here it may exist.
    options = StartOptions(output=place, force=True, cpu=cpu)
    with contextlib.ExitStack() as stack:
        ready = stack.enter_context(open_run(Path(recipe), Path(config), options, dry_run=True))
    prepared = ready.prepared
    return {
        "shell": ready.command_line.shell(),
        "device": prepared.device,
        "processes": prepared.world_size,
        "units": len(prepared.units.units),
        "findings": to_json(prepared.diagnostics),
        "notes": list(prepared.notes),
        "unchecked": list(prepared.unchecked),
    }


def export(
    progress: Callable[[str], None], *, run: str, merge: bool, ema: bool, force: bool, number: float
) -> dict[str, Any]:
    """Export the newest checkpoint of a run.

    Args:
        progress: Takes what is done.
        run, merge, ema, force: As ``fsdptool export`` takes them.
        number: Tells a request from an earlier one.
    """
    from fsdptool.api.runs import export as export_run

    progress("writing the model")
    exported = export_run(run, merge=merge, ema=ema, force=force)
    return {"folder": str(exported.folder)}
