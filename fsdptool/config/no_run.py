"""Why a script of commands starts no run that is known: the Python file that it starts says it."""

from __future__ import annotations

import re
from pathlib import Path

from fsdptool.config.command_lines import default_files
from fsdptool.config.shell import find_commands
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText, UnreadableError, read_source
from fsdptool.scripts import SCRIPTS


def why_no_run(path: Path) -> str | None:
    """Return why a file of commands describes no run, in one line; None where it starts no Python file.

    Args:
        path: A file that describes no run.
    """
    from fsdptool.config.script_runs import describe_script

    try:
        source = read_source(path)
    except UnreadableError:
        return None
    inside = default_files(source.path).within_project()
    missing = None
    for command in find_commands(source.text):
        if command.script is None:
            continue
        name = str(command.script.value)
        if re.fullmatch(r"[\w.]+", name) and not name.endswith(SCRIPTS):  # python -m package.module
            name = f"{name.replace('.', '/')}.py"
        try:
            script = inside.read(name, SCRIPTS)
            if isinstance(script, SourceText):
                describe_script(script)
            else:
                missing = missing or f"it starts {name}, which {script}"
        except UnreadableError as error:
            return f"it starts {name}: {error.message}"
        except ConfigError as error:
            return str(error)
    return missing
