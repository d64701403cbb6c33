"""Shell completion of values: flavours, GPUs, methods, rule codes, run folders and every option's choices.

Nothing here imports torch: the shell waits for the answer.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "_FSDPTOOL_COMPLETE"
"""Set by the shell's completion script (typer 0.29, ``_completion_shared.py``)."""


@dataclass(frozen=True, slots=True)
class Completion:
    """One value as typer's completion prints it (``CompletionItem`` of click)."""

    value: str
    type: str = "plain"
    help: str | None = None


def completed_command() -> str | None:
    """Return the command whose words the shell completes, or None outside of completion."""
    words = os.environ.get("COMP_WORDS", os.environ.get("_TYPER_COMPLETE_ARGS", "")).split()
    return words[1] if VARIABLE in os.environ and len(words) > 1 else None


def attach_values(group: Any) -> None:
    """Give each parameter of a group's commands the values it may have; commands stay as they are.

    Args:
        group: The command group that typer made of the application.
    """
    if not os.environ.get(VARIABLE, "").startswith("complete"):
        return
    _join_split_words()
    for name, command in group.commands.items():
        # click would show 45 characters of it.
        command.short_help = _description((command.help or "").partition("\n\n")[0])
        for parameter in command.params:
            if getattr(parameter, "help", None):
                parameter.help = _description(parameter.help)
            values = _values_of(name, str(parameter.name))
            if values is not None:
                parameter.shell_complete = _completer(values)


def _description(text: str) -> str:
    # typer 0.29 doubles apostrophes for zsh, which then shows none (``ZshComplete.format_completion``), and
    # wraps what is longer than 80 columns, which fish takes for further values (``_sanitize_help_text``).
    text = text.replace("'", "\N{RIGHT SINGLE QUOTATION MARK}")
    return textwrap.shorten(text, 76, placeholder=" …")


def _completer(values: Callable[[str], Iterable[str]]) -> Callable[[Any, str], list[Completion]]:
    def complete(context: Any, incomplete: str) -> list[Completion]:
        try:
            found = [value for value in values(incomplete) if value.startswith(incomplete)]
        except Exception:
            # A broken file must not print a traceback into somebody's prompt.
            found = []
        # bash replaces only what follows the last colon of a word (COMP_WORDBREAKS).
        bash = os.environ[VARIABLE] == "complete_bash"
        cut = incomplete.rfind(":") + 1 if bash else 0
        before = "" if bash else _option_before(incomplete)
        return [Completion(before + value[cut:]) for value in found if value.isprintable()]

    return complete


def _option_before(incomplete: str) -> str:
    """Return ``--gpu=`` of ``--gpu=RTX``: zsh and fish replace the whole word, click its end."""
    option, sign, value = os.environ.get("_TYPER_COMPLETE_ARGS", "").rpartition(" ")[2].partition("=")
    return f"{option}=" if sign and option.startswith("-") and value == incomplete else ""


def _join_split_words() -> None:
    """Undo what bash does to ``llama3:8b`` and ``--gpu=L4``, each of which it splits into three words."""
    words = os.environ.get("COMP_WORDS", "").split(" ")
    if os.environ.get(VARIABLE) != "complete_bash" or not {":", "="} & set(words):
        return
    place = int(os.environ.get("COMP_CWORD", len(words) - 1))
    words += [""] * (place + 1 - len(words))
    # The shell's cursor may be on the colon itself: an empty word follows it.
    before, joined = words[: place + 1], list[str]()
    for word in before:
        if joined and (word == ":" or joined[-1].endswith(":")):
            joined[-1] += word
        elif word != "=":
            joined.append(word)
    if before[-1] == "=":
        joined.append("")
    os.environ["COMP_WORDS"] = " ".join(joined)
    os.environ["COMP_CWORD"] = str(len(joined) - 1)


def _values_of(command: str, name: str) -> Callable[[str], Iterable[str]] | None:
    """Return what lists the values of a parameter, or None where typer and the shell know better."""
    if command == "plan" and name not in _VALUES:
        return _choices(name)
    if name == "method" and command == "init":
        return lambda _: ("full", "lora", "qlora")
    return _OWN.get((command, name)) or _VALUES.get(name)


