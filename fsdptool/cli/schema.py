"""``fsdptool schema``: the JSON Schemas, for editors and generic checkers."""

from __future__ import annotations

import sys
from typing import Annotated

import typer


def command(
    name: Annotated[
        str | None, typer.Argument(help="Name of a schema; without a name, all schemas are listed.")
    ] = None,
) -> int:
    """Print a JSON Schema (2020-12) for editors and validators, or list the schemas."""
    import json

    from fsdptool.files.schemas import load_schema, schema_names

    if name is None:
        sys.stdout.write("".join(f"{item}\n" for item in schema_names()))
    else:
        sys.stdout.write(
            json.dumps(load_schema(name.removesuffix(".schema.json")), indent=2, ensure_ascii=False) + "\n"
        )
    return 0
