"""``fsdptool rule``: what a finding's code means."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fsdptool.cli.options import Format, FormatOption, print_document, write_file
from fsdptool.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from fsdptool.records.config_documents import RuleList
    from fsdptool.records.diagnostic import Rule


def all_rules() -> dict[str, Rule]:
    """Return the rules of every room by code: each room keeps the table of the codes it emits."""
    from fsdptool import cache
    from fsdptool.config.rules import RULES
    from fsdptool.families import registry as families
    from fsdptool.inspection import hazards as inspection
    from fsdptool.launch import doctor as launch
    from fsdptool.planning import advice as planning
    from fsdptool.runs.diagnose import signatures
    from fsdptool.source import config_checks as source
    from fsdptool.source import weight_files

    rooms = (
        families.RULES,
        source.RULES,
        weight_files.RULES,
        inspection.RULES,
        planning.RULES,
        launch.RULES,
        cache.RULES,
    )
    failures = {signature.code: signature.rule for signature in signatures()}
    return RULES | {rule.code: rule for table in rooms for rule in table} | failures


def command(
    code: Annotated[
        str | None, typer.Argument(help="A code such as FSD301; without a code, all codes are listed.")
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--write", help="Write the page of all rules to this file: docs/rules.md.")
    ] = None,
    format: FormatOption = Format.TEXT,
) -> int:
    """Explain the code of a finding: what it means, why it matters, what to do, and whether a fix is safe."""
    from fsdptool.records.diagnostic import envelope
    from fsdptool.report.findings import render_list, render_rule, rules_page
    from fsdptool.report.tables import print_lines, terminal_width
    from fsdptool.spelling import nearest

    table = all_rules()
    if write is not None:
        write_file(write, rules_page(table.values()), force=True)
        return 0
    if code is None:
        if format is Format.JSON:
            print_document(envelope("rules", {}, _documents(table.values())))
        else:
            print_lines(render_list(table.values()))
        return 0
    wanted = code.strip().upper()
    if wanted not in table:
        near = nearest(wanted, table, cutoff=0.6)
        raise ConfigError(
            f"unknown code {code!r}", help=f"did you mean {near}?" if near else "see `fsdptool rule`"
        )
    if format is Format.JSON:
        print_document(envelope("rules", {"code": wanted}, _documents([table[wanted]])))
    else:
        sys.stdout.write(render_rule(table[wanted], width=terminal_width(sys.stdout)))
    return 0


def _documents(rules: Iterable[Rule]) -> RuleList:
    from fsdptool.records.config_documents import RuleList, RuleText

    names = RuleText.__dataclass_fields__
    return RuleList(tuple(RuleText(**{name: getattr(rule, name) for name in names}) for rule in rules))
