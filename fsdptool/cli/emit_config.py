"""``fsdptool emit-config``: the accelerate YAML for a plan, a model or a preset."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fsdptool.api.options import EmissionOptions
from fsdptool.cli.options import (
    Format,
    FormatOption,
    answer_line,
    check_free,
    given_file,
    lost_lines,
    print_document,
    say,
    takes,
    write_file,
)
from fsdptool.errors import ConfigError, ExitCode

if TYPE_CHECKING:
    from fsdptool.api.emit_config import Emission
    from fsdptool.records.recipe import Recipe


@takes(EmissionOptions, argument="reference")
def command(
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to write; default: standard output.", callback=given_file),
    ] = None,
    recipe_output: Annotated[
        Path | None, typer.Option("--recipe-output", help="Also write the plan's recipe.")
    ] = None,
    into: Annotated[
        Path | None, typer.Option("--into", help="Merge into this file; a diff is shown first.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing file; merge without asking.")
    ] = False,
    list_presets: Annotated[bool, typer.Option("--list-presets", help="List the presets and exit.")] = False,
    format: FormatOption = Format.TEXT,
    **options: Any,
) -> int:
    """Write the accelerate YAML for a plan or a model, or a plan's run for another program."""
    from fsdptool.api.emit_config import prepare_emission

    if list_presets:
        return _list_presets(format)
    if into is not None and options.get("to") is not None:
        raise ConfigError("--into and --to cannot be combined", help="write a new file with -o")
    if into is not None and output is not None:
        raise ConfigError("--into and --output cannot be combined", help="use only one of them")
    emission = prepare_emission(cast("EmissionOptions", options))
    if recipe_output is not None and emission.recipe is None:
        raise ConfigError(
            "--recipe-output requires --plan", help="a plan contains the recipe that it was made for"
        )
    for path in (output, recipe_output):
        if path is not None:
            check_free(path, force=force)
    if into is not None:
        if not _merge(emission, into, force, format):
            return int(ExitCode.FINDINGS)
    else:
        _write(emission, output, force, format)
    if recipe_output is not None and emission.recipe is not None:
        _write_recipe(emission.recipe, recipe_output, force)
        say(f"wrote {recipe_output}")
        if emission.recipe.data.source == "synthetic":
            say(f"note: {recipe_output} trains on generated samples until you name your own under data:")
    return 0


def _write(emission: Emission, output: Path | None, force: bool, format: Format) -> None:
    from fsdptool.config.dialects.accelerate.schema import NAME
    from fsdptool.config.writer import schema_comment

    text = emission.text()
    made = emission.translation
    for line in lost_lines(made.losses) if made is not None else ():
        say(f"lost: {line}")
    if output is not None and made is None:
        text = schema_comment(NAME, output.parent) + text
    if output is not None:
        write_file(output, text, force=force)
        say(f"wrote {output}")
    if format is Format.JSON:
        print_document(emission.document(text, output))
    elif output is None:
        sys.stdout.write(text)


def _write_recipe(recipe: Recipe, path: Path, force: bool) -> None:
    from fsdptool.config.recipe import dump_recipe
    from fsdptool.config.writer import schema_comment
    from fsdptool.source import rebased

    keys = "fsdptool schema recipe, and docs/how-to/write-a-recipe.md"
    header = f"Written by fsdptool emit-config. Every key: {keys}"
    text = dump_recipe(rebased(recipe, path.parent), header=header)
    write_file(path, schema_comment("recipe", path.parent) + text, force=force)


def _list_presets(format: Format) -> int:
    from fsdptool.api.emit_config import PRESETS

    if format is Format.JSON:
        from fsdptool.records.config_documents import PresetList
        from fsdptool.records.diagnostic import envelope

        print_document(envelope("presets", {}, PresetList(tuple(PRESETS.values()))))
        return 0
    for preset in PRESETS.values():
        answer_line(f"{preset.name:<28}{preset.purpose}")
    return 0


def _merge(emission: Emission, into: Path, force: bool, format: Format) -> bool:
    """Merge into a file after showing the difference; return False if the user declined."""
    from fsdptool.config.writer import merge_into
    from fsdptool.files.text import replace_file
    from fsdptool.report.console.tables import unified

    merged = merge_into(into, emission.settings)
    difference = unified(merged.before, merged.after)
    if format is Format.JSON:
        print_document(emission.document(merged.after, into))
    else:
        sys.stdout.write(difference or f"{into} already contains all of these settings\n")
    if not difference:
        return True
    if not force and not (sys.stdin.isatty() and typer.confirm(f"Write {into}?", err=True)):
        say("nothing was written; use --force to write it")
        return False
    replace_file(into, merged.before.encode(merged.after), before=merged.before.encode())
    say(f"wrote {into}")
    return True
