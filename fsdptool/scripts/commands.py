"""Commands of click, typer and Modal: functions whose arguments are those of the command line."""

from __future__ import annotations

import ast
from abc import abstractmethod

from fsdptool.scripts.interpreter import Path
from fsdptool.scripts.known_values import given_by, typed
from fsdptool.scripts.loaded_settings import LoadedSettings
from fsdptool.scripts.values import (
    Const,
    Event,
    Function,
    Library,
    Thing,
    Value,
    constant,
    is_constant,
    made_by,
)

_TRUE, _FALSE = ("true", "yes", "1", "on", "t", "y"), ("false", "no", "0", "off", "f", "n")


def _is_command(node: ast.AST) -> bool:
    """Say whether a function is started by its name, with the command line as its arguments."""
    calls = [
        item.func if isinstance(item, ast.Call) else item for item in getattr(node, "decorator_list", ())
    ]
    return any(
        getattr(item, "attr", getattr(item, "id", "")) in ("command", "function", "local_entrypoint")
        for item in calls
    )


class Commands(LoadedSettings):
    """Follows the functions of a script that are started as commands."""

    _defaults: bool

    @abstractmethod
    def _argument(self, name: str, declared: Thing, default: Value | None, positional: list[str]) -> Value:
        """Return what an argument is: as it is given, or its default."""

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

    def _from(self, root: Function, before: tuple[Event, ...]) -> Path:
        """Follow a function that nothing calls: a command, whose defaults and flags count."""
        if root.bound is not None or not _is_command(root.node):
            return super()._from(root, before)
        self.events = list(before)
        mark = self.mark
        form = root.node.args
        names = [item.arg for item in (*form.posonlyargs, *form.args, *form.kwonlyargs)]
        given: dict[str, Value] = {
            name: self._default_of(value.value, f"--{name}", root.node) if isinstance(value, Const) else value
            for name, value in self._bound(root, (), {}, False).items()
            if name in names and made_by(value, "parameter") is None
        }
        for name in self._flags.keys() & set(names):
            self._used.add(name)
            given[name] = given_by(typed(self._flags[name]), f"--{name}", root.node)
        self.enter(root, (), {**given, **self.of_options(root)}, root.node, partly=True)
        path = Path(tuple(self.events), len(before), self.tree, tuple(self.classes), self.words)
        self.take_back(mark)
        return path

    def of_options(self, function: Function) -> dict[str, Value]:
        """Return the arguments that options of click give to the function that they decorate."""
        given: dict[str, Value] = {}
        for item in getattr(function.node, "decorator_list", ()):
            if not isinstance(item, ast.Call) or ast.unparse(item.func) not in ("click.option", "option"):
                continue
            words = [str(constant(self.value(word))).partition("/")[0] for word in item.args]
            keywords = {word.arg: self.value(word.value) for word in item.keywords if word.arg is not None}
            if is_constant(keywords.get("is_flag"), True):
                keywords["action"] = Const("store_true")
            long = max(words, key=lambda word: word.count("-") if word.startswith("--") else 0, default="")
            name = next((word for word in words if not word.startswith("-")), long.lstrip("-"))
            name = name.replace("-", "_")
            labels = tuple(Const(word) for word in words)
            declared = Thing("declared", label=long or name, node=item, args=labels, keywords=keywords)
            given[name] = self._argument(name, declared, None, [])
        return given
