"""The speed and the memory that training programs print, read from their logs."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fsdptool.errors import StorageError
from fsdptool.files.text import UnreadableError, read_ends
from fsdptool.records.shared_row import PeakKind, SharedFigures, SharedProgram

_BYTES = 8 << 20
_WARM = 2
"""Lines of the first steps, which compile and fill caches."""
_NUMBER = r"([0-9][0-9,]{0,15}(?:\.[0-9]{1,9})?)"
_LINE = 4000
"""Characters of a line that are looked at."""


@dataclass(frozen=True, slots=True)
class _Printed:
    """How a program prints a step.

    Attributes:
        program: Which.
        speed: Finds tokens (or samples) per second.
        memory: Finds the peak in GiB; None: it prints none.
        kind: Which peak that is.
        samples: Whether the speed counts samples.
        every: Whether the speed is that of all GPUs.
        once: Whether the speed is that of the whole run.
    """

    program: SharedProgram
    speed: re.Pattern[str]
    memory: re.Pattern[str] | None = None
    kind: PeakKind | None = None
    samples: bool = False
    every: bool = False
    once: bool = False


_TITAN = re.compile(rf"\bmemory: {{1,3}}{_NUMBER}GiB\(")
_PRINTED = (
    # torchtitan, components/metrics.py: tokens per second and device, peak of reserved memory.
    _Printed("torchtitan", re.compile(rf"\btps: {{1,3}}{_NUMBER} "), _TITAN, "reserved"),
    # NeMo AutoModel, recipes/llm/train_ft.py: of all GPUs, and of each in brackets; peak of allocated memory.
    _Printed(
        "automodel",
        re.compile(rf"\btps {_NUMBER}\({_NUMBER}/gpu\)"),
        re.compile(rf"\bmem {_NUMBER} GiB"),
        "allocated",
    ),
    # axolotl, callbacks and core/trainers/base.py: tokens per second and GPU, peaks by kind.
    _Printed(
        "axolotl",
        re.compile(rf"'(?:tokens/train_per_sec_per_gpu|tokens_per_second_per_gpu)': '?{_NUMBER}"),
        re.compile(rf"'memory/max_(?:allocated|mem_allocated) ?\((?:GiB|gib)\)': '?{_NUMBER}"),
        "allocated",
    ),
    # transformers, trainer_utils.py:speed_metrics: of all GPUs, over the whole run.
    _Printed(
        "trainer",
        re.compile(rf"'train_samples_per_second': '?{_NUMBER}"),
        samples=True,
        every=True,
        once=True,
    ),
)


def read_reported(path: Path, gpus: int) -> tuple[SharedProgram, SharedFigures]:
    """Return which program wrote a log, and the speed and the peak of memory that it prints.

    Args:
        path: The log, of which the first and the last 8 MiB are read.
        gpus: Of the run.

    Raises:
        StorageError: The log cannot be read, or has no such lines.
    """
    try:
        head, tail, _ = read_ends(path, head=_BYTES, tail=_BYTES)
    except UnreadableError as error:
        raise StorageError(f"{path}: {error}", help="give a file of text") from error
    lines = (head + tail).decode("utf-8", "replace").splitlines()
    found = None
    for printed in _PRINTED:
        speeds = _found(lines, printed.speed)
        if not speeds:
            continue
        if found is not None and printed.program == "trainer":
            continue  # axolotl prints what Trainer does, too
        found = printed, speeds
        if printed.program != "axolotl":
            break
    if found is None:
        raise StorageError(
            f"{path} has no line with the speed of torchtitan, AutoModel, Trainer or axolotl",
            help="give the output of rank 0, with the lines of its steps",
        )
    printed, speeds = found
    speed = speeds[-1] if printed.once else statistics.median(speeds[_WARM:] or speeds)
    if printed.every:
        speed /= gpus
    peaks = _found(lines, printed.memory) if printed.memory is not None else []
    return printed.program, SharedFigures(
        tokens_per_second_and_gpu=None if printed.samples else round(speed, 2),
        samples_per_second_and_gpu=round(speed, 4) if printed.samples else None,
        peak_gib=max(peaks) if peaks else None,
        peak_kind=printed.kind if peaks else None,
    )


def _found(lines: Sequence[str], pattern: re.Pattern[str]) -> list[float]:
    """Return the last number of the pattern in each line that has it."""
    matches = (pattern.search(line[:_LINE]) for line in lines)
    values = (float(match[match.lastindex or 1].replace(",", "")) for match in matches if match is not None)
    return [value for value in values if value > 0]
