"""``fsdptool detect``: wrap classes, totals and hazards of a model, from its configuration alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from fsdptool.api.options import DetectionOptions
from fsdptool.cli.options import (
    RowFormat,
    RowFormatOption,
    check_output,
    override_values,
    print_document,
    takes,
    write_answer,
)
from fsdptool.errors import ConfigError, ExitCode


@takes(DetectionOptions)
def command(
    reference: Annotated[
        str,
        typer.Argument(help="family:flavour, Hugging Face id, folder, config.json or package.module:Class."),
    ],
    leaves: Annotated[bool, typer.Option("--leaves", help="List leaf layers instead of blocks.")] = False,
    tree: Annotated[bool, typer.Option("--tree", help="Show the module tree.")] = False,
    where: Annotated[bool, typer.Option("--where", help="Show where the classes are defined.")] = False,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="Do not read or write the cache.")] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write detection.json or detection.html.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="Also exit with 1 on warnings.")] = False,
    format: RowFormatOption = RowFormat.TEXT,
    **given: Any,
) -> int:
    """Show a model's wrap classes with reasons, exact totals and hazards, without loading its weights."""
    options = cast("DetectionOptions", given)
    layout = options["layout"]
    if layout not in ("native", "accelerate"):
        raise ConfigError(f"--layout {layout!r} is not supported", help="choose native or accelerate")
    if options["refresh"] and no_cache:
        raise ConfigError("--refresh and --no-cache cannot be combined", help="use only one of them")
    check_output(output, force, {"a detection": (".json", ".html")})
    from fsdptool.families.registry import load_registry
    from fsdptool.inspection import examine
    from fsdptool.inspection.document import View, describe
    from fsdptool.modeling.units import detected
    from fsdptool.source import resolve

    spec = resolve(
        reference,
        revision=options["revision"],
        component=options["component"],
        trust_remote_code=options["trust_remote_code"],
        overrides=override_values(given["overrides"] or ()),
        catalogue=True,
    )
    inspection = examine(
        spec,
        wrap=_names(options["wrap"]),
        exclude=_names(options["exclude"]),
        use_cache=not no_cache,
        refresh=options["refresh"],
    )
    inspection, published = detected(inspection, use_cache=not no_cache)
    views: tuple[tuple[View, bool], ...] = (("leaves", leaves), ("tree", tree), ("where", where))
    answer = describe(
        inspection,
        world_size=options["world_size"],
        layout="accelerate" if layout == "accelerate" else "native",
        views=[name for name, requested in views if requested],
        tensor_parallel=options["tp"],
        sequence_parallel=options["sequence_parallel"],
        expert_parallel=options["ep"],
        published=published,
        diagnostics=load_registry().diagnostics,
    )
    if format is RowFormat.JSON:
        print_document(answer.document())
    elif format is RowFormat.TEXT:
        from fsdptool.report.console.detection import print_detect

        print_detect(answer)
    else:
        from fsdptool.report.console.detection import print_class_rows

        print_class_rows(answer.body, "tsv" if format is RowFormat.TSV else "csv")
    if output is not None:
        from fsdptool.report.page.detection import detection_page

        write_answer(output, answer, detection_page, force=force)
    failing = {"error", "warning"} if strict else {"error"}
    bad = any(finding.severity in failing for finding in answer.envelope.diagnostics)
    return int(ExitCode.FINDINGS if bad else ExitCode.CLEAN)


def _names(values: Sequence[str]) -> tuple[str, ...]:
    return tuple(name.strip() for value in values for name in value.split(",") if name.strip())
