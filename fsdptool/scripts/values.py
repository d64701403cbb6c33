"""What the names of a script stand for, and what the script does with them, as far as its text says."""

from __future__ import annotations

import ast
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeGuard


@dataclass(eq=False)
class Value:
    """Something that a script computes.

    Attributes:
        tags: What it depends on: ``rank``, ``world`` (the number of ranks), ``one`` (a test that one rank
            passes), ``rest`` (a test that one rank fails), ``initialised`` and ``meta``.
        sources: What it was computed from.
    """

    tags: frozenset[str] = field(default=frozenset(), kw_only=True)
    sources: tuple[Value, ...] = field(default=(), kw_only=True)


@dataclass(eq=False)
class Const(Value):
    """A constant."""

    value: object


@dataclass(eq=False)
class Library(Value):
    """Something that was imported, by its dotted name."""

    name: str


@dataclass(eq=False)
class Items(Value):
    """A list, tuple or set whose items are known.

    Attributes:
        values: The items.
        whole: Whether there are certainly these, and no further ones.
    """

    values: list[Value]
    whole: bool = True


@dataclass(eq=False)
class Table(Value):
    """A dictionary with constant keys.

    Attributes:
        items: Its values.
        nodes: Where each key is written.
        whole: Whether there are no further keys.
    """

    items: dict[object, Value]
    nodes: dict[object, ast.AST]
    whole: bool = True


@dataclass(eq=False)
class Scope:
    """The names of a module or of a call of a function."""

    names: dict[str, Value]
    outer: Scope | None = None
    globals: set[str] = field(default_factory=set)


def outermost(scope: Scope) -> Scope:
    """Return the names of the module that a scope belongs to."""
    while scope.outer is not None:
        scope = scope.outer
    return scope


@dataclass(eq=False)
class Function(Value):
    """A function of the script, perhaps bound to an object."""

    node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    scope: Scope
    bound: Value | None = None


@dataclass(eq=False)
class Class(Value):
    """A class of the script."""

    node: ast.ClassDef
    scope: Scope
    bases: tuple[Value, ...] = ()
    methods: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)

    def lookup(self, name: str) -> tuple[Class, ast.FunctionDef | ast.AsyncFunctionDef] | None:
        """Return a method and the class that defines it, or None."""
        for owner in self.line():
            if name in owner.methods:
                return owner, owner.methods[name]
        return None

    def line(self, depth: int = 0) -> Iterator[Class]:
        """Yield the class and those of the script that it inherits from."""
        yield self
        if depth < 8:
            for base in self.bases:
                if isinstance(base, Class):
                    yield from base.line(depth + 1)

    @property
    def library_bases(self) -> tuple[str, ...]:
        """Names of the classes of libraries that it inherits from."""
        return tuple(base.name for owner in self.line() for base in owner.bases if isinstance(base, Library))


@dataclass(eq=False)
class Partial(Value):
    """A function with some of its arguments."""

    function: Value
    args: tuple[Value, ...]
    keywords: Mapping[str, Value]


@dataclass(eq=False)
class Choice(Value):
    """One of several values; which one is decided at run time, perhaps by the rank."""

    options: tuple[Value, ...]
    by_rank: bool = False


@dataclass(eq=False)
class Thing(Value):
    """An object, with its identity.

    Attributes:
        kind: Name of what made it (``FullyShardedDataParallel``), or ``attribute``, ``item``, ``parameter``,
            ``result`` of a method, ``binary``, ``test``, ``text``, ``unknown``.
        label: Name of the attribute, method or parameter.
        node: Where it was made.
        parent: The object that it is a part of.
        inner: What it wraps or goes through.
        owner: Its class, if that is in the script.
        args, keywords: What it was made with.
        parts: Its attributes and items.
        seen: Names of the attributes that the script reads.
        outside: Whether a library that is not known made it.
        annotation: What the script says that a parameter is.
    """

    kind: str
    label: str = ""
    node: ast.AST | None = None
    parent: Thing | None = None
    inner: Value | None = None
    owner: Class | None = None
    args: tuple[Value, ...] = ()
    keywords: Mapping[str, Value] = field(default_factory=dict)
    parts: dict[object, Value] = field(default_factory=dict)
    seen: set[str] = field(default_factory=set)
    outside: bool = False
    annotation: str = ""


