"""Tables of a plan besides its candidates, shared by the console and the HTML page. Decides nothing."""

from __future__ import annotations

from fsdptool.formatting import amount
from fsdptool.records.lengths import LengthsPlan
from fsdptool.records.plan import Plan
from fsdptool.records.plan_details import PipelinePlan
from fsdptool.report.plan_words import duration, resharding, speed

Table = tuple[tuple[str, ...], list[tuple[str, ...]]]
"""Heads and rows."""


def tried_batches(plan: Plan) -> Table:
    """Return the largest micro-batch of every combination of settings that ``--max-batch`` tried."""
    rows: list[tuple[str, ...]] = [
        (
            item.checkpointing.replace("_", " "),
            resharding(item.reshard_after_forward),
            "none fits" if item.micro_batch is None else f"{item.micro_batch} x {item.accumulation}",
            amount(item.device_total_bytes) if item.micro_batch is not None else "",
            speed(item) if item.micro_batch is not None else "",
        )
        for cluster in plan.details.max_batch
        for item in cluster.settings
    ]
    return ("checkpointing", "reshard", "largest micro-batch x accumulation", "memory", "speed"), rows


def traced_lengths(planned: LengthsPlan) -> Table:
    """Return what each padded length takes."""
    rows: list[tuple[str, ...]] = [
        (
            f"{item.length:,}",
            f"{item.share:.1%}",
            amount(item.allocated_peak_bytes),
            amount(item.reserved_peak_bytes),
            duration(item.step_seconds),
        )
        for item in planned.traced
    ]
    return ("padded length", "micro-batches", "allocated peak", "reserved peak", "per step"), rows


def pipeline_line(pipeline: PipelinePlan) -> str:
    """Return the schedule of a pipeline in a line."""
    virtual = f" with {pipeline.virtual} virtual stages per rank" if pipeline.virtual > 1 else ""
    return (
        f"pipeline of {pipeline.ranks} stages, planned only (estimates): schedule {pipeline.schedule}"
        f"{virtual}, {pipeline.micro_batches} micro-batches, bubble {pipeline.bubble:.0%} of the ideal"
        f" time, {amount(pipeline.sent_bytes)} sent over each boundary"
    )


def stages(pipeline: PipelinePlan) -> Table:
    """Return the stages of a pipeline."""
    rows: list[tuple[str, ...]] = [
        (
            str(number),
            ", ".join(f"{first}-{last - 1}" for first, last in stage.blocks),
            amount(stage.parameters),
            str(stage.in_flight),
            amount(stage.activation_bytes),
            amount(stage.allocated_bytes),
            duration(stage.micro_batch_seconds),
        )
        for number, stage in enumerate(pipeline.stages)
    ]
    return ("stage", "blocks", "parameters", "in flight", "activations", "allocated", "per micro-batch"), rows


def lengths(planned: LengthsPlan) -> list[str]:
    """Return what varying lengths do to memory and speed, in lines."""
    speed = planned.tokens_per_second
    text = f"; {speed:,.0f} tokens/s without padding (estimate)" if speed is not None else ""
    shape = {
        "longest": "padded to the longest sample of each micro-batch",
        "length": "padded to one length, so that all steps have one shape",
        "packed": "packed, so that all steps have one shape",
    }[planned.padding]
    lines = [
        f"lengths: {planned.samples:,} samples of {planned.shortest:,} to {planned.longest:,}"
        f" tokens, {shape}: {planned.padding_share:.0%} padding{text}"
    ]
    if planned.worst_length is not None and planned.padding == "longest":
        reserved = planned.traced[-1].reserved_peak_bytes if planned.traced else None
        text = f", {amount(reserved)} reserved" if reserved is not None else ""
        lines.append(
            f"longest micro-batch: {planned.worst_length:,} tokens,"
            f" {amount(planned.worst_allocated_bytes)} allocated{text} (estimate)"
        )
    return lines
