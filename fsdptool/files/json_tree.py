"""JSON as Python's ``json`` reads it, with the place of every value."""

from __future__ import annotations

import json
import re
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any

from fsdptool.files.text import SourceText
from fsdptool.files.tree import DEPTH_LIMIT, NODE_LIMIT, Document, Entry, Node, ParseError

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
