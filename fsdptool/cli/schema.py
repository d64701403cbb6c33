"""``fsdptool schema``: the JSON Schemas, for editors and generic checkers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer


def command(
    name: Annotated[
        str | None, typer.Argument(help="Name of a schema; without a name, all schemas are listed.")
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option("--write", help="Generate every schema from the records and write them to this folder."),
    ] = None,
) -> int:
    """Print a JSON Schema (2020-12) for editors and validators, or list the schemas."""
    from fsdptool.files.values import load_schema, schema_names

    if write is not None:
        write_schemas(write)
    elif name is None:
        sys.stdout.write("".join(f"{item}\n" for item in schema_names()))
    else:
        sys.stdout.write(_text(load_schema(name.removesuffix(".schema.json"))))
    return 0


def write_schemas(folder: Path) -> None:
    """Generate every schema and write it to a folder.

    Raises:
        StorageError: A file cannot be written.
    """
    from fsdptool.cli.options import write_file
    from fsdptool.config.dialects.accelerate.schema import NAME, accelerate_schema
    from fsdptool.records.schema import FORMATS, generate

    schemas = {NAME: accelerate_schema(), **{name: generate(name) for name in FORMATS}}
    for name, schema in schemas.items():
        write_file(folder / f"{name}.schema.json", _text(schema), force=True)


def _text(schema: dict[str, object]) -> str:
    import json

    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"
