"""What an interpreter keeps: names, conditions, events, and how two branches of a script join."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from fsdptool.scripts.values import Choice, Condition, Const, Event, Library, Scope, Table, Thing, Value

STEPS = 60_000
"""Expressions and statements after which a script is given up: nothing is reported of it."""

_MISSING: Any = object()


class TooLongError(Exception):
    """A script takes more steps than are allowed."""


class ScriptState:
    """The state of the interpretation of a script."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.module = Scope({})
        self.scope = self.module
        self.guards: list[Condition] = []
        self.contexts: list[Value] = []
        self.loops: list[ast.AST] = []
        self.stack: list[ast.AST] = []
        self.tries: list[ast.Try] = []
        self.stars: list[str] = []
        self.called: set[ast.AST] = set()
        self.steps = 0
        self._journal: list[tuple[dict[Any, Value], Any, Any]] = []
        self._order = 0
        self._keyed: dict[int, dict[Any, Value]] = {}

    def count(self) -> None:
        """Count a step.

        Raises:
            TooLongError: There were too many.
        """
        self.steps += 1
        if self.steps > STEPS:
            raise TooLongError

    def emit(
        self,
        kind: str,
        name: str,
        node: ast.AST,
        *,
        target: Value | None = None,
        args: Sequence[Value] = (),
        keywords: Mapping[str, Value] | None = None,
        places: Mapping[str, ast.AST] | None = None,
        partly: bool = False,
        result: Value | None = None,
    ) -> Event:
        """Record an event and return it."""
        self._order += 1
        event = Event(
            kind, name, node, target, tuple(args), keywords or {}, places or {}, partly, result,
            tuple(self.guards), tuple(self.contexts), tuple(self.loops), tuple(self.stack), tuple(self.tries),
            self._order,
        )  # fmt: skip
        self.events.append(event)
        return event

    def store(self, where: dict[Any, Value], key: Any, value: Value) -> None:
        """Bind a name or an attribute, so that a branch can be taken back."""
        self._journal.append((where, key, where.get(key, _MISSING)))
        where[key] = value

    def drop(self, where: dict[Any, Value], key: Any) -> None:
        """Take a name or a key away, so that a branch can be taken back."""
        self._journal.append((where, key, where.pop(key)))

    def store_item(self, table: Table, key: Any, value: Value, node: ast.AST) -> None:
        """Set a key of a dictionary, which a branch that does not set it may leave without."""
        self._keyed[id(table.items)] = table.items
        self.store(table.items, key, value)
        table.nodes[key] = node

    def drop_item(self, table: Table, key: Any) -> None:
        """Take a key of a dictionary away, which a branch that does not do so may leave there."""
        self._keyed[id(table.items)] = table.items
        self.drop(table.items, key)

    def unsure(self, table: Table, node: ast.AST) -> None:
        """Leave open what a dictionary holds: keys that are not known are set or taken away."""
        table.whole = False
        for key, value in list(table.items.items()):
            self.count()
            if not is_there(value):
                continue
            self.store_item(table, key, joined((value, absent(node))), table.nodes.get(key, node))

    def take_back(self, mark: int) -> dict[tuple[int, Any], tuple[dict[Any, Value], Any]]:
        """Undo what was stored since a mark; return what each place held."""
        changed: dict[tuple[int, Any], tuple[dict[Any, Value], Any]] = {}
        while len(self._journal) > mark:
            where, key, old = self._journal.pop()
            changed.setdefault((id(where), key), (where, where.get(key, _MISSING)))
            if old is _MISSING:
                where.pop(key, None)
            else:
                where[key] = old
        return changed

    @property
    def mark(self) -> int:
        """Return where the journal is."""
        return len(self._journal)

    def join(self, branches: Sequence[tuple[Callable[[], bool], Condition | None]], *, by_rank: bool) -> bool:
        """Run branches of which one happens, each from the same state, and join what they leave.

        Args:
            branches: What runs a branch (it returns whether the branch ends the block), and its condition.
            by_rank: Whether the rank decides.

        Returns:
            Whether every branch ends the block.
        """
        left, ended = [], []
        for run, guard in branches:
            mark = self.mark
            with self.under(guard):
                ended.append(run())
            left.append(self.take_back(mark))
        alive = [changes for changes, end in zip(left, ended, strict=True) if not end]
        for place in {place: None for changes in alive for place in changes}:
            where, key = next((changes[place][0], place[1]) for changes in alive if place in changes)
            old = where.get(key, _MISSING)
            values = [changes[place][1] if place in changes else old for changes in alive]
            known = [value for value in values if value is not _MISSING]
            if len(known) < len(values) and id(where) in self._keyed:
                if not known:
                    if key in where:
                        self.drop(where, key)
                    continue
                known.append(absent(ast.Pass()))
            self.store(where, key, joined(known, by_rank))
        return all(ended)

    @contextmanager
    def under(self, guard: Condition | None) -> Iterator[None]:
        """Enter a condition; conditions that arise inside end with it."""
        depth = len(self.guards)
        if guard is not None:
            self.guards.append(guard)
        try:
            yield
        finally:
            del self.guards[depth:]

    def find(self, name: str) -> Value | None:
        """Return what a name stands for, or None."""
        scope: Scope | None = self.scope
        while scope is not None:
            if name in scope.names:
                return scope.names[name]
            scope = scope.outer
        return None


def absent(node: ast.AST) -> Thing:
    """Return what stands in a dictionary for a key that it may lack."""
    return Thing("unknown", label="absent", node=node)


def is_there(value: Value) -> bool:
    """Say whether a key of a dictionary is certainly there, by what stands for its value."""
    options = value.options if isinstance(value, Choice) else (value,)
    return not any(isinstance(item, Thing) and item.label == "absent" for item in options)


def joined(values: Sequence[Value], by_rank: bool = False) -> Value:
    """Return a value that is one of several."""
    unique: list[Value] = []
    for value in values:
        if not any(same(value, other) for other in unique):
            unique.append(value)
    if not unique:
        return Thing("unknown")
    if len(unique) == 1:
        return unique[0]
    tags = frozenset({"rank"}) if by_rank else frozenset()
    tags |= frozenset().union(*(value.tags - {"one", "rest"} for value in unique))
    return Choice(tuple(unique), by_rank, tags=tags, sources=tuple(unique))


def same(one: Value, two: Value) -> bool:
    """Say whether two values are certainly the same."""
    if one is two:
        return True
    if isinstance(one, Const) and isinstance(two, Const):
        return type(one.value) is type(two.value) and one.value == two.value
    return isinstance(one, Library) and isinstance(two, Library) and one.name == two.name
