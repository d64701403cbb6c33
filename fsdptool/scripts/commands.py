"""Commands of click, typer and Modal: functions whose arguments are those of the command line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fsdptool.scripts.interpreter import Path
from fsdptool.scripts.known_values import given_by, typed
from fsdptool.scripts.loaded_settings import LoadedSettings
from fsdptool.scripts.names import library
from fsdptool.scripts.values import (
    Class,
    Const,
    Event,
    Function,
    Items,
    Library,
    Thing,
    Value,
    constant,
    is_constant,
    made_by,
)

_TRUE, _FALSE = ("true", "yes", "1", "on", "t", "y"), ("false", "no", "0", "off", "f", "n")
_CLICK = ("click", "rich_click", "asyncclick")
_STARTED = ("command", "function", "local_entrypoint")
"""Decorators of functions that are started by name, with the command line as their arguments."""
_OPEN = ("callback", "parser", "cls", "nargs", "flag_value", "count", "default_factory", "is_eager")
"""Keywords of an option after which its value is something else than the word, or the default, alone."""


@dataclass(frozen=True)
class _Option:
    """A parameter of a command.

    Attributes:
        name: Its name.
        on, off: The flags that give it, and those that turn it off; none for a positional argument.
        switch: Whether its flag takes no value.
        kind: The type that click is told.
        default: What it is where nobody gives it; None where somebody has to.
        keywords: What else is said of it.
        node: Where it is declared.
        text: Whether its words stay text.
    """

    name: str
    on: tuple[str, ...]
    off: tuple[str, ...]
    switch: bool
    kind: Value | None
    default: Value | None
    keywords: Mapping[str, Value]
    node: ast.AST
    text: bool = False

    @property
    def label(self) -> str:
        """Return how a user calls it."""
        return next((flag for flag in self.on if flag.startswith("--")), f"--{self.name}")


def _decorators(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the last names of decorators of a function, and the decorators."""
    for item in getattr(node, "decorator_list", ()):
        function = item.func if isinstance(item, ast.Call) else item
        yield getattr(function, "attr", getattr(function, "id", "")), item


def is_command(node: ast.AST) -> bool:
    """Say whether a function is started by its name, with the command line as its arguments."""
    return any(name in _STARTED for name, _ in _decorators(node))


def _is_group(node: ast.AST) -> bool:
    return any(name in ("group", "callback") for name, _ in _decorators(node))


def _command_name(node: ast.AST) -> str:
    """Return the word that starts a command, with lines below in place of dashes."""
    for name, item in _decorators(node):
        if name == "command" and isinstance(item, ast.Call):
            given = [*item.args[:1], *(word.value for word in item.keywords if word.arg == "name")]
            for word in given:
                if isinstance(word, ast.Constant) and isinstance(word.value, str):
                    return word.value.replace("-", "_")
    return getattr(node, "name", "")


def _given(options: Sequence[_Option], words: Sequence[str]) -> dict[str, list[object]]:
    """Return the words, or the truth, that a command line gives to each parameter.

    A positional argument is left out where a flag is not known, which may take the word behind it.
    """
    flags = {flag: (option, True) for option in options for flag in option.on}
    flags |= {flag: (option, False) for option in options for flag in option.off}
    given: dict[str, list[object]] = {}
    others: list[str] | None = []
    rest = list(reversed(words))
    while rest:
        word = rest.pop()
        name, equals, value = word.partition("=")
        found = flags.get(name)
        if found is None and (others is None or re.match(r"-+[A-Za-z]", word)):
            others = None
        elif found is None:
            if others is not None and word != "--":
                others.append(word)
        elif found[0].switch:
            given.setdefault(found[0].name, []).append(found[1])
        elif equals or rest:
            given.setdefault(found[0].name, []).append(value if equals else rest.pop())
    for option in options:
        if not option.on:
            if "nargs" in option.keywords or others is None:
                others = None
                given[option.name] = []
            elif others:
                given[option.name] = [others.pop(0)]
    return given


