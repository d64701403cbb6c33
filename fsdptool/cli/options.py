"""What several commands share: options, how their values are read, and how answers are written."""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from fsdptool.errors import ConfigError, FsdptoolError, StorageError
from fsdptool.files.text import exists, is_folder
from fsdptool.formatting import printable, printable_json, shortened
from fsdptool.options import (
    DIALECT,
    EXCLUDE,
    ISOLATED,
    SKIP_UNKNOWN,
    START_OVER,
    TARGET,
    TRUST,
    Declared,
    declared,
)
from fsdptool.records.annotations import Shape

if TYPE_CHECKING:
    from fsdptool.records.config_documents import Loss
    from fsdptool.records.diagnostic import Answer

T = TypeVar("T")


class Format(StrEnum):
    """Output format of a command."""

    TEXT = "text"
    JSON = "json"


class RowFormat(StrEnum):
    """Output format of a command whose answer has rows."""

    TEXT = "text"
    JSON = "json"
    TSV = "tsv"
    CSV = "csv"


RowFormatOption = Annotated[
    RowFormat, typer.Option("--format", help="Output format; tsv and csv print rows for programs.")
]
FormatOption = Annotated[Format, typer.Option("--format", help="Output format.")]
StartOverOption = Annotated[bool, typer.Option("--start-over", help=START_OVER.help)]
TrustOption = Annotated[bool, typer.Option(*TRUST.flags, help=TRUST.help)]
DialectOption = Annotated[str | None, typer.Option(help=DIALECT.help)]
TargetOption = Annotated[str | None, typer.Option(help=TARGET.help)]
ExcludeOption = Annotated[list[str] | None, typer.Option("--exclude", help=EXCLUDE.help)]
SkipUnknownOption = Annotated[bool, typer.Option("--skip-unknown", help=SKIP_UNKNOWN.help)]
IsolatedOption = Annotated[bool, typer.Option("--isolated", help=ISOLATED.help)]
RecipeArgument = Annotated[Path, typer.Argument(help="The recipe (YAML).", metavar="RECIPE")]
ConfigOption = Annotated[Path, typer.Option("--config", help="accelerate YAML, or another dialect.")]


_Command = TypeVar("_Command", bound=Callable[..., int])


def takes(options: type, *, argument: str = "") -> Callable[[_Command], _Command]:
    """Give a command with ``**options`` the parameters that a declaration has.

    Args:
        options: The declaration (:mod:`fsdptool.options`). Options of a plan without a panel are left to
            Python callers.
        argument: The option that is given by position.
    """

    def decorate(command: _Command) -> _Command:
        *own, _ = inspect.signature(command, eval_str=True).parameters.values()
        items = declared(options).values()
        grouped = any(item.option.panel for item in items)
        shown = [item for item in items if item.option.panel or not grouped or item.name == argument]
        first = [p for p in own if p.default is p.empty]
        last = [p.replace(kind=p.KEYWORD_ONLY) for p in own if p.default is not p.empty]
        generated = [_parameter(item, is_argument=item.name == argument) for item in shown]
        # Typer reads the options from it.
        command.__signature__ = inspect.Signature([*first, *generated, *last])  # type: ignore[attr-defined]
        return command

    return decorate


def has_pair(item: Declared) -> bool:
    """Whether an option has a flag for no (``--offload/--no-offload``), so that False says something."""
    return "/" in item.flags[0]


def _parameter(item: Declared, *, is_argument: bool) -> inspect.Parameter:
    """Return the command's parameter for a declared option."""
    option, kind = item.option, _type(item)
    default = option.default
    if kind is bool and default is None and not has_pair(item):
        default = False
    info: Any
    if is_argument:
        info = typer.Argument(help=option.text())
    else:
        # A plan checks the bounds of its options, which have panels, wherever they come from.
        least = option.minimum if option.panel is None else None
        info = typer.Option(*item.flags, help=option.text(), rich_help_panel=option.panel, min=least)
    hint = kind | None if default is None else kind
    kinds = inspect.Parameter
    return kinds(item.name, kinds.KEYWORD_ONLY, default=default, annotation=Annotated[hint, info])


def _type(item: Declared) -> Any:
    """Return how the command line reads an option: a path, a list, or the simplest type it may have."""
    for kind in item.annotation.kinds:
        if kind.shape is Shape.LIST:
            return list[Path] if Path in [inner.type for inner in kind.items[0].kinds] else list[str]
        if kind.shape is Shape.MAPPING:
            return list[str]
    return next(kind for kind in (Path, str, float, int, bool) if kind in item.types)


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
            if not isinstance(inner, dict):
                raise ConfigError(
                    f"--override {item!r}: {parent} already has a value", help="give one of them"
                )
            target = inner
        if last in target:
            raise ConfigError(f"--override {key.strip()} is given twice", help="give one of them")
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


def print_document(document: Mapping[str, Any]) -> None:
    """Print a JSON document to standard output, escaped to ASCII if the encoding of the terminal needs it."""
    narrow = not (sys.stdout.encoding or "").lower().startswith("utf")
    sys.stdout.write(printable_json(json.dumps(document, indent=2, ensure_ascii=narrow)) + "\n")


_PIPE_SECONDS = 10.0
"""Least time between two lines of progress in a pipe or a log."""


