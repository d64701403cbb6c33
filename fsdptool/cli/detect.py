"""``fsdptool detect``: wrap classes, totals and hazards of a model, from its configuration alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from fsdptool.cli.output import Format, print_document
from fsdptool.cli.values import override_values
from fsdptool.errors import ConfigError, ExitCode


def command(
    reference: Annotated[
        str, typer.Argument(help="family:flavour, Hugging Face id, folder, config.json or pipeline folder.")
    ],
    wrap: Annotated[list[str] | None, typer.Option("--wrap", help="Wrap these classes instead: A,B.")] = None,
    exclude: Annotated[list[str] | None, typer.Option("--exclude", help="Never wrap these classes.")] = None,
    world_size: Annotated[
        int | None, typer.Option("--world-size", min=1, help="Show what this many ranks shard unevenly.")
    ] = None,
    layout: Annotated[str, typer.Option("--layout", help="Whose units: native or accelerate.")] = "native",
    leaves: Annotated[bool, typer.Option("--leaves", help="List leaf layers instead of blocks.")] = False,
    tree: Annotated[bool, typer.Option("--tree", help="Draw the module tree.")] = False,
    where: Annotated[bool, typer.Option("--where", help="Say where the classes are defined.")] = False,
    revision: Annotated[str | None, typer.Option("--revision", help="Revision of a Hugging Face id.")] = None,
    component: Annotated[
        str | None, typer.Option("--component", help="Pipeline component instead of the denoiser.")
    ] = None,
    override: Annotated[
        list[str] | None, typer.Option("--override", help="Replace a configuration value: KEY=JSON.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run code that comes with the reference.")
    ] = False,
    refresh: Annotated[bool, typer.Option("--refresh", help="Derive afresh and renew the cache.")] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Neither read nor write the cache.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 on warnings, too.")] = False,
    format: Annotated[Format, typer.Option("--format", help="How the answer is printed.")] = Format.TEXT,
) -> int:
    """Show a model's wrap classes with reasons, exact totals and hazards, without its weights."""
    if layout not in ("native", "accelerate"):
        raise ConfigError(
            f"--layout {layout!r} is neither native nor accelerate", help="choose one of the two"
        )
    if refresh and no_cache:
        raise ConfigError(
            "--refresh renews the cache and --no-cache leaves it alone", help="give one of them"
        )
    from fsdptool.families.registry import load_registry
    from fsdptool.inspection import examine
    from fsdptool.inspection.document import View, detect_document
    from fsdptool.source import resolve

    spec = resolve(
        reference,
        revision=revision,
        component=component,
        trust_remote_code=trust_remote_code,
        overrides=override_values(override or ()),
    )
    found = examine(spec, wrap=_names(wrap), exclude=_names(exclude), use_cache=not no_cache, refresh=refresh)
    asked: tuple[tuple[View, bool], ...] = (("leaves", leaves), ("tree", tree), ("where", where))
    document = detect_document(
        found,
        world_size=world_size,
        layout="accelerate" if layout == "accelerate" else "native",
        views=[name for name, wanted in asked if wanted],
        diagnostics=load_registry().diagnostics,
    )
    if format is Format.JSON:
        print_document(document)
    else:
        from fsdptool.report.detect import print_detect

        print_detect(document)
    failing = {"error", "warning"} if strict else {"error"}
    bad = any(finding["severity"] in failing for finding in document["diagnostics"])
    return int(ExitCode.FINDINGS if bad else ExitCode.CLEAN)


def _names(values: Sequence[str] | None) -> tuple[str, ...]:
    return tuple(name.strip() for value in values or () for name in value.split(",") if name.strip())
