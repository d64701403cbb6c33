"""Says where and why a model's code fails on fake tensors, and what helps."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from fsdptool.memory.tracing.operators import MixedDtypesError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import FrameType

    from fsdptool.records.anatomy import ModelSpec

_LIBRARIES = ("torch", "fsdptool")
_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})
_LONGEST = 200


def explain_failure(error: Exception, spec: ModelSpec) -> str:
    """Return in one sentence which module of a model fails, on which line, why, and what helps."""
    text = " ".join(str(error).split())[:_LONGEST]
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    place = ", ".join(filter(None, (_module(frames), _line(error))))
    where = f" in {place}" if place else ""
    said = f"{spec.model_class} cannot be traced on fake tensors{where}"
    if isinstance(error, MixedDtypesError):
        return (
            f"{said} ({text}); cast the input, as in `x.to(w.dtype)` with the weight w of this {error.what},"
            " or use --precision no"
        )
    return f"{said} ({type(error).__name__}: {text})"


def _module(frames: Sequence[FrameType]) -> str | None:
    """Return the innermost module that runs, by its path from the model's class: ``Net.blocks.0``."""
    running = [own for frame in frames if isinstance(own := frame.f_locals.get("self"), nn.Module)]
    if not running:
        return None
    model, failed = running[0], running[-1]
    path = next((name for name, module in model.named_modules() if module is failed), type(failed).__name__)
    parts = (part for part in path.split(".") if part and part not in _WRAPPERS)
    return ".".join((type(model).__name__, *parts))


def _line(error: Exception) -> str | None:
    """Return the innermost line of the model's own code: its module and its number there.

    Paths depend on the machine, and traces are kept.
    """
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        name = str(frame.f_globals.get("__name__", ""))
        if name.partition(".")[0] not in _LIBRARIES and not name.startswith("fsdptool_"):
            # A module of a package is known by its name, one that lies alone by its file.
            return f"line {number} of {name if '.' in name else Path(frame.f_code.co_filename).name}"
    return None
