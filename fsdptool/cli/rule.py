"""``fsdptool rule``: what a finding's code means."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from fsdptool.cli.output import Format, print_document
from fsdptool.errors import ConfigError


def command(
    code: Annotated[
        str | None, typer.Argument(help="A code such as FSD301; without one, all are listed.")
    ] = None,
    format: Annotated[Format, typer.Option("--format", help="How the answer is printed.")] = Format.TEXT,
) -> int:
    """Explain a finding's code: what was found, why it matters, what to do, and whether a fix is safe."""
    from fsdptool.config.rules import RULES
    from fsdptool.config.spelling import nearest
    from fsdptool.records.document import envelope
    from fsdptool.report.rules import render_list, render_rule, rule_data

    if code is None:
        if format is Format.JSON:
            print_document(envelope("rules", {}, {"rules": [rule_data(rule) for rule in RULES.values()]}))
        else:
            sys.stdout.write(render_list(RULES.values()))
        return 0
    wanted = code.strip().upper()
    if wanted not in RULES:
        near = nearest(wanted, RULES, cutoff=0.6)
        raise ConfigError(
            f"there is no rule {code!r}", help=f"did you mean {near}?" if near else "see `fsdptool rule`"
        )
    if format is Format.JSON:
        print_document(envelope("rules", {"code": wanted}, {"rules": [rule_data(RULES[wanted])]}))
    else:
        sys.stdout.write(render_rule(RULES[wanted]))
    return 0
