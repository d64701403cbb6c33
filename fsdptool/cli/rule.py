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


def all_rules(beginning: str | None = None) -> dict[str, Rule]:
    """Return the rules by code.

    Args:
        beginning: ``FSD`` loads the rules on configuration files and scripts, another one those on models and
            failures; None: all.
    """
    found: list[Rule] = []
    if beginning != "FSD":
        from fsdptool import rules

        found += [*rules.RULES, *rules.failure_rules()]
    if beginning in ("FSD", None):
        from fsdptool.config.rules import file_rules

        found = [*file_rules().values(), *found]
    return {rule.code: rule for rule in found}


def command(
    code: Annotated[
        str | None,
        typer.Argument(
            help="A code such as FSD301, or a beginning (FSD3); without one, all codes are listed."
        ),
    ] = None,
    write: Annotated[
        Path | None, typer.Option("--write", help="Write the page of all rules to this file: docs/rules.md.")
    ] = None,
    format: FormatOption = Format.TEXT,
) -> int:
    """Explain the code of a finding: what it means, why it matters, what to do, and whether a fix is safe."""
    from fsdptool.records.diagnostic import envelope
    from fsdptool.report.console.tables import print_lines, terminal_width
    from fsdptool.report.rules import render_list, render_rule, rules_page
    from fsdptool.spelling import nearest

    wanted = code.strip().upper() if code is not None else ""
    beginning = wanted.rstrip("0123456789")
    table = all_rules(beginning if code is not None and write is None else None)
    if code is not None and wanted not in table:
        table = all_rules()
    # As for --select: the beginning of codes stands for all of them.
    listed = {name: rule for name, rule in table.items() if name.startswith(wanted)}
    if write is not None:
        write_file(write, rules_page(table.values()), force=True)
        return 0
    if wanted not in table and listed:
        if format is Format.JSON:
            inputs = {"code": wanted} if wanted else {}
            print_document(envelope("rules", inputs, _documents(listed.values())))
        else:
            print_lines(render_list(listed.values()))
        return 0
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
