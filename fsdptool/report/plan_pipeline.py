"""The stages of a planned pipeline on the console."""

from __future__ import annotations

from fsdptool.formatting import amount
from fsdptool.records.plan import Plan
from fsdptool.report import plan_words as words
from fsdptool.report.tables import print_line, print_table


def print_pipeline(plan: Plan) -> None:
    """Print the schedule and a table of the stages, where the plan has any."""
    found = pipeline_rows(plan)
    if found is not None:
        line, heads, rows = found
        print_line()
        print_line(line)
        print_table(heads, rows, numeric=(0, 2, 3, 4, 5, 6), optional=(4, 6))


def pipeline_rows(
    plan: Plan,
) -> tuple[str, tuple[str, ...], list[tuple[str, ...]]] | None:
    """Return a line about the pipeline, and heads and rows of the table of its stages; None without one."""
    pipeline = plan.details.pipeline
    if pipeline is None:
        return None
    virtual = f" with {pipeline.virtual} virtual stages per rank" if pipeline.virtual > 1 else ""
    line = (
        f"pipeline of {pipeline.ranks} stages, planned only (estimates): schedule {pipeline.schedule}"
        f"{virtual}, {pipeline.micro_batches} micro-batches, bubble {pipeline.bubble:.0%} of the ideal"
        f" time, {amount(pipeline.sent_bytes)} sent over each boundary"
    )
    rows: list[tuple[str, ...]] = [
        (
            str(number),
            ", ".join(f"{first}-{last - 1}" for first, last in stage.blocks),
            amount(stage.parameters),
            str(stage.in_flight),
            amount(stage.activation_bytes),
            amount(stage.allocated_bytes),
            words.duration(stage.micro_batch_seconds),
        )
        for number, stage in enumerate(pipeline.stages)
    ]
    heads: tuple[str, ...] = (
        "stage",
        "blocks",
        "parameters",
        "in flight",
        "activations",
        "allocated",
        "per micro-batch",
    )
    return line, heads, rows
