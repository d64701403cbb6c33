"""How options are declared once: the command line, the Python function and the forms read one declaration.

A declaration is a ``TypedDict`` of ``Annotated[type, Option(...)]``. A function takes it as
``**options: Unpack[Declaration]`` and gets its signature and documentation from :func:`takes`; a command gets
its parameters from ``fsdptool.cli.options.takes``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import isfinite
from numbers import Integral
from typing import Any, TypeVar, cast, get_type_hints

from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.records.annotations import (
    Annotation,
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
    """Return a value within the type and the bounds of its option; one item for a list is a list of one.

    Args:
        item: The option.
        value: What is given for it.
        error: What is raised where the value has another type, or is a number beyond the option's bounds.
    """
    kinds, flag = set(item.types), item.flags[0]
    if isinstance(value, str) and kinds and kinds <= {int, float, bool}:
        expected = "true or false" if kinds == {bool} else "a number"
        raise error(f"{flag} must be {expected}, not the text {value!r}")
    if kinds == {int} and (isinstance(value, bool) or not isinstance(value, Integral)):
        raise error(f"{flag} must be a whole number, not {value!r}")
    bounds = item.option.bounds()
    if isinstance(value, int | float) and not permits(bounds, value):
        raise error(f"{flag} must be {bounds_text(bounds)}, not {value}")
    if isinstance(value, float) and not isfinite(value):
        raise error(f"{flag} must be a finite number, not {value}")
    shapes = {kind.shape for kind in item.annotation.kinds}
    if shapes == {Shape.MAPPING} and not isinstance(value, Mapping):
        raise error(f"{flag} must be a mapping of keys to values, not {value!r}")
    alone = isinstance(value, str) or not isinstance(value, Iterable)
    return (value,) if shapes == {Shape.LIST} and alone else value
