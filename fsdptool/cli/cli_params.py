"""Which options stand on the command line: what a command would not listen to, it refuses."""

from __future__ import annotations

from collections.abc import Iterable

import typer

from fsdptool.errors import ConfigError


def given(context: typer.Context) -> dict[str, str]:
    """Return the parameters that were typed: name to the way people write it (``--output``)."""
    typed = {}
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name is not None and source is not None and source.name == "COMMANDLINE":
            typed[parameter.name] = max(parameter.opts, key=len)
    return typed


def refuse(context: typer.Context, names: Iterable[str], why: str, help: str) -> None:
    """Refuse options that would not count here.

    Raises:
        ConfigError: One of ``names`` was typed; the message names those and says ``why``.
    """
    typed = given(context)
    idle = [typed[name] for name in names if name in typed]
    if idle:
        raise ConfigError(f"{', '.join(idle)}: {why}", help=help)