def _choices(name: str) -> Callable[[str], Iterable[str]] | None:
    from fsdptool.planning.request.options import declared

    option = declared().get(name)
    allowed = option.option.allowed() if option is not None else ()
    return (lambda _: allowed) if allowed else None


def _references(incomplete: str) -> Iterator[str]:
    """Yield families; the flavours of a family whose colon is typed, or of the only one that matches."""
    from fsdptool.families.registry import load_registry
    from fsdptool.formatting import by_size

    family, colon, _ = incomplete.partition(":")
    known = {item.name: item for item in load_registry().all() if item.flavours()}
    matching = [family] if colon and family in known else [name for name in known if name.startswith(family)]
    for name in matching:
        if len(matching) > 1:
            yield f"{name}:"
        else:
            yield from (f"{name}:{flavour}" for flavour in by_size(known[name].flavours()))


def _families(incomplete: str) -> Iterator[str]:
    from fsdptool.families.registry import load_registry

    yield from (item.name for item in load_registry().all())
    if ":" in incomplete:
        yield from _references(incomplete)


def _gpus(incomplete: str) -> Iterator[str]:
    from fsdptool.planning.hardware import all_entries

    return (entry.gpu.name for entry in all_entries())


def _objectives(incomplete: str) -> Iterable[str]:
    from fsdptool.families.registry import load_registry

    return sorted({name for family in load_registry().all() for name in family.objectives()})


def _codes(incomplete: str) -> Iterator[str]:
    """Yield rule codes; behind a comma, each with what stands before it."""
    from fsdptool.cli.rule import all_rules

    before = incomplete[: incomplete.rfind(",") + 1]
    return (before + code for code in sorted(all_rules()))


def _run_folders(incomplete: str) -> Iterator[str]:
    """Yield the run folders below what is typed, below ``runs/`` and here."""
    from fsdptool.runs.folder import RUN

    typed = Path(incomplete).parent if incomplete else Path()
    for root in dict.fromkeys((Path("runs"), Path(), typed)):
        if root.is_dir():
            yield from sorted(str(item.parent) for item in root.glob(f"*/{RUN}"))


def _resumable(incomplete: str) -> Iterator[str]:
    yield "auto"
    for run in _run_folders(""):
        yield from sorted(str(item) for item in Path(run).glob("checkpoints/step-*"))


def _dialects(incomplete: str) -> Iterator[str]:
    from fsdptool.config.dialects import load_registry

    return iter(load_registry().names)


def _presets(incomplete: str) -> Iterable[str]:
    from fsdptool.api.emit_config import PRESETS

    return PRESETS


def _schemas(incomplete: str) -> Iterable[str]:
    from fsdptool.records.schema import FORMATS

    return FORMATS


def _consumers(incomplete: str) -> Iterable[str]:
    from fsdptool.config.dialects import known_programs

    return known_programs()


def _precisions(incomplete: str) -> Iterable[str]:
    return ("no", "fp16", "bf16", "fp8")


def _policies(incomplete: str) -> Iterable[str]:
    from fsdptool.planning.request.options import OPTIMAL
    from fsdptool.records.checkpointing import EXAMPLES

    return (*EXAMPLES, OPTIMAL)


_VALUES: dict[str, Callable[[str], Iterable[str]]] = {
    "reference": _references,
    "model": _references,
    "teacher": _references,
    "gpu": _gpus,
    "objective": _objectives,
    "run": _run_folders,
    "code": _codes,
    "select": _codes,
    "ignore": _codes,
    "dialect": _dialects,
    "preset": _presets,
    "checkpointing": _policies,
    "consumer": _consumers,
    "layout": lambda _: ("native", "accelerate"),
    "launcher": lambda _: ("torchrun", "accelerate"),
    "precision": _precisions,
    "resume": _resumable,
}
"""Parameters that mean the same in every command."""

_OWN: dict[tuple[str, str], Callable[[str], Iterable[str]]] = {
    ("families", "name"): _families,
    ("schema", "name"): _schemas,
    ("migrate", "to"): _dialects,
    ("diagnose", "targets"): _run_folders,
    ("report", "source"): _run_folders,
    ("compare", "left"): _run_folders,
    ("compare", "right"): _run_folders,
    ("train", "output"): _run_folders,
}
