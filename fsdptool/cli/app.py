"""The ``fsdptool`` command: registers the subcommands and turns every outcome into an exit code.

A subcommand lives in its own module, parses, calls one room and hands the record to ``report``.
Modules named here must import in a few milliseconds: heavy libraries load inside the functions.
"""

from __future__ import annotations

import ast
import errno
import io
import itertools
import os
import sys
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import typer

from fsdptool.cli.completion import VARIABLE, attach_values, completed_command
from fsdptool.cli.options import complain
from fsdptool.errors import ExitCode, FsdptoolError, missing_extra, unusable_name
from fsdptool.garbage import collect_seldom

COMMANDS = {
    "detect": "Find a model's wrap classes, totals and hazards from its configuration.",
    "plan": "Predict the memory of every rank, and find the fastest settings that fit.",
    "emit-config": "Write the accelerate YAML for a plan or a model, or merge it into yours.",
    "validate": "Check how the consuming program will interpret a configuration.",
    "train": "Run the FSDP2 trainer with the result.",
}
"""The five main commands, in the order in which a new user runs them."""

_MODULES: dict[str, str] = {
    "detect": "detect",
    "plan": "plan",
    "emit-config": "emit_config",
    "validate": "validate",
    "train": "train",
    "init": "init",
    "families": "families",
    "explain": "explain",
    "check": "check",
    "audit": "audit",
    "migrate": "migrate",
    "rule": "rule",
    "schema": "schema",
    "runs": "runs",
    "watch": "runs:watch",
    "report": "runs:report",
    "diagnose": "diagnose",
    "compare": "compare",
    "calibrate": "calibrate",
    "share": "share",
    "precompute": "precompute",
    "export": "export",
    "launch": "launch",
    "doctor": "doctor",
    "ui": "ui",
}
"""Command name to module under ``fsdptool.cli``, in the order of ``--help``; its function is ``command``
unless another one follows a colon."""

_GROUPS: dict[str, str] = {
    "cache": "cache",
    "queue": "queue",
}
"""Command group name to module under ``fsdptool.cli`` with a Typer object ``group``."""


