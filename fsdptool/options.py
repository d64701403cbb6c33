"""How options are declared once: the command line, the Python function and the forms read one declaration.

A declaration is a ``TypedDict`` of ``Annotated[type, Option(...)]``. A function takes it as
``**options: Unpack[Declaration]`` and gets its signature and documentation from :func:`takes`; a command gets
its parameters from ``fsdptool.cli.options.takes``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from functools import cache
from math import isfinite
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar, cast, get_type_hints

from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.records.annotations import (
    Annotation,
    Kind,
    Shape,
    annotation_at,
    bounds_text,
    permits,
    read_annotation,
)

_Function = TypeVar("_Function", bound=Callable[..., Any])
_Options = TypeVar("_Options")


@dataclass(frozen=True, slots=True)
class Option:
    """What an option declares besides its name and type.

    Attributes:
        help: What it means, without its choices.
        panel: The group of options in which ``--help`` shows it.
        sets: The field of a plan that it sets, as ``recipe.batch.micro_batch`` or ``settings.cpu_offload``.
            The choices and the bounds are those of that field's type.
        flags: Its spellings on the command line; none: its name with dashes.
        choices: Its choices where the field has none, or others.
        value: From the given value to the one the field takes.
        closes: Search dimensions that keep their value when it is given.
        minimum: The least it may be where the field allows less, or has no bound.
        default: What it is unless given.
    """

    help: str
    panel: str | None = None
    sets: str = ""
    flags: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    value: Callable[[Any], Any] | None = None
    closes: tuple[str, ...] = ()
    minimum: int | None = None
    default: Any = None

    def allowed(self) -> tuple[str, ...]:
        """Return the choices; empty where any value of the type may be given."""
        return self.choices or (self._field().choices if self.sets else ())

    def bounds(self) -> Mapping[str, Any]:
        """Return the bounds of a number: the field's, in the words of JSON Schema, or ``minimum``."""
        if self.minimum is not None:
            return {"minimum": self.minimum}
        return self._field().bounds if self.sets else {}

    def _field(self) -> Annotation:
        from fsdptool.records.recipe import Recipe
        from fsdptool.records.sharding import FsdpSettings

        root, *path = self.sets.split(".")
        return annotation_at({"recipe": Recipe, "settings": FsdpSettings}[root], path)

    def text(self) -> str:
        """Return the help text with the choices."""
        choices = self.allowed()
        if not choices:
            return self.help
        listed = f"{', '.join(choices[:-1])} or {choices[-1]}" if len(choices) > 1 else choices[0]
        return f"{self.help.removesuffix('.')}: {listed}."


TRUST = Option(
    "Allow code that comes with the model, or that package.module:Class names, to run.",
    flags=("--trust-remote-code", "--allow-import"),
    default=False,
)
REVISION = Option("Revision of a Hugging Face id.")
COMPONENT = Option("Component of a pipeline, instead of the denoiser.")
LAUNCH_ID = Option("Launch ID, identical on all nodes, unique per launch.")
START_OVER = Option(
    "With --resume: start over if the run has no checkpoint, so that its steps are lost.", default=False
)
DIALECT = Option("Dialect of the input, instead of detecting it.")
TARGET = Option(
    "Version of the consuming program to check against: accelerate==1.15. A package that runs beside it"
    " follows a comma: accelerate==1.12,transformers==5.0."
)
EXCLUDE = Option("Pattern of files or folders to leave out (repeatable).")
SKIP_UNKNOWN = Option("Skip named files of unknown kinds, as in folders.", default=False)
ISOLATED = Option("Do not read settings from pyproject.toml or fsdptool.toml.", default=False)


@dataclass(frozen=True, slots=True)
class Declared:
    """One option as declared: its name, its annotation as written and as read, and the rest."""

    name: str
    hint: Any
    annotation: Annotation
    option: Option

    @property
    def flags(self) -> tuple[str, ...]:
        """Its spellings on the command line."""
        return self.option.flags or (f"--{self.name.replace('_', '-')}",)

    @property
    def types(self) -> tuple[Any, ...]:
        """The classes of what it may be, None left out."""
        return tuple(kind.type for kind in self.annotation.kinds)


@cache
def declared(options: Any) -> Mapping[str, Declared]:
    """Return every option of a declaration, in order."""
    plain, marked = get_type_hints(options), get_type_hints(options, include_extras=True)
    read = {name: read_annotation(hint) for name, hint in marked.items()}
    return {name: Declared(name, plain[name], item, item.marks[0]) for name, item in read.items()}


