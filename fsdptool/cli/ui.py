"""``fsdptool ui``: the local web interface."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from fsdptool.cli.options import say
from fsdptool.errors import ConfigError, ExitCode

TOKEN_VARIABLE = "FSDPTOOL_UI_TOKEN"

_LIBRARIES = ("starlette", "uvicorn", "jinja2", "python_multipart")


def command(
    roots: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders that the pages may read and write. Default: the working directory.",
            metavar="[FOLDER]...",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8400,
    host: Annotated[str, typer.Option(help="Address of this machine to listen on.")] = "127.0.0.1",
    token: Annotated[
        str | None,
        typer.Option(
            envvar=TOKEN_VARIABLE,
            help="Token that opens the pages; required to listen on an address that others can reach.",
        ),
    ] = None,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser.")] = True,
) -> int:
    """Serve the web interface on this machine: models, hardware, plans, runs and configurations.

    Nothing is fetched from elsewhere. Other machines cannot connect unless --host permits it. Ctrl-C ends it.
    """
    missing = [name.replace("_", "-") for name in _LIBRARIES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"the web interface needs {', '.join(missing)}",
            help="pip install 'fsdptool[ui]' (in the clone: pip install '.[ui]')",
        )
    # Runs and other processes that the server starts have no use for it.
    os.environ.pop(TOKEN_VARIABLE, None)
    from fsdptool.web.roots import Roots
    from fsdptool.web.server import Address, Interface

    interface = Interface(
        Roots(roots or [Path()]),
        Address(host, port, token),
        announce=lambda address: say(f"open {address}"),
    )
    interface.run(browser=browser)
    say("stopped")
    return int(ExitCode.CLEAN)
