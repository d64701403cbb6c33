"""What a script sets, with the lines that decide it.

A setting has the name that the programs of other files give it (``lora_r``), and the one that the script
writes (``LoraConfig.r``).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fsdptool.scripts.defaults import RunInterpreter
from fsdptool.scripts.facts import Facts, text
from fsdptool.scripts.interpreter import Path
from fsdptool.scripts.names import short
from fsdptool.scripts.values import Choice, Class, Const, Event, Items, Library, Table, Thing, Value, made_by

DTYPES = ("torch.bfloat16", "torch.float16", "torch.half", "torch.float32", "torch.float")
_DEEPEST, _MOST = 20, 10_000
"""Levels and items of a list or a dictionary beyond which its value is taken for not known."""
Form = Literal["trl", "trainer", "accelerate", "lightning", "torch"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A value that a script decides.

    Attributes:
        name: The setting, as the script writes it.
        value: Its value as plain data; None where it is not known.
        line: Its line, counted from 1.
        unread: The expression that decides it, where its value is not known.
        option: The option, variable or field that decides it, in words; None: the script says so itself.
    """

    name: str
    value: Any
    line: int
    unread: str | None = None
    option: str | None = None


@dataclass(frozen=True, slots=True)
class NamedClass:
    """A class that a script names to be a unit.

    Attributes:
        name: Its name.
        module: The module it is imported from; empty where the script only says its name.
        line: Line of the policy.
    """

    name: str
    module: str
    line: int


@dataclass(slots=True)
class ScriptRun:
    """The run that a script starts.

    Attributes:
        form: Whose training loop it is.
        settings: By the names that programs give them; what no program names is ``Class.argument``.
        objective: What is minimised, or None.
        fsdp: Version of FSDP; ``none`` without; None: the launcher decides.
        own_class: The model's class, where the script defines it.
        model_type: Configuration class of the model (``LlamaConfig``), where the script gives its sizes.
        classes: Classes that are to be units.
        own_fields: Fields that a class of the script adds to the arguments of a trainer.
        processes: Ranks that it starts itself, or None.
        nodes: Machines that it says they are on, or None.
        loss_in_forward: Whether the model computes the loss, or the loop from logits; None: not known.
        keeps_logits: Whether a name holds what the model returned during backward; None: not known.
        further: Settings that arguments may decide which are not read.
        problems: What cannot be read, beside the settings.
    """

    form: Form
    settings: dict[str, Setting] = field(default_factory=dict)
    objective: str | None = None
    fsdp: Literal["none", 1, 2] | None = None
    own_class: str | None = None
    model_type: str | None = None
    classes: tuple[NamedClass, ...] = ()
    own_fields: tuple[str, ...] = ()
    processes: int | None = None
    nodes: int | None = None
    loss_in_forward: bool | None = None
    keeps_logits: bool | None = None
    further: tuple[str, ...] = ()
    problems: list[str] = field(default_factory=list)


class SettingsReader:
    """Keeps the settings of one way through a script."""

    def __init__(self, path: Path, interpreter: RunInterpreter) -> None:
        self.facts = Facts(path, {})
        self.interpreter = interpreter
        self.run = ScriptRun("torch")

    def put(self, key: str, value: Value | None, node: ast.AST | None, name: str) -> None:
        """Keep a setting; the first one of a key counts."""
        if value is None or key in self.run.settings:
            return
        known, plain = plain_value(value)
        written = node.value if isinstance(node, ast.keyword) else getattr(value, "node", None) or node
        line = next(
            (at.lineno for at in (node, written) if isinstance(at, ast.expr | ast.keyword | ast.stmt)), 1
        )
        unread = None
        if not known:
            missing = made_by(value, "missing")
            unread = f"{missing.label}, which has no default" if missing else None
            unread = unread or (text(written) if written is not None else "decided at run time")
        options = [item.label for item in value.sources if isinstance(item, Thing) and item.kind == "option"]
        if known and plain is None and options:
            unread = f"{options[0]}, which is None" if key == "model_name_or_path" else None
        self.run.settings[key] = Setting(name, plain, line, unread, options[0] if options else None)

    def say(self, key: str, value: object, node: ast.AST | None, name: str) -> None:
        """Keep a setting whose value follows from the script."""
        self.put(key, Const(value), node, name)

    def rest(self, thing: Thing | Event, kind: str, taken: Mapping[str, str] | Sequence[str] = ()) -> None:
        """Keep the other arguments of a call, as ``Kind.argument``."""
        places = thing.places if isinstance(thing, Event) else {}
        for name, value in thing.keywords.items():
            if name not in taken:
                self.put(f"{kind}.{name}", value, places.get(name, thing.node), f"{kind}.{name}")

    def further(self, event: Event | None, name: str, keys: Sequence[str]) -> None:
        """Leave open what a call may be given that takes arguments which are not known."""
        if event is not None and event.partly:
            self.leave_open(event.node, name, keys)

    def leave_open(self, node: ast.AST | None, name: str, keys: Sequence[str]) -> None:
        """Leave open what is decided by arguments that are not known."""
        self.run.further += tuple(key for key in keys if key not in self.run.settings)
        line = getattr(node, "lineno", 1)
        self.run.problems.append(f"line {line}: {name} takes further arguments, which are not read")

    def event_of(self, thing: Thing) -> Event | None:
        """Return the call that made an object."""
        return next((event for event in self.facts.events if event.result is thing), None)

    def places(self, thing: Thing) -> Mapping[str, ast.AST]:
        """Return where the arguments that an object was made with are written."""
        event = self.event_of(thing)
        return event.places if event is not None else {}


def plain_value(value: Value | None) -> tuple[bool, Any]:
    """Return whether a value is known, and the value as plain data; one that holds too much is not known."""
    return _plain(value, iter(range(_MOST)), 0)


def _plain(value: Value | None, room: Iterator[int], depth: int) -> tuple[bool, Any]:
    if depth > _DEEPEST or next(room, None) is None:
        return False, None
    if value is None:
        return True, None
    if isinstance(value, Const):
        return True, value.value
    if isinstance(value, Library):
        owner, _, last = value.name.rpartition(".")
        # A constant of another module (``config.BATCH_SIZE``) is not known; a member of a class is.
        known = (
            (last[:1].isupper() and not (len(last) > 1 and last.isupper()))
            or owner.rpartition(".")[2][:1].isupper()
            or short(value.name) in DTYPES
        )
        return known and owner != "builtins", last
    if isinstance(value, Class):
        return True, value.node.name
    if isinstance(value, Items):
        items = [_plain(item, room, depth + 1) for item in value.values]
        return value.whole and all(known for known, _ in items), [item for _, item in items]
    if isinstance(value, Table):
        pairs = {str(key): _plain(item, room, depth + 1) for key, item in value.items.items()}
        known = value.whole and all(known for known, _ in pairs.values())
        return known, {key: item for key, (_, item) in pairs.items()}
    if isinstance(value, Choice):
        several = [_plain(option, room, depth + 1) for option in value.options]
        same = all(item == several[0] for item in several)
        return same and several[0][0], several[0][1] if same else None
    return False, None
