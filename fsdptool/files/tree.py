"""The node tree every reader works on: values as the consumer would see them, each with its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from fsdptool.files.text import SourceText

Kind = Literal["map", "list", "scalar"]

DEPTH_LIMIT = 64
NODE_LIMIT = 20_000
"""Nodes after aliases are expanded; a configuration has a few hundred, an alias bomb billions."""


@dataclass(slots=True, eq=False)
class Node:
    """One value.

    Attributes:
        kind: ``map``, ``list`` or ``scalar``.
        start, end: Characters ``[start, end)`` of the value in the text.
        value: Python value of a scalar, as PyYAML's SafeLoader (or ``json``) makes it.
        style: How a scalar is written: ``""`` plain, ``'``, ``"``, ``|``, ``>``.
        flow: Whether a collection is in flow style (JSON is).
        error: Why the value cannot be constructed (unknown tag, impossible date), or None.
    """

    kind: Kind
    start: int
    end: int
    value: Any = None
    style: str = ""
    flow: bool = False
    raw: str = ""
    entries: list[Entry] = field(default_factory=list)
    items: list[Node] = field(default_factory=list)
    error: str | None = None
    alias: bool = False
    """Whether the value was written elsewhere and only referred to here: never edited."""
    file: Included | None = None
    """The file that holds it, where the document only names that file: never edited."""

    def get(self, key: str) -> Entry | None:
        """Return the entry that wins for ``key``: the last one, as PyYAML and json decide."""
        for entry in reversed(self.entries):
            if entry.key == key:
                return entry
        return None


@dataclass(frozen=True, slots=True, eq=False)
class Included:
    """A file that a document names.

    Attributes:
        source: Its text.
        at: Where the document names it.
    """

    source: SourceText
    at: Node


@dataclass(slots=True, eq=False)
class Entry:
    """One ``key: value`` of a mapping. ``key`` is the key's Python value."""

    key: Any
    key_node: Node
    node: Node
    merged: bool = False
    """Whether it came through a YAML merge key (``<<``)."""


@dataclass(slots=True, eq=False)
class Document:
    """A parsed file: its root (None when empty) and the language it was parsed as."""

    root: Node | None
    language: Literal["yaml", "json", "toml", "env", "flags"]


class ParseError(Exception):
    """A text that is not YAML, JSON or TOML; ``index`` is where."""

    def __init__(self, code: str, message: str, index: int | None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.index = index


def to_python(node: Node) -> Any:
    """Return the plain Python value of a node (unconstructible scalars become their text)."""
    if node.kind == "map":
        return {entry.key: to_python(entry.node) for entry in effective_entries(node)}
    if node.kind == "list":
        return [to_python(item) for item in node.items]
    return node.value


def effective_entries(node: Node) -> list[Entry]:
    """Return one entry per key: merged ones give way, of duplicates the last wins."""
    # A dict keeps the place of the first occurrence, and accelerate resolves synonyms by that order.
    chosen: dict[Any, Entry] = {}
    for entry in sorted(node.entries, key=lambda entry: not entry.merged):
        chosen[entry.key] = entry
    return list(chosen.values())


def duplicates(node: Node) -> Iterator[tuple[Entry, Entry]]:
    """Yield each entry that a later one of the same key replaces, with the one that wins."""
    last: dict[Any, Entry] = {}
    own = [entry for entry in node.entries if not entry.merged]
    for entry in own:
        last[entry.key] = entry
    for entry in own:
        if last[entry.key] is not entry:
            yield entry, last[entry.key]


def walk(node: Node) -> Iterator[Node]:
    """Yield ``node`` and every node below it; what an alias refers to is yielded where it is written."""
    stack = [node]
    while stack:
        current = stack.pop()
        yield current
        if current.alias:
            continue
        stack.extend(entry.node for entry in reversed(current.entries))
        stack.extend(reversed(current.items))
