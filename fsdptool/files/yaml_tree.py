"""YAML 1.1 as PyYAML reads it, from parser events, with bounded depth and bounded aliases."""

from __future__ import annotations

import math
from typing import Any

import yaml

from fsdptool.files.tree import DEPTH_LIMIT, NODE_LIMIT, Document, Entry, Node, ParseError

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_RESOLVERS: Any = yaml.SafeLoader.yaml_implicit_resolvers
_CORE = "tag:yaml.org,2002:"
_MERGE = object()


def parse_yaml(text: str) -> Document:
    """Parse one YAML document.

    Raises:
        ParseError: The text is not YAML, has several documents, is nested deeper than
            ``DEPTH_LIMIT`` or expands to more than ``NODE_LIMIT`` nodes.
    """
    return _Composer(text).document()


class _Composer:
    """Turns the parser's events into nodes without recursion over the input."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.anchors: dict[str, Node] = {}
        self.sizes: dict[int, int] = {}
        self.nodes = 0

    def document(self) -> Document:
        root: Node | None = None
        documents = 0
        try:
            parser = _LOADER(self.text)
            try:
                while parser.check_event():
                    event: Any = parser.get_event()
                    if isinstance(event, yaml.DocumentStartEvent):
                        documents += 1
                        if documents > 1:
                            raise ParseError("FSD106", "the file holds several YAML documents", _start(event))
                        root = self._compose(parser)
            finally:
                parser.dispose()
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            magic = self.text.startswith("%%")
            why = "line 1 is a notebook's cell magic; remove it" if magic else _explain(error, self.text)
            raise ParseError("FSD104", f"not YAML: {why}", mark.index if mark else None) from error
        except yaml.YAMLError as error:
            position = getattr(error, "position", None)
            character = getattr(error, "character", None)
            why = f"the text holds U+{character:04X}" if isinstance(character, int) else _plain(error)
            raise ParseError("FSD104", f"not YAML: {why}", position) from error
        except UnicodeEncodeError as error:  # lone surrogates in the text
            raise ParseError("FSD104", "not YAML: the text holds a lone surrogate", error.start) from error
        if root is not None and root.kind == "scalar" and root.value is None and not root.raw:
            root = None
        return Document(root, "yaml")

    def _compose(self, parser: Any) -> Node:
        """Read events up to the end of the current document's root."""
        stack: list[tuple[Node, list[Node]]] = []
        while True:
            event = parser.get_event()
            done: Node | None = None
            if isinstance(event, yaml.ScalarEvent):
                done = self._count(self._scalar(event), event)
                self._anchor(event, done)
            elif isinstance(event, yaml.AliasEvent):
                done = self._alias(event)
            elif isinstance(event, yaml.MappingStartEvent | yaml.SequenceStartEvent):
                kind: Any = "map" if isinstance(event, yaml.MappingStartEvent) else "list"
                node = Node(kind, _start(event), _end(event), flow=bool(event.flow_style))
                if event.tag not in (None, "!", _CORE + "map", _CORE + "seq"):
                    node.error = f"the tag {event.tag} names something that is not loaded"
                self._count(node, event)
                if len(stack) >= DEPTH_LIMIT:
                    raise ParseError("FSD105", f"nested deeper than {DEPTH_LIMIT} levels", _start(event))
                stack.append((node, []))
                continue
            elif isinstance(event, yaml.MappingEndEvent | yaml.SequenceEndEvent):
                done, children = stack.pop()
                done.end = _end(event)
                self._close(done, children)
                self._anchor_collection(done)
            else:
                continue
            if not stack:
                return done
            stack[-1][1].append(done)

    def _count(self, node: Node, event: Any) -> Node:
        self.nodes += 1
        if self.nodes > NODE_LIMIT:
            raise ParseError("FSD105", f"more than {NODE_LIMIT:,} values", event.start_mark.index)
        if not isinstance(event, yaml.ScalarEvent) and event.anchor:
            self._pending(event.anchor, node)
        return node

    def _pending(self, name: str, node: Node) -> None:
        self.anchors[name] = node
        self.sizes[id(node)] = -1

    def _anchor(self, event: Any, node: Node) -> None:
        if event.anchor:
            self.anchors[event.anchor] = node
            self.sizes[id(node)] = 1

    def _anchor_collection(self, node: Node) -> None:
        if self.sizes.get(id(node)) == -1:
            self.sizes[id(node)] = _weight(node, self.sizes)

    def _alias(self, event: Any) -> Node:
        target = self.anchors.get(event.anchor)
        index = event.start_mark.index
        if target is None:
            raise ParseError("FSD104", f"not YAML: the alias *{event.anchor} is not defined", index)
        size = self.sizes[id(target)]
        if size < 0:
            raise ParseError("FSD105", f"the alias *{event.anchor} contains itself", index)
        self.nodes += size
        if self.nodes > NODE_LIMIT:
            raise ParseError("FSD105", f"aliases expand to more than {NODE_LIMIT:,} values", index)
        copy = Node(
            target.kind,
            index,
            event.end_mark.index,
            target.value,
            target.style,
            target.flow,
            target.raw,
            target.entries,
            target.items,
            target.error,
            alias=True,
        )
        self.sizes[id(copy)] = size
        return copy

    def _scalar(self, event: Any) -> Node:
        raw: str = event.value
        style = event.style or ""
        node = Node("scalar", event.start_mark.index, event.end_mark.index, style=style, raw=raw)
        tag = event.tag
        if tag is None or tag == "!":
            tag = _implicit_tag(raw) if event.implicit[0] else _CORE + "str"
        try:
            node.value = _construct(tag, raw)
        except (ValueError, TypeError, OverflowError, yaml.YAMLError) as error:
            node.value = raw
            node.error = f"{tag.removeprefix(_CORE)} {raw[:40]!r} is not valid: {_plain(error)}"
        return node

    def _close(self, node: Node, children: list[Node]) -> None:
        if node.kind == "list":
            node.items = children
            return
        for key, value in zip(children[0::2], children[1::2], strict=True):
            if key.value is _MERGE:
                self._merge(node, key, value)
            elif key.kind != "scalar":
                raise ParseError("FSD104", "not usable YAML: a key is a list or a mapping", key.start)
            else:
                node.entries.append(Entry(key.value, key, value))

    def _merge(self, node: Node, key: Node, value: Node) -> None:
        sources = value.items if value.kind == "list" else [value]
        for source in sources:
            if source.kind != "map":
                raise ParseError("FSD104", "not YAML: << merges something that is not a mapping", key.start)
            for entry in source.entries:
                node.entries.append(Entry(entry.key, entry.key_node, entry.node, merged=True))
                self.nodes += 1
        if self.nodes > NODE_LIMIT:
            raise ParseError("FSD105", f"aliases expand to more than {NODE_LIMIT:,} values", key.start)


