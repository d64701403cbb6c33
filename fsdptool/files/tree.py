"""The node tree every reader works on: values as the consumer would see them, each with its place.

JSON is read as Python's ``json`` reads it. TOML's values are those of ``tomllib``; their places are found in
the text. YAML has a module of its own.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import TYPE_CHECKING, Any, Literal

from fsdptool.files.text import SourceText

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


_SPACE = re.compile(r"[ \t\n\r]*")
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {
    "true": True,
    "false": False,
    "null": None,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}


def parse_json_source(source: SourceText) -> Document:
    """Parse a JSON file, which Python's ``json`` refuses behind a byte-order mark.

    Raises:
        ParseError: As :func:`parse_json`.
    """
    if source.bom:
        raise ParseError("FSD104", "not JSON to Python: the file begins with a byte-order mark", 0)
    return parse_json(source.text)


def parse_json(text: str) -> Document:
    """Parse one JSON document.

    Raises:
        ParseError: Not JSON, nested deeper than ``DEPTH_LIMIT`` or over ``NODE_LIMIT`` values.
    """
    scanner = _Scanner(text)
    index = scanner.space(0)
    if index == len(text):
        raise ParseError("FSD104", "not JSON: the file is empty", 0)
    root, index = scanner.value(index, 0)
    index = scanner.space(index)
    if index != len(text):
        raise ParseError("FSD104", "not JSON: something follows the value", index)
    return Document(root, "json")


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text = text
        self.nodes = 0

    def space(self, index: int) -> int:
        match = _SPACE.match(self.text, index)
        return match.end() if match else index

    def value(self, index: int, depth: int) -> tuple[Node, int]:
        if depth > DEPTH_LIMIT:
            raise ParseError("FSD105", f"nested deeper than {DEPTH_LIMIT} levels", index)
        self.nodes += 1
        if self.nodes > NODE_LIMIT:
            raise ParseError("FSD105", f"more than {NODE_LIMIT:,} values", index)
        character = self.text[index : index + 1]
        if character == "{":
            return self._object(index, depth)
        if character == "[":
            return self._array(index, depth)
        if character == '"':
            return self._string(index)
        for word, value in _WORDS.items():
            if self.text.startswith(word, index):
                return Node("scalar", index, index + len(word), value, raw=word), index + len(word)
        return self._number(index)

    def _number(self, index: int) -> tuple[Node, int]:
        match = _NUMBER.match(self.text, index)
        if match is None:
            text = self.text[index : index + 12].split("\n", maxsplit=1)[0]
            raise ParseError("FSD104", f"not JSON: a value was expected, found {text!r}", index)
        raw = match.group()
        try:
            value: Any = float(raw) if match.group(2) or match.group(3) else int(raw)
        except ValueError as error:
            raise ParseError("FSD104", f"not JSON: {error}", index) from error
        return Node("scalar", index, match.end(), value, raw=raw), match.end()

    def _string(self, index: int) -> tuple[Node, int]:
        try:
            value, end = scanstring(self.text, index + 1, True)
        except json.JSONDecodeError as error:
            raise ParseError("FSD104", f"not JSON: {error.msg.lower()}", error.pos) from error
        return Node("scalar", index, end, value, style='"', raw=value), end

    def _object(self, start: int, depth: int) -> tuple[Node, int]:
        node = Node("map", start, start, flow=True)
        index = self.space(start + 1)
        if self.text.startswith("}", index):
            node.end = index + 1
            return node, node.end
        while True:
            if not self.text.startswith('"', index):
                raise ParseError("FSD104", "not JSON: a key in double quotes was expected", index)
            key, index = self._string(index)
            index = self.space(index)
            if not self.text.startswith(":", index):
                raise ParseError("FSD104", "not JSON: ':' was expected", index)
            value, index = self.value(self.space(index + 1), depth + 1)
            node.entries.append(Entry(key.value, key, value))
            index, closed = self._next(index, "}")
            if closed:
                node.end = index
                return node, index

    def _array(self, start: int, depth: int) -> tuple[Node, int]:
        node = Node("list", start, start, flow=True)
        index = self.space(start + 1)
        if self.text.startswith("]", index):
            node.end = index + 1
            return node, node.end
        while True:
            value, index = self.value(index, depth + 1)
            node.items.append(value)
            index, closed = self._next(index, "]")
            if closed:
                node.end = index
                return node, index

    def _next(self, index: int, closing: str) -> tuple[int, bool]:
        index = self.space(index)
        if self.text.startswith(closing, index):
            return index + 1, True
        if not self.text.startswith(",", index):
            raise ParseError("FSD104", f"not JSON: ',' or '{closing}' was expected", index)
        return self.space(index + 1), False


_HEADER = re.compile(r"[ \t]*\[\[?[ \t]*([^\]\n]+?)[ \t]*\]\]?[ \t]*(?:#[^\n]*)?(?:\n|$)")
_KEY = re.compile(r"""[ \t]*((?:"[^"\n]*"|'[^'\n]*'|[\w.\- \t])+?)[ \t]*=[ \t]*""")
_PART = re.compile(r""""([^"]*)"|'([^']*)'|([\w-]+)""")
_STRING = re.compile(r'"""(?:[^\\]|\\.)*?"""|\'\'\'.*?\'\'\'|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'', re.DOTALL)
_AT_LINE = re.compile(r"at line (\d+), column (\d+)")


def parse_toml(text: str) -> Document:
    """Return the tree of a TOML file. What is not written as ``key = value`` in a table is never edited.

    Raises:
        ParseError: It is not TOML, is nested too deeply or has too many values.
    """
    try:
        data = tomllib.loads(text.replace("\r\n", "\n"))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        place = _AT_LINE.search(str(error))
        raise ParseError("FSD104", f"not TOML: {error}", _index(text, place)) from error
    places: dict[tuple[str, ...], tuple[int, int, int, int]] = {}
    tables: dict[tuple[str, ...], tuple[int, int]] = {}
    for path, key, value in _lines(text):
        if value is None:
            tables.setdefault(path, key)
        else:
            places.setdefault(path, (*key, *value))
    budget = [NODE_LIMIT]
    root = _node(text, data, (), 0, (0, len(text)), places, tables, budget)
    return Document(root if root.entries else None, "toml")


def _index(text: str, place: re.Match[str] | None) -> int:
    if place is None:
        return 0
    before = text.split("\n")[: int(place.group(1)) - 1]
    return min(sum(len(line) + 1 for line in before) + int(place.group(2)) - 1, len(text))


def _lines(text: str) -> Iterator[tuple[tuple[str, ...], tuple[int, int], tuple[int, int] | None]]:
    """Yield tables and keys: their path, the span of the name, and the span of the value (None: a table)."""
    section: tuple[str, ...] = ()
    index = 0
    while index < len(text):
        header, key = _HEADER.match(text, index), _KEY.match(text, index)
        if header is not None:
            section = _path(header.group(1))
            yield section, header.span(1), None
            index = header.end()
        elif key is not None:
            end = _value_end(text, key.end())
            yield (*section, *_path(key.group(1))), key.span(1), (key.end(), end)
            newline = text.find("\n", end)
            index = newline + 1 if newline >= 0 else len(text)
        else:
            newline = text.find("\n", index)
            index = newline + 1 if newline >= 0 else len(text)


def _path(name: str) -> tuple[str, ...]:
    return tuple(next(part for part in match.groups() if part is not None) for match in _PART.finditer(name))


def _value_end(text: str, index: int) -> int:
    """Return the end of the value at ``index``: a newline or comment outside brackets and quotes ends it."""
    depth = 0
    end = index
    while index < len(text):
        character = text[index]
        string = _STRING.match(text, index)
        if string is not None:
            index = end = string.end()
            continue
        if character == "#":
            newline = text.find("\n", index)
            index = newline if newline >= 0 else len(text)
            if depth == 0:
                break
            continue
        if character == "\n" and depth == 0:
            break
        depth += (character in "[{") - (character in "]}")
        index += 1
        if not character.isspace():
            end = index
    return end


def _node(
    text: str,
    value: Any,
    path: tuple[str, ...],
    depth: int,
    span: tuple[int, int],
    places: dict[tuple[str, ...], tuple[int, int, int, int]],
    tables: dict[tuple[str, ...], tuple[int, int]],
    budget: list[int],
) -> Node:
    budget[0] -= 1
    if depth > DEPTH_LIMIT or budget[0] < 0:
        raise ParseError("FSD105", "nested too deeply, or too many values", span[0])
    start, end = span
    if isinstance(value, dict):
        node = Node("map", start, end)
        for key, item in value.items():
            inner = (*path, key)
            written = places.get(inner)
            head = written[:2] if written else tables.get(inner, span)
            below = written[2:] if written else head
            name = Node("scalar", *head, key, raw=key, alias=written is None)
            child = _node(text, item, inner, depth + 1, below, places, tables, budget)
            child.alias = child.kind == "scalar" and written is None
            node.entries.append(Entry(key, name, child, merged=written is None and child.kind == "scalar"))
        return node
    if isinstance(value, list):
        node = Node("list", start, end, flow=True)
        node.items = [_node(text, item, (), depth + 1, span, places, tables, budget) for item in value]
        for item in node.items:
            item.alias = True
        return node
    raw = text[start:end]
    style = raw[0] if raw[:1] in ("'", '"') else ""
    plain = value if isinstance(value, str | int | float | bool) else str(value)
    return Node("scalar", start, end, plain, style=style, raw=raw)