def takes(options: type, *, first: str = "") -> Callable[[_Function], _Function]:
    """Give a function with ``**options`` the signature and the documentation of a declaration.

    Args:
        options: The declaration.
        first: The option that is a parameter of the function as well, to be given by position.
    """

    def decorate(function: _Function) -> _Function:
        *own, _ = inspect.signature(function).parameters.values()
        before = [p for p in own if p.kind is not p.KEYWORD_ONLY and p.name != first]
        after = [p for p in own if p.kind is p.KEYWORD_ONLY]
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        listed = [
            inspect.Parameter(
                item.name, kinds[item.name != first], default=item.option.default, annotation=item.hint
            )
            for item in declared(options).values()
        ]
        taken: Any = function
        taken.__signature__ = inspect.Signature([*before, *listed, *after])
        lines = (f"        {item.name}: {item.option.text()}" for item in declared(options).values())
        taken.__doc__ = f"{function.__doc__}\n    Options:\n" + "\n".join(lines) + "\n"
        return function

    return decorate


def with_defaults(options: type[_Options], given: _Options) -> _Options:
    """Return every option of a declaration: as given, else its default; None is not given.

    Raises:
        ConfigError: A value has another type, or is beyond its bounds.
    """
    items = declared(cast("Any", options))
    values = {name: item.option.default for name, item in items.items()}
    for name, value in cast("Mapping[str, Any]", given).items():
        if value is not None:
            values[name] = of_declared_type(items[name], value, ConfigError) if name in items else value
    return cast("_Options", values)


def of_declared_type(item: Declared, value: Any, error: type[FsdptoolError]) -> Any:
    """Return a value within the type and the bounds of its option, in the type that the option declares.

    Numbers of other libraries become ``int`` or ``float``, and lists become tuples; one item for a list is a
    list of one.

    Args:
        item: The option.
        value: What is given for it.
        error: What is raised where the value has another type, or is a number beyond the option's bounds.
    """
    flag = item.flags[0].partition("/")[0]
    kinds = item.annotation.kinds
    shapes = {kind.shape for kind in kinds}
    if shapes == {Shape.LIST}:
        if isinstance(value, bytes | bytearray | Mapping):
            raise error(f"{flag} must be a list, not {value!r}")
        alone = isinstance(value, str) or not isinstance(value, Iterable)
        (inner,) = kinds[0].items
        items = [_scalar(flag, inner.kinds, each, error) for each in ([value] if alone else value)]
        # A set has no order of its own: the same options give the same plan.
        return tuple(sorted(items, key=str) if isinstance(value, Set) else items)
    if shapes == {Shape.MAPPING}:
        if not isinstance(value, Mapping):
            raise error(f"{flag} must be a mapping of keys to values, not {value!r}")
        return value
    value = _scalar(flag, kinds, value, error)
    bounds = item.option.bounds()
    if isinstance(value, int | float) and not permits(bounds, value):
        raise error(f"{flag} must be {bounds_text(bounds)}, not {value}")
    if isinstance(value, float) and not isfinite(value):
        raise error(f"{flag} must be a finite number, not {value}")
    return value


def _scalar(flag: str, kinds: Sequence[Kind], value: Any, error: type[FsdptoolError]) -> Any:
    """Return a text, a path, a number, a truth value or a record, as one of ``kinds``."""
    types = {kind.type for kind in kinds}
    if isinstance(value, Enum) and isinstance(value.value, str) and not isinstance(value, str):
        value = value.value
    if isinstance(value, PathLike) and str in types and Path not in types:
        value = fspath(value)
    if type(value) is not bool and isinstance(value, Real):
        value = _number(flag, value, error)
    if isinstance(value, bool):
        fits = bool in types
    elif isinstance(value, int | float):
        # Beside a text, as in a size, a whole number may be written as 2e12.
        fits = bool(types & {int, float}) and (isinstance(value, int) or types != {int})
    elif isinstance(value, str):
        fits = str in types
    else:
        fits = isinstance(value, tuple(types)) or (Path in types and isinstance(value, PathLike))
    if not fits:
        given = f"the text {value!r}" if isinstance(value, str) else repr(value)
        # A text is a number in quotes more often than another value.
        words = "a number" if isinstance(value, str) and types == {int} else _in_words(kinds)
        raise error(f"{flag} must be {words}, not {given}")
    return value


def _number(flag: str, value: Real, error: type[FsdptoolError]) -> int | float:
    """Return a number of any library as Python's own."""
    try:
        as_float = float(value)
    except OverflowError:
        raise error(f"{flag} must be a number below 1e308") from None
    return int(value) if isinstance(value, Integral) else as_float


def _in_words(kinds: Sequence[Kind]) -> str:
    """Return what a value may be, as ``a text or a path``."""
    known = {str: "a text", Path: "a path", int: "a whole number", float: "a number", bool: "true or false"}
    *words, last = [known.get(kind.type) or f"a {kind.type.__name__}" for kind in kinds]
    return f"{', '.join(words)} or {last}" if words else last
