"""Prints what ``fsdptool doctor --gpu`` measured."""

from __future__ import annotations

from fsdptool.formatting import amount
from fsdptool.records.measurements import MeasuredAttention, Measurements, RankMeasurements
from fsdptool.report.console.tables import print_line, print_table


def print_measurements(measured: Measurements) -> None:
    """Print the measurements of a machine."""
    probe, ranks = measured.probe, measured.ranks
    verdict = "yes" if probe.ok else f"NO: {probe.reason}"
    print_line(f"FSDP2 shards on {probe.processes} {probe.device} processes ({probe.backend}): {verdict}")
    if ranks is not None:
        _print_ranks(ranks)
    if measured.error is not None:
        print_line(f"measuring ended early: {measured.error}")
    if measured.device == "cpu":
        print_line("this was a rehearsal on the CPU: plans cannot use its figures")
    print_line(f"took {measured.seconds:.0f} s")


def _print_ranks(ranks: RankMeasurements) -> None:
    print_line(f"device: {ranks.gpu}, processes: {ranks.processes} over {ranks.backend}")
    for label, size in (
        ("context", ranks.context_bytes),
        ("first communicator", ranks.communicator_bytes),
        ("further communicator", ranks.further_communicator_bytes),
    ):
        if size is not None:
            print_line(f"{label}: {amount(size)}")
    if ranks.kernel_latency is not None:
        print_line(f"launch of an operator: {ranks.kernel_latency * 1e6:.1f} µs")
    rows = [
        (f"product {p.m} x {p.k} x {p.n}, {p.dtype}", f"{p.flops_per_second / 1e12:.3g} TFLOP/s")
        for p in ranks.products
    ]
    rows += [
        (f"copy, {c.kind.replace('_', ' ')}, {amount(c.bytes)}", f"{c.traffic_per_second / 1e9:.3g} GB/s")
        for c in ranks.copies
    ]
    rows += [
        (
            f"{c.kind.replace('_', '-')}, {amount(c.bytes)}",
            f"{c.link_bytes_per_second / 1e9:.3g} GB/s per rank",
        )
        for c in ranks.collectives
    ]
    if rows:
        print_table(("what", "rate"), rows)
    if ranks.attention:
        head = ("attention", "heads", "kernel", "chosen", "forward", "backward", "workspace")
        print_table(head, [_attention(row) for row in ranks.attention])
    for attempt in ranks.attempts:
        state = "works" if attempt.ok else f"FAILED: {attempt.reason}"
        print_line(f"{attempt.kind.replace('_', ' ')}: {state} ({attempt.seconds:.1f} s)")


def _attention(row: MeasuredAttention) -> tuple[str, ...]:
    heads = f"{row.heads}/{row.key_heads} of {row.head_size}" + (" repeated" if row.repeated else "")
    what = f"{row.masking}, {row.length} tokens, {row.dtype}"
    kernel = row.kernel.removesuffix("_ATTENTION").lower()
    chosen = "yes" if row.chosen else ""
    if row.forward_seconds is None or row.backward_seconds is None:
        return what, heads, kernel, chosen, "refused", "", ""
    rates = (row.flops / row.forward_seconds, 2.5 * row.flops / max(row.backward_seconds, 1e-9))
    workspaces = (row.forward_workspace_bytes, row.backward_workspace_bytes)
    shown = " / ".join(amount(size) for size in workspaces) if None not in workspaces else ""
    return (what, heads, kernel, chosen, *(f"{rate / 1e12:.3g} TFLOP/s" for rate in rates), shown)
