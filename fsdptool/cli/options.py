"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fsdptool.errors import ConfigError


class Format(StrEnum):
    """Output format of a command."""

    TEXT = "text"
    JSON = "json"


FormatOption = Annotated[Format, typer.Option("--format", help="Output format.")]
RevisionOption = Annotated[str | None, typer.Option(help="Revision of a Hugging Face id.")]
OverrideOption = Annotated[
    list[str] | None, typer.Option("--override", help="Replace a configuration value: KEY=JSON (repeatable).")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Allow code that comes with the model to run.")
]
DialectOption = Annotated[str | None, typer.Option(help="Dialect of the input, instead of detecting it.")]
TargetOption = Annotated[
    str | None, typer.Option(help="Version of the consuming program to check against: accelerate==1.15.")
]
RecipeArgument = Annotated[Path, typer.Argument(help="The recipe (YAML).", metavar="RECIPE")]
ConfigOption = Annotated[Path, typer.Option("--config", help="accelerate YAML, or another dialect.")]


def command_line_options(context: typer.Context) -> dict[str, str]:
    """Return the parameters that were given on the command line, by longest flag (``--output``)."""
    flags = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name is not None and source is not None and source.name == "COMMANDLINE":
            flags[parameter.name] = max(parameter.opts, key=len)
    return flags


def refuse(context: typer.Context, names: Iterable[str], reason: str, help: str) -> None:
    """Refuse options that would have no effect here.

    Raises:
        ConfigError: One of ``names`` was given; the message lists those and the ``reason``.
    """
    flags = command_line_options(context)
    refused = [flags[name] for name in names if name in flags]
    if refused:
        raise ConfigError(f"{', '.join(refused)}: {reason}", help=help)


def override_values(items: Sequence[str]) -> dict[str, Any]:
    """Return ``KEY=VALUE`` texts as a mapping; dots in a key address nested keys.

    A value is read as JSON, then as YAML (``True``, ``[a, b]``), and is text if it is neither.

    Raises:
        ConfigError: An item is not KEY=VALUE.
    """
    result: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"--override {item!r} is not KEY=VALUE", help="for example num_hidden_layers=4")
        target = result
        *parents, last = key.strip().split(".")
        for parent in parents:
            inner = target.setdefault(parent, {})
            target[parent] = inner if isinstance(inner, dict) else {}
            target = target[parent]
        target[last] = _value(text)
    return result


def _value(text: str) -> Any:
    import yaml

    try:
        return json.loads(text)
    except ValueError:
        pass
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError):
        return text