class Commands(LoadedSettings):
    """Follows the functions of a script that are started as commands."""

    _defaults: bool
    _declares: bool
    _by_module: set[ast.AST]

    def _default_of(self, value: object, label: str, node: ast.AST | None) -> Value:
        """Return a value that counts where nobody gives another one."""
        if not self._defaults:
            return Thing("unknown", label=label, node=node)
        return given_by(value, f"default of {label}", node)

    def _converted(self, word: object, kind: Value | None) -> object:
        if not isinstance(word, str):
            return word
        name = kind.name.rpartition(".")[2] if isinstance(kind, Library) else ""
        try:
            if name == "int":
                return int(word)
            if name == "float":
                return float(word)
        except ValueError:
            return word
        truth = isinstance(kind, Function) or name in ("bool", "strtobool", "string_to_bool")
        return word.lower() in _TRUE if truth and word.lower() in (*_TRUE, *_FALSE) else word

    def _mattering(self) -> set[ast.AST]:
        self._by_module = set(self.called)
        return super()._mattering() | {root.node for root in self.roots if is_command(root.node)}

    def _named(self) -> tuple[ast.AST | None, int]:
        """Return the command that a word names, and the place of the word; None where none does."""
        started = [root.node for root in self.roots if "command" in dict(_decorators(root.node))]
        if len(started) > 1 or (started and any(map(_is_group, (root.node for root in self.roots)))):
            names = {_command_name(node): node for node in started}
            words = [word.replace("-", "_") for word in self._words]
            found = [index for index, word in enumerate(words) if word in names]
            # Behind a flag of the group, a word may be its value.
            found.sort(key=lambda index: index > 0 and words[index - 1].startswith("_"))
            if found:
                return names[words[found[0]]], found[0]
        return None, -1

    def _words_of(self, node: ast.AST) -> Sequence[str]:
        """Return the words that a command, or the group of the commands, is given."""
        named, index = self._named()
        return self._words[:index] if named is not None and _is_group(node) else self._words[index + 1 :]

    def chosen(self, paths: Sequence[Path], scores: Sequence[int]) -> int | None:
        """Return the way through the script that starts a run, or None; tell where several commands do."""
        named = self._named()[0]
        if named is not None and named not in self._by_module:
            found = [index for index, path in enumerate(paths) if path.root is named and scores[index]]
            return found[0] if found else None
        best = max(range(len(paths)), key=lambda index: (scores[index], -index))
        chosen = 0 if scores[0] else best
        roots = [path.root for path, score in zip(paths, scores, strict=True) if score]
        names = [_command_name(node) for node in roots if node is not None and is_command(node)]
        root = paths[chosen].root
        if root is not None and is_command(root) and len(names) > 1:
            others = ", ".join(names)
            self.problems.append(f"one of the commands {others} is started: {_command_name(root)} is taken")
        return chosen if scores[chosen] else None

    def _from(self, root: Function, before: tuple[Event, ...]) -> Path:
        """Follow a function that nothing calls: a command, whose defaults and flags count."""
        of_modal = any(name in _STARTED[1:] for name, _ in _decorators(root.node))
        handed_on = of_modal and _command_name(root.node) in self.words
        if root.bound is not None or not is_command(root.node) or handed_on:
            return super()._from(root, before)
        self.events = list(before)
        mark = self.mark
        given = self.of_options(root)
        if not given and (of_modal or "typer" in self.words):
            given = self._of_signature(root, positional=not of_modal)
        self.enter(root, (), given, root.node, partly=True)
        path = Path(tuple(self.events), len(before), self.tree, tuple(self.classes), self.words, root.node)
        self.take_back(mark)
        return path

    def _result(
        self, receiver: Value, name: str, args: Sequence[Value], keywords: Mapping[str, Value], node: ast.Call
    ) -> Value:
        if isinstance(receiver, Function) and name == "main" and is_command(receiver.node):
            # ``train.main(["--rows", "8"])`` of click
            listed = args[0] if args else keywords.get("args")
            known = listed.values if isinstance(listed, Items) else []
            words = [str(word.value) for word in known if isinstance(word, Const)]
            if listed is None or is_constant(listed, None):
                return self.enter(receiver, (), {}, node)
            whole = isinstance(listed, Items) and len(words) == len(known)
            given = self._values(list(self._options(receiver)), words) if whole else {}
            return self.enter(receiver, (Thing("unknown"),) * (not given), given, node, partly=True)
        return super()._result(receiver, name, args, keywords, node)

    # What declares the parameters of a command

    def of_options(self, function: Function) -> dict[str, Value]:
        """Return the arguments that options of click give to the function that they decorate."""
        options = list(self._options(function))
        return self._values(options, self._words_of(function.node)) if options else {}

    def _options(self, function: Function) -> Iterator[_Option]:
        for last, item in _decorators(function.node):
            if last not in ("option", "argument") or not isinstance(item, ast.Call):
                continue
            of = self.value(item.func)
            if not isinstance(of, Library) or library(of.name) not in _CLICK:
                continue
            names = [str(constant(self.value(word))) for word in item.args]
            keywords = {word.arg: self.value(word.value) for word in item.keywords if word.arg is not None}
            on = tuple(word.partition("/")[0].strip() for word in names if word.startswith(("-", " ")))
            off = tuple(word.partition("/")[2].strip() for word in names if "/" in word)
            plain = [word for word in names if not word.startswith(("-", " "))]
            long = sorted((word for word in on if word), key=lambda word: not word.startswith("--"))
            name = (plain or [word.lstrip("-") for word in long] or [""])[0].replace("-", "_")
            switch = bool(off) or is_constant(keywords.get("is_flag"), True)
            switch = switch or bool(keywords.keys() & {"flag_value", "count"})
            needed = is_constant(keywords.get("required"), True) or last == "argument"
            empty: Value | None = None if needed else Const(False if switch else None)
            several = is_constant(keywords.get("multiple"), True)
            default = keywords.get("default", Items([]) if several else empty)
            flags = tuple(word for word in on if word) if last == "option" else ()
            kind = keywords.get("type")
            yield _Option(
                name if last == "argument" else name.lower(),
                flags,
                off,
                switch,
                kind,
                default,
                keywords,
                item,
            )

    def _of_signature(self, function: Function, *, positional: bool) -> dict[str, Value]:
        """Return the arguments of a command of typer or Modal, whose parameters declare its options."""
        form = function.node.args
        defaults = dict(zip(reversed([*form.posonlyargs, *form.args]), reversed(form.defaults), strict=False))
        defaults |= {
            item: value
            for item, value in zip(form.kwonlyargs, form.kw_defaults, strict=True)
            if value is not None
        }
        options: list[_Option] = []
        for item in (*form.posonlyargs, *form.args, *form.kwonlyargs):
            said = ast.unparse(item.annotation) if item.annotation is not None else ""
            default = self._value_in(function.scope, defaults[item]) if item in defaults else None
            declared = made_by(default, "typer.Option", "typer.Argument")
            names: Sequence[Value] = ()
            if declared is not None:
                names = declared.args[1:]
                default = declared.args[0] if declared.args else declared.keywords.get("default")
            elif "Annotated" in said and item.annotation is not None:
                parts = [part for part in ast.walk(item.annotation) if isinstance(part, ast.Call)]
                found = [self._value_in(function.scope, part) for part in parts]
                declared = next(
                    (made for made in found if made_by(made, "typer.Option", "typer.Argument")), None
                )  # type: ignore[assignment]
                names = declared.args if declared is not None else ()
            if "Context" in said:
                continue
            if is_constant(default, ...):
                default = None
            words = [str(constant(name)) for name in names]
            on = [word.partition("/")[0].strip() for word in words if word.startswith("-")]
            off = [word.partition("/")[2].strip() for word in words if "/" in word]
            switch = "bool" in said or (not said and isinstance(constant(default), bool))
            argument = (declared is None and item not in defaults) if positional else False
            argument = argument or made_by(declared, "typer.Argument") is not None
            if not argument and not on:
                dashed = item.arg.replace("_", "-")
                on, off = [f"--{dashed}", f"--{item.arg}"], [f"--no-{dashed}"] if switch else []
            keywords = dict(declared.keywords) if declared is not None else {}
            if re.search(r"\b(?:[Ll]ist|[Tt]uple|Sequence)\b", said):
                keywords["nargs" if argument or "uple" in said else "multiple"] = Const(True)
            text = "str" in said
            options.append(
                _Option(item.arg, tuple(on), tuple(off), switch, None, default, keywords, item, text)
            )
        if positional and not any(_is_group(root.node) for root in self.roots):
            self._declares = True
        return self._values(options, self._words_of(function.node))

    def _values(self, options: Sequence[_Option], words: Sequence[str]) -> dict[str, Value]:
        """Return what each parameter is: as the command line gives it, or its default."""
        given = _given(options, words)
        made: dict[str, Value] = {}
        for option in options:
            label, node = option.label, option.node
            self._used.update(flag.lstrip("-").replace("-", "_") for flag in (*option.on, *option.off))
            values = given.get(option.name)
            unknown = Thing("unknown", label=label, node=node)
            if option.keywords.keys() & set(_OPEN) or (values is not None and not values):
                made[option.name] = unknown
            elif values is not None:
                known = [
                    given_by(self._read(word, option) if isinstance(word, str) else word, label, node)
                    for word in values
                ]
                several = is_constant(option.keywords.get("multiple"), True)
                made[option.name] = Items(list(known)) if several else known[-1]
            elif option.default is None or "prompt" in option.keywords:
                made[option.name] = Thing("missing", label=label, node=node)
            elif isinstance(option.default, Const):
                made[option.name] = self._default_of(option.default.value, label, node)
            elif isinstance(option.default, Function | Class) or not self._defaults:
                made[option.name] = unknown
            else:
                made[option.name] = option.default
        return made

    def _read(self, word: str, option: _Option) -> object:
        if option.kind is not None:
            return self._converted(word, option.kind)
        return word if option.text else typed(word)
