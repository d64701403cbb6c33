"""The lengths of a data set in a plan, on the console."""

from __future__ import annotations

from fsdptool.formatting import amount
from fsdptool.records.lengths import AllocatorReplay, LengthsReplay
from fsdptool.records.plan import Plan
from fsdptool.report.plan_words import duration
from fsdptool.report.tables import print_line, print_table


def print_lengths(plan: Plan, *, explain: bool) -> None:
    """Print what varying lengths do to memory and speed: a few lines, the traced lengths with ``explain``."""
    lengths = plan.lengths
    if lengths is None:
        return
    print_line()
    for line in summary(lengths):
        print_line(line)
    if not explain or not lengths.traced:
        return
    print_line()
    rows = [
        (
            f"{item.length:,}",
            f"{item.share:.1%}",
            amount(item.allocated_peak_bytes),
            duration(item.step_seconds),
        )
        for item in lengths.traced
    ]
    heads = ("padded length", "micro-batches", "allocated peak", "per step")
    print_table(heads, rows, numeric=(0, 1, 2, 3))


def summary(lengths: LengthsReplay) -> list[str]:
    """Return the section's lines."""
    speed = lengths.tokens_per_second
    text = f"; {speed:,.0f} tokens/s without padding (estimate)" if speed is not None else ""
    shape = {
        "longest": "padded to the longest sample of each micro-batch",
        "length": "padded to one length, so that all steps have one shape",
        "packed": "packed, so that all steps have one shape",
    }[lengths.padding]
    lines = [
        f"lengths: {lengths.samples:,} samples of {lengths.shortest:,} to {lengths.longest:,}"
        f" tokens, {shape}: {lengths.padding_share:.0%} padding{text}"
    ]
    if lengths.worst_length is not None and lengths.padding == "longest":
        bound = "; lengths between traced ones are rounded up" if lengths.rounded else ""
        lines.append(
            f"longest micro-batch: {lengths.worst_length:,} tokens,"
            f" {amount(lengths.worst_allocated_bytes)} allocated (estimate{bound})"
        )
    lines += [_replay(item, lengths.steps) for item in lengths.replays]
    return lines


def _replay(item: AllocatorReplay, steps: int) -> str:
    name = "expandable segments" if item.expandable else "fixed segments"
    first, last = amount(item.first_step_bytes), amount(item.last_step_bytes)
    text = (
        f"{name}, {item.orders} shuffled orders of {steps} steps: {first} reserved after step 1, {last} at"
        f" the end ({amount(item.fragmentation_bytes)} of it fragmentation), no growth after step"
        f" {item.last_growth_step}; "
    )
    if item.failed_orders:
        return (
            f"{text}{item.failed_orders} of {item.orders} run out of memory, the earliest in step"
            f" {item.first_failure_step} (a run of all ranks: {item.failed_share_of_runs:.0%})"
        )
    if item.retried_orders:
        return (
            f"{text}none runs out of {amount(item.limit_bytes)}, but {item.retried_orders} of"
            f" {item.orders} have to empty the cache, the earliest in step {item.first_retry_step}"
        )
    return f"{text}none uses all of the {amount(item.limit_bytes)} that the allocator can use"
