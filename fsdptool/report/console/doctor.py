"""The state of a machine, and what ``fsdptool doctor --gpu`` measured, on the console."""

from __future__ import annotations

from fsdptool.formatting import amount
from fsdptool.records.command_documents import Health
from fsdptool.records.diagnostic import Answer
from fsdptool.records.measurements import MeasuredAttention, Measurements, RankMeasurements
from fsdptool.report.console.tables import print_findings, print_line, print_table


def print_doctor(answer: Answer[Health]) -> None:
    """Print the answer of ``fsdptool doctor``."""
    health = answer.body
    versions = health.versions
    print_table(
        ("what", "version"), [(name, version or "not installed") for name, version in versions.items()]
    )
    machine = health.machine
    print_line(
        f"machine: {machine.cores} cores, {amount(machine.memory_bytes)} memory"
        f" ({amount(machine.memory_available_bytes)} available), {machine.platform}"
    )
    if health.devices:
        print_table(
            ("gpu", "name", "memory", "free", "capability", "run"),
            [
                (g.id, g.name, amount(g.memory_bytes), amount(g.memory_free_bytes), g.capability, g.run or "")
                for g in health.devices
            ],
            optional=(4, 3),
        )
    else:
        print_line("GPUs: none; runs use the CPU")
    origins: dict[str, list[str]] = {}
    for plugin in health.plugins:
        origins.setdefault(plugin.origin, []).append(plugin.family)
    for origin, families in sorted(origins.items()):
        print_line(f"plugin {origin}: {len(families)} famil{'ies' if len(families) != 1 else 'y'}")
    cache = health.cache
    state = "writable" if cache.writable else "read-only"
    print_line(f"cache: {cache.folder} ({state}), {cache.entries} entries, {amount(cache.bytes)}")
    for probe in health.probes:
        if probe.ok:
            text = f"yes, the weights equal those of a plain loop within {probe.difference:.1e}"
        else:
            text = f"NO: {probe.reason}"
        ranks = f"{probe.processes} {probe.device} process{'es' if probe.processes > 1 else ''}"
        print_line(f"FSDP2 shards on {ranks} ({probe.backend}): {text}")
    print_findings(answer.envelope.diagnostics)


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
