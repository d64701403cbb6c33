"""Prints the families document for people."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fsdptool.report.tables import print_finding, print_line, print_table


def print_families(document: Mapping[str, Any]) -> None:
    """Print the list of families, or one family with its flavours."""
    if document["flavours"] is None:
        print_table(
            ("family", "title", "library", "objective", "flavours", "from"),
            [
                (
                    item["name"],
                    item["title"],
                    item["library"],
                    item["objective"],
                    ", ".join(item["flavours"]) or "(any configuration)",
                    item["distribution"],
                )
                for item in document["families"]
            ],
        )
    else:
        _one(document)
    for finding in document["diagnostics"]:
        print_finding(finding["severity"], finding["code"], finding["message"], finding["help"])


def _one(document: Mapping[str, Any]) -> None:
    family = document["families"][0]
    print_line(f"{family['name']}: {family['title']} ({family['library']})", style="bold")
    print_line(f"default objective {family['objective']}; from {family['distribution']} {family['version']}")
    if not document["flavours"]:
        print_line("no flavours: it serves configurations by class")
        return
    print_table(
        ("reference", "class", "parameters", "hub id"),
        [
            (
                item["name"],
                item["class"] + (f" ({item['component']})" if item["component"] else ""),
                f"{item['parameters']:,}" if item["parameters"] is not None else "unknown",
                item["hub_id"] or "",
            )
            for item in document["flavours"]
        ],
        numeric=(2,),
    )
    first = document["flavours"][0]
    if first["lora_targets"]:
        print_line(f"LoRA adapts {', '.join(first['lora_targets'])} by default")
    if first["wrap_hint"]:
        print_line(f"wraps {', '.join(first['wrap_hint']['classes'])}: {first['wrap_hint']['reason']}")
    if len(document["flavours"]) == 1:
        print_line(f"config: {json.dumps(first['config'], ensure_ascii=False)}")
        for key, value in first["facts"].items():
            print_line(f"{key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
