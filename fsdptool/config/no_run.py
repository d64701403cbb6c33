"""Why a script of commands starts no run that is known: the Python file that it starts says it."""

from __future__ import annotations

import re
from pathlib import Path

from fsdptool.config.command_lines import NamedFiles, default_files
from fsdptool.config.shell import find_commands, sniff
from fsdptool.config.shell_variables import substituted
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText, UnreadableError, read_source
from fsdptool.scripts import SCRIPTS

_MODULE = re.compile(r"\w+(?:\.\w+)*")


def why_no_run(path: Path) -> str | None:
    """Return why a shell script, or a file of one command, describes no run.

    A Python file that cannot be followed says most; without one, a file that cannot be read does. Of several
    the last command's counts, since those before it prepare what it needs. Modules of installed libraries
    (``python -m venv``) train nothing of this project, so they are passed over.

    Args:
        path: A file that describes no run.

    Returns:
        The reason in one line. None where the file cannot be read, contains no commands (YAML, JSON), or
        starts no Python file.
    """
    from fsdptool.config.script_runs import describe_script

    try:
        source = read_source(path)
    except UnreadableError:
        return None
    files = default_files(source.path)
    text = substituted(source.text, files)
    if sniff(text) != "flags":
        return None
    inside = files.with_written(source.text, text).within_project()
    missing = None
    for command in reversed(find_commands(text)):
        if command.script is None:
            continue
        named = str(command.script.value)
        if "$" in named or "`" in named:
            missing = missing or f"it starts {named}, whose name holds a variable that is not known here"
            continue
        module = _MODULE.fullmatch(named) is not None and not named.endswith(SCRIPTS)
        name = _file_of(named, inside) if module else named
        if name is None:
            continue
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


def _file_of(module: str, files: NamedFiles) -> str | None:
    """Return the file of a module (``python -m package.module``); None where its package is not here."""
    plain = module.replace(".", "/")
    package = module.partition(".")[0]

    def is_here(name: str) -> bool:
        places = (folder / name for folder in files.folders)
        return any(files.allowed(place) and place.exists() for place in places)

    names = (f"{plain}.py", f"{plain}/__main__.py")
    found = next((name for name in names if is_here(name)), None)
    return names[0] if found is None and package != module and is_here(package) else found