@contextmanager
def show_progress() -> Iterator[Callable[[str], None]]:
    """Show the progress of long work on standard error while the block runs.

    In a terminal one line is rewritten and removed at the end; elsewhere a line is written now and then.
    """
    from fsdptool.runs.work import listening

    terminal = sys.stderr.isatty()
    last = time.monotonic()

    def show(text: str) -> None:
        nonlocal last
        if terminal:
            width = shutil.get_terminal_size().columns - 1
            sys.stderr.write(f"\r\x1b[2K{shortened(printable(text), width)}")
            sys.stderr.flush()
        elif time.monotonic() - last >= _PIPE_SECONDS:
            last = time.monotonic()
            say(text)

    try:
        with listening(show):
            yield show
    finally:
        if terminal:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()


@contextmanager
def ended_by_interrupt() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C end work with what is known so far; the next one ends the command.

    Yields:
        Whether Ctrl-C was pressed.
    """
    pressed = False

    def end(number: int, _: object) -> None:
        nonlocal pressed
        if pressed:
            signal.default_int_handler(number, None)
        pressed = True
        say("note: Ctrl-C: the answer follows from what is known so far; press it again to leave without one")

    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before != signal.default_int_handler:
        yield lambda: False  # others decide what an interrupt does
        return
    signal.signal(signal.SIGINT, end)
    try:
        yield lambda: pressed
    finally:
        signal.signal(signal.SIGINT, before)


def say(text: str) -> None:
    """Write one line to standard error: what was done, or what to know about the answer."""
    from fsdptool.report.console.tables import print_line

    print_line(text, stream=sys.stderr)


def answer_line(text: str) -> None:
    """Write one line of an answer to standard output."""
    from fsdptool.report.console.tables import print_line

    print_line(text)


def lost_lines(losses: Iterable[Loss]) -> Iterator[str]:
    """Say what has no counterpart, and what the other program does instead; keys of one reason together."""
    keys: dict[str, list[str]] = {}
    for loss in losses:
        if loss.value is None and loss.becomes is None:
            keys.setdefault(loss.why, []).append(loss.name)
        else:
            yield f"{loss.name}: {loss.value or 'open'} becomes {loss.becomes or 'nothing'} ({loss.why})"
    for why, names in keys.items():
        yield f"{', '.join(names)} ({why})"


def given_file(path: Path | None) -> Path | None:
    """Return the file to write, or None for ``-``: the command writes to standard output without a file."""
    return None if str(path) == "-" else path


def check_free(path: Path, *, force: bool) -> None:
    """Refuse to replace a file without ``force``; called before any work is done.

    Raises:
        StorageError: The file exists and ``force`` is not set, or ``-`` asks for standard output.
    """
    if str(path) == "-":
        raise StorageError(
            "only a file can be written here, not standard output", help="give the path of a file"
        )
    if is_folder(path):
        raise StorageError(f"{path} is a folder", help="give the path of a file")
    if exists(path) and not force:
        raise StorageError(f"{path} already exists", help="use --force to replace it, or give another path")


def check_output(output: Path | None, force: bool, suffixes: Mapping[str, Sequence[str]]) -> None:
    """Refuse an output file before the work, not after it.

    Args:
        output: The file, or None.
        force: Whether it may be replaced.
        suffixes: What is written, and the suffixes it may have.

    Raises:
        ConfigError: The file has another suffix.
        StorageError: It exists and ``force`` is not set, or its folder takes no files.
    """
    if output is None:
        return
    ((what, allowed),) = suffixes.items()
    if output.suffix not in allowed:
        listed = f"{', '.join(allowed[:-1])} or {allowed[-1]}"
        raise ConfigError(f"{output}: {what} is written as {listed}", help="choose one of these suffixes")
    check_free(output, force=force)
    folder = next(parent for parent in output.absolute().parents if exists(parent))
    if not is_folder(folder) or not os.access(folder, os.W_OK | os.X_OK):
        raise StorageError(f"{output} cannot be written: {folder} takes no files", help="choose another path")


def write_file(path: Path, text: str, *, force: bool = False) -> None:
    """Write ``text`` to ``path`` whole or not at all.

    Raises:
        StorageError: The file exists and ``force`` is not set, or it cannot be written.
    """
    check_free(path, force=force)
    aside = path.with_name(f".{path.name}.{os.urandom(6).hex()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("x", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}", help="choose another path"
        ) from error


def write_answer(path: Path, answer: Answer[T], page: Callable[[Answer[T]], str], *, force: bool) -> None:
    """Write an answer to a file, as a page where its suffix is ``.html``, else as JSON, and say so.

    Args:
        path: The file.
        answer: The answer.
        page: Makes the page of it.
        force: Replace an existing file.

    Raises:
        StorageError: The file exists and ``force`` is not set, or it cannot be written.
    """
    is_page = path.suffix == ".html"
    text = page(answer) if is_page else json.dumps(answer.document(), indent=1, ensure_ascii=False) + "\n"
    write_file(path, text, force=force)
    say(f"wrote {path}")


def complain(error: FsdptoolError) -> None:
    """Write each mistake as one line, and what to do next as a second line."""
    from fsdptool.report.console.tables import print_line

    for mistake in (error, *error.others):
        print_line(f"error: {mistake.message}", stream=sys.stderr)
        if mistake.help:
            print_line(f"help: {mistake.help}", stream=sys.stderr)
