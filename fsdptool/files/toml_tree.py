"""TOML as the node tree: the values are ``tomllib``'s, the places are found in the text."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

from fsdptool.files.tree import DEPTH_LIMIT, NODE_LIMIT, Document, Entry, Node, ParseError

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