def build_app(only: str | None = None, *, listing: bool = False) -> typer.Typer:
    """Return the Typer application.

    Args:
        only: The one command or group to register; every command when it is None or no command's name.
        listing: Whether commands are only listed: without their options, and not to be run.
    """
    app = typer.Typer(
        name="fsdptool",
        help="Plan, write, check and run PyTorch FSDP2 configurations.",
        no_args_is_help=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback(invoke_without_command=True)
    def overview(
        context: typer.Context,
        version: bool = typer.Option(False, "--version", help="Print the version and exit."),
    ) -> None:
        if version:
            from fsdptool.records.diagnostic import tool_version

            sys.stdout.write(f"fsdptool {tool_version()}\n")
            raise typer.Exit
        if context.invoked_subcommand is None:
            sys.stdout.write(_overview_text())

    if only in _GROUPS:
        app.add_typer(import_module(f"fsdptool.cli.{_GROUPS[only]}").group, name=only)
        return app
    for name, module in ({only: _MODULES[only]} if only in _MODULES else _MODULES).items():
        file, _, function = module.partition(":")
        if listing:
            app.command(name)(_listed(file, function or "command"))
        else:
            # A command line of another program may stand for a file.
            settings = {"allow_extra_args": True} if name in ("plan", "explain") else None
            found = getattr(import_module(f"fsdptool.cli.{file}"), function or "command")
            app.command(name, context_settings=settings)(found)
    for name, module in _GROUPS.items() if only not in _MODULES else ():
        app.add_typer(import_module(f"fsdptool.cli.{module}").group, name=name)
    return app


def _listed(file: str, function: str) -> Callable[[], None]:
    """Return what stands for a command in a list: its documentation, read without importing its module.

    Importing all of them loads every record of a plan, which costs as much as the libraries.
    """

    def listed() -> None:
        """Do nothing."""

    tree = ast.parse(Path(__file__).with_name(f"{file}.py").read_text(encoding="utf-8"))
    (found,) = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    listed.__doc__ = ast.get_docstring(found)
    return listed


def _overview_text() -> str:
    """Return the output of ``fsdptool`` without arguments: the main commands and where to start."""
    verbs = "\n".join(f"  {name:<12} {text}" for name, text in COMMANDS.items())
    return (
        f"The main commands, in the order in which you use them:\n\n{verbs}\n\n"
        "Start with a model that you know:\n"
        "  fsdptool families                         the models that ship\n"
        "  fsdptool detect llama3:8b\n"
        "  fsdptool plan llama3:8b --gpu H100-80GB-SXM --gpus 8 --seq-len 4096 -o plan.json\n"
        "  fsdptool emit-config --plan plan.json -o fsdp.yaml\n\n"
        "Or start from your model and your data:\n"
        "  fsdptool init Qwen/Qwen3-8B --data train.jsonl --method lora --gpu RTX-4090-24GB --gpus 2\n\n"
        "fsdptool --help lists every command; fsdptool COMMAND --help explains a command.\n"
    )


def main() -> None:
    """Run the command line and exit with a documented status (docs/reference/exit-codes.md)."""
    _open_closed_streams()
    collect_seldom()
    # Processes that this one starts do not import what lies in the working directory.
    os.environ["PYTHONSAFEPATH"] = "1"
    for stream in (sys.stdout, sys.stderr):
        # Do not fail on a character (of a chart, of a file name) that the terminal's encoding lacks.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))


def _open_closed_streams() -> None:
    """Open replacements for standard streams that the caller closed (``>&-``, some daemons).

    Python has None for them. The lowest free descriptor is the missing one, so no other file can take its
    number and receive what a library or a worker prints.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDONLY if name == "stdin" else os.O_WRONLY)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, "r" if name == "stdin" else "w", closefd=False))


def _command(arguments: list[str]) -> Any:
    """Return what runs a command line, or completes one for the shell."""
    if VARIABLE not in os.environ:
        name = next((item for item in arguments if not item.startswith("-")), None)
        return build_app(name, listing=name is None)
    group = typer.main.get_command(build_app(completed_command()))
    attach_values(group)
    return group


_READ_FILES = ("plan", "emit-config", "compare", "report", "check", "audit")
"""Commands for which ``-`` is a file; others read standard input themselves, or start processes that read."""

_KEEP_PATHS = ("train", "launch", "queue", "precompute")
"""Commands that keep the path of a recipe, or give it to other processes: ``-`` would mean nothing there."""

_LONGEST_INPUT = 1 << 26
"""Bytes of standard input: no document that fsdptool writes comes near."""


def _take_standard_input(arguments: list[str]) -> None:
    """Read what ``-`` stands for, if a command names it as a file: files are read more than once.

    Raises:
        ConfigError: It is closed, holds more bytes than any file that a command reads, or the command needs
            the path of a file.
    """
    # Behind ``--`` stand the words of another program.
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    named = any(word == "-" and before not in ("-o", "--output") for before, word in itertools.pairwise(own))
    if not named or arguments[0] not in (*_READ_FILES, *_KEEP_PATHS):
        return
    from fsdptool.errors import ConfigError
    from fsdptool.files.text import take_standard_input

    if arguments[0] in _KEEP_PATHS:
        raise ConfigError(
            f"{arguments[0]} does not read standard input: it needs the file again later",
            help="write the file first, and give its path",
        )

    if sys.stdin is None:
        raise ConfigError("standard input is closed", help="give a file")
    data = sys.stdin.buffer.read(_LONGEST_INPUT + 1)
    if len(data) > _LONGEST_INPUT:
        raise ConfigError(f"standard input has more than {_LONGEST_INPUT:,} bytes", help="give a file")
    take_standard_input(data)


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit status. Never raises."""
    try:
        _take_standard_input(arguments)
        command = _command(arguments)
        outcome = command(args=arguments, prog_name="fsdptool", standalone_mode=False)
        sys.stdout.flush()
    except FsdptoolError as error:
        complain(error)
        return int(error.exit_code)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return int(ExitCode.INTERRUPTED)
    except SystemExit as error:
        # click (8.3, core.py:main) and rich (14, console.py:on_broken_pipe) end the process with status 1
        # where the reader of the output went away.
        if isinstance(error.__context__, BrokenPipeError):
            return int(ExitCode.CLEAN)
        return error.code if isinstance(error.code, int) else int(ExitCode.USAGE)
    except BrokenPipeError:
        # The reader (head, less) went away: not a failure.
        _drop_output()
        return int(ExitCode.CLEAN)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL and error.filename is None:
            _drop_output()
            complain(FsdptoolError(f"the answer cannot be written: {error.strerror}"))
            return int(ExitCode.USAGE)
        if (named := unusable_name(error) or missing_extra(error, _extra(arguments))) is not None:
            complain(named)
            return int(ExitCode.USAGE)
        return _other(error)
    finally:
        if "-" in arguments:
            from fsdptool.files.text import take_standard_input

            take_standard_input(None)
    return outcome if isinstance(outcome, int) else int(ExitCode.CLEAN)


def _extra(arguments: list[str]) -> str | None:
    return "train" if arguments and arguments[0] in _TRAINS else None


_TRAINS = ("train", "precompute", "export", "launch", "queue")
"""Commands that need what the extra ``train`` installs; others need less of it, or nothing."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _drop_output() -> None:
    """Redirect standard output, so that the interpreter's final flush cannot fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _usage_error(error: Any) -> FsdptoolError:
    """Return typer's usage error (four lines or more, typer 0.29) as one of our errors.

    The exceptions are recognised by their attributes: some versions raise click's, others their own.
    """
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "fsdptool"
    options = getattr(error, "possibilities", None)
    said = " ".join((error.message if options else error.format_message()).split())
    text, _, near = said.rstrip(".?").partition(". Did you mean ")
    text = f"{text[:1].lower()}{text[1:]}".replace("Value error, ", "").replace("Input should", "should")
    near = ", ".join(sorted(options)) if options else near.strip("'")
    guess = f"did you mean {near}? " if near else ""
    return FsdptoolError(f"{command}: {text}", help=f"{guess}see `{command} --help`")


def _other(error: Exception) -> int:
    """Report a usage error as such, and anything else as an internal error."""
    if callable(getattr(error, "format_message", None)):
        complain(_usage_error(error))
        return int(ExitCode.USAGE)
    if type(error).__name__ == "Abort":
        sys.stderr.write("interrupted\n")
        return int(ExitCode.INTERRUPTED)
    if os.environ.get("FSDPTOOL_TRACEBACK"):
        traceback.print_exc()
    last = traceback.extract_tb(error.__traceback__)[-1]
    from fsdptool.formatting import printable

    said = printable(f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})")
    sys.stderr.write(f"internal error: {said}\n")
    sys.stderr.write("help: set FSDPTOOL_TRACEBACK=1 to see the full traceback, and report the error\n")
    return int(ExitCode.INTERNAL)
