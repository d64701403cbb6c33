"""The state of a machine on the console."""

from __future__ import annotations

from fsdptool.formatting import amount
from fsdptool.records.command_documents import Health
from fsdptool.records.diagnostic import Answer
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
