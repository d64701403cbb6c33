"""Model families on the console."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

from fsdptool.records.diagnostic import Answer
from fsdptool.records.family_documents import FamilyList, FamilySummary, FlavourDetail
from fsdptool.report.console.tables import print_findings, print_line, print_records, print_rows, print_table


def print_family_rows(families: FamilyList, separator: Literal["tsv", "csv"]) -> None:
    """Print families, or the flavours of one, as rows for programs."""
    if families.flavours is None:
        print_records(families.families, separator)
        return
    names = ("name", "class", "component", "parameters", "hub_id", "objective")
    rows = [
        (item.name, item.class_, item.component, item.parameters, item.hub_id, item.objective)
        for item in families.flavours
    ]
    print_rows(names, rows, separator=separator)


def print_families(answer: Answer[FamilyList]) -> None:
    """Print the list of families, or one family with its flavours."""
    found = answer.body
    if found.flavours is None:
        print_table(
            ("family", "title", "library", "objective", "flavours", "from"),
            [
                (
                    item.name,
                    item.title,
                    item.library,
                    item.objective,
                    ", ".join(item.flavours) or "(any configuration)",
                    item.distribution,
                )
                for item in found.families
            ],
            optional=(5, 2, 3, 1),
        )
    else:
        _one(found.families[0], found.flavours)
    print_findings(answer.envelope.diagnostics)


def _one(family: FamilySummary, flavours: Sequence[FlavourDetail]) -> None:
    print_line(f"{family.name}: {family.title} ({family.library})", style="bold")
    print_line(f"default objective {family.objective}; from {family.distribution} {family.version}")
    if not flavours:
        print_line("no flavours: configurations are matched to this family by their class")
        return
    print_table(
        ("reference", "class", "parameters", "hub id"),
        [
            (
                item.name,
                item.class_ + (f" ({item.component})" if item.component else ""),
                f"{item.parameters:,}" if item.parameters is not None else "unknown",
                item.hub_id or "",
            )
            for item in flavours
        ],
        numeric=(2,),
        optional=(1, 3),
    )
    first = flavours[0]
    if first.lora_targets:
        print_line(f"LoRA adapts {', '.join(first.lora_targets)} by default")
    if first.wrap_hint:
        print_line(f"wraps {', '.join(first.wrap_hint.classes)}: {first.wrap_hint.reason}")
    if len(flavours) == 1:
        print_line(f"config: {json.dumps(first.config, ensure_ascii=False)}")
        for key, value in first.facts.items():
            print_line(f"{key}: {value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}")