def _start(event: Any) -> int:
    return int(event.start_mark.index)


def _end(event: Any) -> int:
    return int(event.end_mark.index)


def _weight(node: Node, sizes: dict[int, int]) -> int:
    total = 0
    stack = [node]
    while stack:
        current = stack.pop()
        if current is not node and current.alias:
            total += sizes.get(id(current), 1)
            continue
        total += 1
        stack.extend(entry.node for entry in current.entries)
        stack.extend(current.items)
    return total


def _implicit_tag(raw: str) -> str:
    for tag, pattern in _RESOLVERS.get(raw[:1] if raw else "", ()):
        if pattern.match(raw):
            return str(tag)
    return _CORE + "str"


_BOOLEANS = {"yes": True, "no": False, "true": True, "false": False, "on": True, "off": False}


def _construct(tag: str, raw: str) -> Any:
    """Build a scalar as ``yaml.constructor.SafeConstructor`` (PyYAML 6.0.3) does."""
    name = tag.removeprefix(_CORE)
    if name == "str":
        return raw
    if name == "bool":
        return _BOOLEANS[raw.lower()]
    if name == "null":
        return None
    if name == "merge":
        return _MERGE
    if name == "value":
        return raw
    if name == "int":
        return _integer(raw)
    if name == "float":
        return _float(raw)
    node = yaml.ScalarNode(tag, raw)
    loader = yaml.SafeLoader("")
    if tag not in loader.yaml_constructors:
        raise ValueError(f"the tag {tag} names something that is not loaded")
    return loader.construct_object(node)


def _integer(raw: str) -> int:
    text = raw.replace("_", "")
    sign = -1 if text.startswith("-") else 1
    text = text.lstrip("+-") if text[:1] in "+-" else text
    if (
        len(text) > 3500
    ):  # Python prints no int of more than 4,300 digits, and 3,500 hexadecimal ones make 4,215
        raise ValueError("too many digits")
    if text == "0":
        return 0
    if text.startswith("0b"):
        return sign * int(text[2:], 2)
    if text.startswith("0x"):
        return sign * int(text[2:], 16)
    if ":" in text:
        return sign * _sexagesimal(text)
    if text.startswith("0"):
        return sign * int(text, 8)
    return sign * int(text)


def _sexagesimal(text: str) -> int:
    total = 0
    for part in text.split(":"):
        total = total * 60 + int(part)
    return total


def _float(raw: str) -> float:
    text = raw.replace("_", "").lower()
    sign = -1.0 if text.startswith("-") else 1.0
    text = text.lstrip("+-") if text[:1] in ("+", "-") else text
    if text == ".inf":
        return sign * math.inf
    if text == ".nan":
        return math.nan
    if ":" in text:
        total = 0.0
        for part in text.split(":"):
            total = total * 60 + float(part)
        return sign * total
    return sign * float(text)


def _plain(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]


_TAB = "a tab indents this line; YAML indents with spaces only"
_PROBLEMS = {
    "found a tab character that violates indentation": _TAB,
    "mapping values are not allowed in this context": (
        "this colon does not belong here: put the value in quotes, or mend the indentation"
    ),
    "did not find expected key": "this line is not indented as the lines that it belongs to",
}
"""What the parser's words for the commonest mistakes mean to somebody who wrote a file."""


def _explain(error: yaml.MarkedYAMLError, text: str) -> str:
    problem, mark = error.problem or "", error.problem_mark
    if mark is not None and "cannot start any token" in problem:
        character = text[mark.index : mark.index + 1]
        return _TAB if character == "\t" else f"a value cannot start with {character!r}: put it in quotes"
    if problem == "did not find expected key" and mark is not None:
        start = text.rfind("\n", 0, mark.index) + 1
        if text[start : mark.index].strip():
            return "text stands behind a closed value: put all of it in quotes, and double a ' within '...'"
    if problem in _PROBLEMS:
        return _PROBLEMS[problem]
    parts = [part for part in (error.context, error.problem) if part]
    return " ".join(" ".join(parts).split())[:160]
