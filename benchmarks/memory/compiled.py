"""Compiled blocks: measured memory beside the plan, on small models.

``python benchmarks/memory/compiled.py [--only TEXT] [--again]`` runs real steps of blocks that Inductor
compiles for the CPU (it needs a C++ compiler). It writes ``benchmarks/results/memory_compiled.json`` row
by row and, without ``--only``, the table between the marks in ``docs/explanation/memory-accuracy.md``.
``--again`` predicts every row again.

The instrument is that of ``measure.py``: one process that acts as rank 0, with real kernels. ``saved`` is
what is alive as backward begins, less what is alive between steps; the peak is that of the whole second
step. The range of a peak is that of the plan: Inductor's program, and the same if blocks fused nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from kept_rows import read_document, row_options, write_between, write_document
from matrix import _base
from settings import Setting, inputs_of

from fsdptool.modeling.resolve import resolve_run
from fsdptool.records.diagnostic import library_versions
from fsdptool.runs.folder import RunInputs

RESULTS = Path(__file__).parent.parent / "results" / "memory_compiled.json"
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "memory-accuracy.md"
BEGIN, END = "<!-- compiled: begin (benchmarks/memory/compiled.py) -->", "<!-- compiled: end -->"


def rows() -> Iterator[Setting]:
    """Yield every setting."""
    for family, change in (
        ("llama", {}),
        ("llama", {"checkpointing": "full"}),
        ("llama", {"checkpointing": "selective:attention,matmul#1", "precision": "fp32"}),
        ("gpt2", {"precision": "fp32"}),
        ("qwen3", {"method": "lora", "ranks": 4}),
        ("bert", {"precision": "fp32", "checkpointing": "full"}),
        ("t5", {"ranks": 4}),
        ("sd3", {}),
    ):
        row = replace(_base(family), **change)
        row = replace(row, overrides=_shallow(row.overrides))
        words = (row.method, row.precision, f"checkpointing {row.checkpointing}", f"{row.ranks} ranks")
        yield replace(row, name=f"{family}, {', '.join(words)}")


def _shallow(overrides: Any) -> dict[str, Any]:
    layers = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers", "max_window_layers")
    return {name: 3 if name in layers else value for name, value in overrides.items()}


def main() -> None:
    """Measure and predict the missing rows, and write the table."""
    options = row_options(__doc__)
    document = read_document(RESULTS)
    document |= {
        "instrument": "torch CPU allocator events (profile_memory): running sum in step 2",
        "libraries": library_versions(),
    }
    for setting in rows():
        if options.only not in setting.name:
            continue
        row = document["rows"].setdefault(setting.name, {})
        if "measured_peak_bytes" not in row:
            row.clear()
            row |= _measured(setting)
            write_document(RESULTS, document)
        if "measured_peak_bytes" in row and (options.again or "predicted_peak_bytes" not in row):
            row |= _predicted(setting, row)
        print(setting.name, row, flush=True)
        write_document(RESULTS, document)
    if not options.only:
        write_between(PAGE, BEGIN, END, _table(document["rows"]))


def _measured(setting: Setting) -> dict[str, Any]:
    import measure  # noqa: F401 - imported before the fork, so that every row starts alike
    from run import measured

    result = measured(setting, _compiled(setting))
    if "error" in result:
        return dict(result)
    return {
        "measured_saved_bytes": result["backward_bytes"] - result["resting_bytes"],
        "measured_peak_bytes": result["peak_bytes"],
    }


def _compiled(setting: Setting) -> RunInputs:
    inputs = inputs_of(setting)
    sharding = replace(inputs.recipe.sharding, compile=True)
    return replace(inputs, recipe=replace(inputs.recipe, sharding=sharding))


def _predicted(setting: Setting, row: dict[str, Any]) -> dict[str, Any]:
    from fsdptool.memory import footprint
    from fsdptool.memory.tracing.tracer import trace

    inputs = inputs_of(setting)
    recipe = _compiled(setting).recipe
    mesh = inputs.settings.mesh.resolve(setting.ranks)
    figures: dict[str, Any] = {}
    for name, traced in (
        ("predicted", trace(inputs.spec, resolve_run(recipe, inputs.settings))),
        ("eager", trace(inputs.spec, resolve_run(inputs.recipe, inputs.settings))),
    ):
        predicted = footprint(traced, inputs.units, mesh, recipe, profile="cpu-fake")
        levels = {moment.name: moment.allocated_bytes for moment in predicted.timeline}
        figures[f"{name}_peak_bytes"] = predicted.allocated_peak_bytes
        figures[f"{name}_saved_bytes"] = levels["loss"] - levels["between steps"]
        if name == "predicted":
            figures["range_bytes"] = predicted.allocated_peak_range_bytes
            figures["unknowns"] = list(predicted.unknowns)
    for what in ("saved", "peak"):
        ratio = figures[f"predicted_{what}_bytes"] / row[f"measured_{what}_bytes"]
        figures[f"{what}_error_percent"] = round(100 * (ratio - 1), 3)
    return figures


def _table(rows: dict[str, dict[str, Any]]) -> str:
    lines = [
        "| setting | saved, measured | planned | error | uncompiled"
        " | peak, measured | planned | error | nothing fused |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in rows.items():
        if "predicted_peak_bytes" not in row:
            lines.append(f"| {name} | failed | | | | | | | |")
            continue
        cells = []
        for what in ("saved", "peak"):
            cells += [f"{row[f'{part}_{what}_bytes']:,}" for part in ("measured", "predicted")]
            cells.append(f"{row[f'{what}_error_percent']:+.2f} %")
            if what == "saved":
                cells.append(f"{row['eager_saved_bytes']:,}")
        cells.append(f"{row['range_bytes'][1]:,}" if row["range_bytes"] else "")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