@dataclass(frozen=True, eq=False)
class Condition:
    """A condition under which something happens.

    Attributes:
        node: The statement that decides.
        branch: Whether its test holds.
        one_rank: Whether a single rank comes here.
        depth: Number of calls around it.
        test: The value of its test.
    """

    node: ast.AST
    branch: bool
    one_rank: bool
    depth: int
    test: Value | None = None


@dataclass(frozen=True, eq=False)
class Event:
    """Something that the script does.

    Attributes:
        kind: ``call`` of a library's function, ``method``, ``use`` (an object is called), ``local`` (a
            function of the script is called), ``iterate``, ``attribute`` (is read), ``store`` (is written),
            ``format``, ``import``, ``compare``, ``environment`` (is written), ``delete``.
        name: Name of the function, method, attribute or module.
        node: Its place.
        target: What a method is called on, or what is iterated.
        args, keywords: Arguments.
        places: Where each keyword is written.
        partly: Whether there are arguments that are not known.
        result: What it yields.
        guards, contexts: Conditions and ``with`` blocks around it.
        loops: Loops around it.
        stack: Calls of the script's functions that lead to it.
        tries: ``try`` statements in whose body it is.
        order: Its position in time.
    """

    kind: str
    name: str
    node: ast.AST
    target: Value | None
    args: tuple[Value, ...]
    keywords: Mapping[str, Value]
    places: Mapping[str, ast.AST]
    partly: bool
    result: Value | None
    guards: tuple[Condition, ...]
    contexts: tuple[Value, ...]
    loops: tuple[ast.AST, ...]
    stack: tuple[ast.AST, ...]
    tries: tuple[ast.Try, ...]
    order: int

    @property
    def argument(self) -> Value | None:
        """Return the first argument, or None."""
        return self.args[0] if self.args else None

    def get(self, keyword: str, position: int | None = None) -> Value | None:
        """Return an argument by its name or position, or None."""
        if keyword in self.keywords:
            return self.keywords[keyword]
        return self.args[position] if position is not None and position < len(self.args) else None

    @property
    def one_rank(self) -> Condition | None:
        """Return the guard that lets a single rank pass, or None."""
        return next((guard for guard in self.guards if guard.one_rank), None)


def precedes(first: Event, second: Event) -> bool:
    """Say whether an event certainly happened whenever another, later one does."""
    if first.order >= second.order or len(first.guards) > len(second.guards):
        return False
    return all(
        one.node is two.node and one.branch == two.branch
        for one, two in zip(first.guards, second.guards, strict=False)
    )


def flat(value: Value | None, depth: int = 0) -> Iterator[Value]:
    """Yield a value, and what lists, tables and choices hold."""
    if value is None or depth > 6:
        return
    yield value
    inside: tuple[Value, ...] = ()
    if isinstance(value, Items):
        inside = tuple(value.values)
    elif isinstance(value, Table):
        inside = tuple(value.items.values())
    elif isinstance(value, Choice):
        inside = value.options
    for item in inside:
        yield from flat(item, depth + 1)


def origins(value: Value | None, limit: int = 400) -> Iterator[Value]:
    """Yield a value and everything that it was computed from, each once."""
    waiting, seen = list(flat(value)), set[int]()
    while waiting and limit:
        item = waiting.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        limit -= 1
        yield item
        for source in item.sources:
            waiting.extend(flat(source))
        if isinstance(item, Thing):
            waiting.extend(part for part in (item.inner, item.parent) if part is not None)


def constant(value: Value | None) -> object:
    """Return the value of a constant; None for everything else (and for None)."""
    return value.value if isinstance(value, Const) else None


def is_key(value: Value | None) -> TypeGuard[Const]:
    """Say whether a value is a constant that may be a key: no list of words."""
    return isinstance(value, Const) and isinstance(value.value, Hashable)


def is_constant(value: Value | None, wanted: object) -> bool:
    """Say whether a value is a certain constant; True is not 1."""
    return isinstance(value, Const) and value.value == wanted and type(value.value) is type(wanted)


def made_by(value: Value | None, *kinds: str) -> Thing | None:
    """Return an object if one of these made it, else None."""
    return value if isinstance(value, Thing) and value.kind in kinds else None
