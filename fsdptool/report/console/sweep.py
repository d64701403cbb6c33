"""Sweeps on the console, and as rows. Decides nothing."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Literal

from fsdptool.formatting import amount
from fsdptool.records.command_documents import Sweep
from fsdptool.records.mesh import PLANNED
from fsdptool.report import plan_words as words
from fsdptool.report.console.tables import print_rows, print_table

_FIGURES = (
    "verdict",
    "device_total_bytes",
    "usable_bytes",
    "host_bytes_per_node",
    "step_seconds",
    "samples_per_second",
    "tokens_per_second",
    "mfu",
    "global_batch",
    "price_per_million_tokens",
    "price_per_run",
)
_SETTINGS = (
    "micro_batch",
    "accumulation",
    "checkpointing",
    "reshard_after_forward",
    *(item.name for item in PLANNED),
    "cpu_offload",
)


def print_sweep(sweep: Sweep) -> None:
    """Print one row per combination: its values, verdict, memory, speed and chosen configuration."""
    swept = [name.replace("_", " ") for name in sweep.options]
    priced = any(row.price_per_million_tokens is not None for row in sweep.rows)
    heads = (*swept, "verdict", "memory", "per step", "speed", "per million tokens", "configuration")
    rows = []
    for row in sweep.rows:
        values = [f"{row.values[name]:g}" for name in sweep.options]
        if row.verdict is None or row.settings is None:
            rows.append((*values, "invalid", "", "", "", "", row.reason or ""))
            continue
        rows.append(
            (
                *values,
                words.VERDICTS[row.verdict],
                amount(row.device_total_bytes),
                words.duration(row.step_seconds),
                words.speed(row),
                words.money(row.price_per_million_tokens) if priced else "",
                words.brief(row.settings),
            )
        )
    first = len(swept)
    if not priced:
        heads = (*heads[: first + 4], heads[-1])
        rows = [(*row[: first + 4], row[-1]) for row in rows]
    numeric = (*range(first), *range(first + 1, len(heads) - 1))
    print_table(heads, rows, numeric=numeric, optional=(first + 2, first + 3))


def print_sweep_rows(sweep: Sweep, separator: Literal["tsv", "csv"]) -> None:
    """Print the rows for programs (:func:`~fsdptool.report.console.tables.print_rows`)."""
    print_rows(*_table(sweep), separator=separator)


def sweep_csv(sweep: Sweep) -> str:
    """Return the rows as CSV."""
    stream = io.StringIO()
    print_rows(*_table(sweep), separator="csv", stream=stream)
    return stream.getvalue()


def _table(sweep: Sweep) -> tuple[Sequence[str], Iterable[Sequence[object]]]:
    names = sweep.options
    own = tuple(name for name in _SETTINGS if name not in names)
    rows = (
        (
            *(row.values[name] for name in names),
            *(getattr(row, name) for name in _FIGURES),
            *(getattr(row.settings, name, None) for name in own),
            row.reason,
        )
        for row in sweep.rows
    )
    return (*names, *_FIGURES, *own, "reason"), rows
