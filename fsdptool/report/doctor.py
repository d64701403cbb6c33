"""Prints what ``doctor`` found for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fsdptool.formatting import amount
from fsdptool.report.tables import print_finding, print_line, print_table


def print_doctor(document: Mapping[str, Any]) -> None:
    """Print the document of ``fsdptool doctor``."""
    versions = document["versions"]
    print_table(
        ("what", "version"), [(name, version or "not installed") for name, version in versions.items()]
    )
    machine = document["machine"]
    print_line(
        f"machine: {machine['cores']} cores, {amount(machine['memory_bytes'])} memory"
        f" ({amount(machine['memory_available_bytes'])} available), {machine['platform']}"
    )
    if document["devices"]:
        print_table(
            ("gpu", "name", "memory", "free", "capability", "run"),
            [
                (
                    g["id"],
                    g["name"],
                    amount(g["memory_bytes"]),
                    amount(g["memory_free_bytes"]),
                    g["capability"],
                    g["run"] or "",
                )
                for g in document["devices"]
            ],
        )
    else:
        print_line("GPUs: none here; runs use the CPU")
    origins: dict[str, list[str]] = {}
    for plugin in document["plugins"]:
        origins.setdefault(plugin["origin"], []).append(plugin["family"])
    for origin, families in sorted(origins.items()):
        print_line(f"plugin {origin}: {len(families)} families")
    cache = document["cache"]
    state = "writable" if cache["writable"] else "read-only"
    print_line(f"cache: {cache['folder']} ({state}), {cache['entries']} entries, {amount(cache['bytes'])}")
    for probe in document["probes"]:
        if probe["ok"]:
            text = f"yes, weights equal a plain loop's to {probe['difference']:.1e}"
        else:
            text = f"NO: {probe['reason']}"
        print_line(f"FSDP2 shards over two {probe['device']} processes ({probe['backend']}): {text}")
    for finding in document["diagnostics"]:
        print_finding(finding["severity"], finding["code"], finding["message"], finding["help"])
