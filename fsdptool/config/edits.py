"""Edits to spans of a text that leave comments, order, quoting and line endings alone.

Every function returns None where the text's form does not allow the edit (aliases, merge keys,
several keys on one line): such a finding then has no fix, rather than a wrong one.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fsdptool.files.text import SourceText
from fsdptool.files.tree import Document, Entry, Node, ParseError
from fsdptool.records.diagnostic import Edit, apply_edits


def last_index(node: Node) -> int:
    """Return the end of the node's own characters (a block collection's mark lies beyond it)."""
    if node.alias or node.flow or node.kind == "scalar":
        return node.end
    ends = [last_index(entry.node) for entry in node.entries if not entry.merged]
    ends += [entry.key_node.end for entry in node.entries if not entry.merged]
    ends += [last_index(item) for item in node.items]
    return max(ends, default=node.start)


def scalar_text(value: Any, language: str = "yaml", style: str = "") -> str:
    """Return ``value`` as a scalar (or a flow list) in YAML, JSON or TOML, quoted where it must be."""
    if isinstance(value, tuple):
        value = list(value)
    if language in ("json", "toml"):
        return json.dumps(value, ensure_ascii=False)
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        return "[" + ", ".join(scalar_text(item, language) for item in value) + "]"
    import yaml

    text = str(value)
    if style in ("'", '"') and text.isprintable() and not set(text) & {"'", '"', "\\"}:
        return f"{style}{text}{style}"
    dumped: str = yaml.safe_dump(text, width=10**6, allow_unicode=True, default_flow_style=True)
    return dumped.removesuffix("\n").removesuffix("\n...").removesuffix("...").rstrip("\n")


_YAML_BREAKS = "\x85\u2028\u2029"
"""Characters that end a line in YAML 1.1 besides carriage return and newline (PyYAML 6, scanner.py)."""

_BREAKS = ("\n", "\r", *_YAML_BREAKS)


class Editor:
    """Makes edits against one parsed text."""

    def __init__(self, source: SourceText, document: Document) -> None:
        # YAML ends lines where other languages do not: an edit by lines must see the same ones.
        self.source = replace(source, breaks=_YAML_BREAKS) if document.language == "yaml" else source
        self.text = source.text
        self.language = document.language

    def _spans_lines(self, node: Node) -> bool:
        return self.source.place(node.start)[0] != self.source.place(node.end)[0]

    def replace(self, node: Node, value: Any) -> tuple[Edit, ...] | None:
        """Replace a value, keeping its quotes when it is text."""
        if node.file is not None or node.alias or node.style in ("|", ">"):
            return None
        if node.kind != "scalar" and not node.flow:
            return None
        if self._spans_lines(node) and not node.flow:
            return None
        if self.language in ("env", "flags"):
            text = str(value).lower() if isinstance(value, bool) else str(value)
            before = self.text[node.start - 1 : node.start]
            gap = " " if node.start == node.end and self.language == "flags" and before not in " =" else ""
            return (Edit(node.start, node.end, gap + text),)
        written = scalar_text(value, self.language, node.style)
        if node.start == node.end:  # `key:` without a value
            before = self.text[node.start - 1 : node.start]
            return (Edit(node.start, node.end, ("" if before.isspace() else " ") + written),)
        return (Edit(node.start, node.end, written),)

    def replace_entry(self, entry: Entry, value: Any) -> tuple[Edit, ...] | None:
        """Replace an entry's value, which may be a list over several lines (None if that holds comments)."""
        node = entry.node
        if node.kind != "list" or node.flow or node.alias or node.file is not None:
            return self.replace(node, value)
        colon = self.text.find(":", entry.key_node.end)
        end = last_index(node)
        if colon < 0 or "#" in self.text[colon:end]:
            return None
        return (Edit(colon + 1, end, " " + scalar_text(value, self.language)),)

    def rename(self, entry: Entry, key: str) -> tuple[Edit, ...] | None:
        """Give an entry another key."""
        node = entry.key_node
        if entry.merged or node.alias or node.file is not None or self._spans_lines(node):
            return None
        if self.language in ("env", "toml"):  # a key of TOML is bare where it can be
            return (Edit(node.start, node.end, key),)
        if self.language == "flags":
            return (Edit(node.start, node.end, f"--{key}"),)
        return (Edit(node.start, node.end, scalar_text(key, self.language, node.style)),)

    def remove(self, parent: Node | None, entry: Entry) -> tuple[Edit, ...] | None:
        """Remove an entry: its whole lines in block style, its share of the commas in flow style."""
        if parent is None or parent.alias or entry not in parent.entries:
            return None
        if entry.merged or parent.file is not None or self.language == "flags":
            return None
        return self._remove_flow(parent, entry) if parent.flow else self._remove_block(entry)

    def _remove_block(self, entry: Entry) -> tuple[Edit, ...] | None:
        line, _ = self.source.place(entry.key_node.start)
        start = self.source.line_start(line)
        if self.text[start : entry.key_node.start].strip():
            return None
        end = max(last_index(entry.node), entry.key_node.end)
        if self.text[:end].endswith(_BREAKS) and end > entry.key_node.end:
            return (Edit(start, end, ""),)  # block scalars end behind their newline
        last, _ = self.source.place(end)
        rest = self.source.line(last)[end - self.source.line_start(last) :]
        if rest.strip() not in ("", ":") and not rest.lstrip().lstrip(":").lstrip().startswith("#"):
            return None
        if last < self.source.line_count:
            return (Edit(start, self.source.line_start(last + 1), ""),)
        # The last line has no newline; take the one before it, so that the text still has none.
        cut = start
        if self.text[:cut].endswith("\r\n"):
            cut -= 2
        elif self.text[:cut].endswith(_BREAKS):
            cut -= 1
        return (Edit(cut, len(self.text), ""),)

    def _remove_flow(self, parent: Node, entry: Entry) -> tuple[Edit, ...] | None:
        entries = sorted((item for item in parent.entries if not item.merged), key=lambda e: e.key_node.start)
        at = entries.index(entry)
        if at + 1 < len(entries):
            return (Edit(entry.key_node.start, entries[at + 1].key_node.start, ""),)
        if at > 0:
            return (Edit(last_index(entries[at - 1].node), last_index(entry.node), ""),)
        return (Edit(entry.key_node.start, last_index(entry.node), ""),)

    def add(
        self, parent: Node | None, entry: Entry | None, values: dict[str, Any]
    ) -> tuple[Edit, ...] | None:
        """Add keys at the end of a mapping.

        Args:
            parent: The mapping; a null value counts as an empty one.
            entry: The entry whose value ``parent`` is, or None for the root.
            values: Keys and values; a dict value becomes a nested block.
        """
        if parent is None or not values or self.language in ("env", "flags"):
            return None
        if self.language == "toml":
            return self._add_toml(parent, values)
        if parent.alias or parent.file is not None:
            return None
        if parent.kind == "map" and parent.flow:
            return self._add_flow(parent, values)
        if parent.kind == "map" and parent.entries:
            own = [item for item in parent.entries if not item.merged]
            if not own:
                return None
            column = self.source.place(own[0].key_node.start)[1] - 1
            end = max(max(last_index(item.node), item.key_node.end) for item in own)
            return self._add_block(end, column, values)
        if entry is not None and parent.kind == "scalar" and parent.value is None and self.language == "yaml":
            if parent.end > parent.start:  # an explicit null or ~
                return None
            column = self.source.place(entry.key_node.start)[1] - 1 + 2
            return self._add_block(entry.key_node.end, column, values)
        return None

    def _add_block(self, end: int, column: int, values: dict[str, Any]) -> tuple[Edit, ...] | None:
        newline = self.source.newline
        lines = block_lines(values, column)
        last, _ = self.source.place(end)
        if self.text[:end].endswith(_BREAKS):
            return (Edit(end, end, "".join(line + newline for line in lines)),)
        if last < self.source.line_count:
            at = self.source.line_start(last + 1)
            return (Edit(at, at, "".join(line + newline for line in lines)),)
        return (Edit(len(self.text), len(self.text), "".join(newline + line for line in lines)),)

    def _add_toml(self, parent: Node, values: dict[str, Any]) -> tuple[Edit, ...] | None:
        """Add keys behind the last one of a table, or tables at the end of the file."""
        newline = self.source.newline
        tables = {key: value for key, value in values.items() if isinstance(value, dict)}
        if tables:
            if len(tables) < len(values) or any(parent.get(key) is not None for key in tables):
                return None
            gap = newline if self.text.endswith("\n") or not self.text else 2 * newline
            text = "".join(
                f"{gap if not number else newline}[{key}]{newline}" + self._toml_lines(table)
                for number, (key, table) in enumerate(tables.items())
            )
            return (Edit(len(self.text), len(self.text), text),)
        own = [item for item in parent.entries if item.node.kind != "map" and not item.key_node.alias]
        if not own or parent.file is not None:
            return None
        last, _ = self.source.place(max(last_index(item.node) for item in own))
        if last < self.source.line_count:
            at = self.source.line_start(last + 1)
            return (Edit(at, at, self._toml_lines(values)),)
        return (Edit(len(self.text), len(self.text), newline + self._toml_lines(values)),)

    def _toml_lines(self, values: dict[str, Any]) -> str:
        lines = (f"{key} = {scalar_text(value, 'toml')}" for key, value in values.items())
        return "".join(line + self.source.newline for line in lines)

    def _add_flow(self, parent: Node, values: dict[str, Any]) -> tuple[Edit, ...] | None:
        pieces = [
            f"{scalar_text(key, self.language)}: {_flow_value(value, self.language)}"
            for key, value in values.items()
        ]
        own = sorted((item for item in parent.entries if not item.merged), key=lambda e: e.key_node.start)
        if not own:
            return (Edit(parent.start + 1, parent.start + 1, ", ".join(pieces)),)
        first = own[0].key_node.start
        gap = self.text[parent.start + 1 : first]
        separator = "," + (gap if gap.strip() == "" and "\n" in gap else " ")
        at = last_index(own[-1].node)
        return (Edit(at, at, "".join(separator + piece for piece in pieces)),)


def _flow_value(value: Any, language: str) -> str:
    if isinstance(value, dict):
        inside = ", ".join(
            f"{scalar_text(key, language)}: {_flow_value(item, language)}" for key, item in value.items()
        )
        return "{" + inside + "}"
    return scalar_text(value, language)


def block_lines(values: dict[str, Any], column: int = 0) -> list[str]:
    """Return a mapping as block-style YAML lines, indented by ``column``."""
    lines: list[str] = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            lines.append(" " * column + f"{scalar_text(key)}:")
            lines.extend(block_lines(value, column + 2))
        else:
            lines.append(" " * column + f"{scalar_text(key)}: {_flow_value(value, 'yaml')}")
    return lines


class NotEditableError(Exception):
    """The text's form does not allow an edit."""


class Rewriter:
    """A text that is edited one step at a time and parsed again after each."""

    def __init__(self, source: SourceText, parse: Callable[[SourceText], Document]) -> None:
        self.source = source
        self._parser = parse
        self._parse()

    def _parse(self) -> None:
        try:
            self.document = self._parser(self.source)
        except ParseError as error:
            raise NotEditableError(error.message) from error
        self.editor = Editor(self.source, self.document)

    @property
    def root(self) -> Node:
        """The root mapping of the text as it is now."""
        root = self.document.root
        if root is None or root.kind != "map":
            raise NotEditableError("nothing is left")
        return root

    def block(self, name: str | None) -> tuple[Node, Entry | None]:
        """Return a block (or the root for None) and the entry that holds it."""
        if name is None:
            return self.root, None
        entry = self.root.get(name)
        if entry is None:
            raise NotEditableError(f"there is no {name}")
        return entry.node, entry

    def apply(self, edits: tuple[Edit, ...] | None, what: str) -> None:
        """Apply edits and parse again.

        Raises:
            NotEditableError: There are none to apply, or the result does not parse.
        """
        if edits is None:
            raise NotEditableError(what)
        self.source = self.source.with_text(apply_edits(self.source.text, edits))
        self._parse()

    def put(self, name: str | None, key: str, value: Any, *, synonyms: tuple[str, ...] = ()) -> None:
        """Give ``key`` a value, renaming one of its synonyms or adding it when it is missing."""
        parent, holder = self.block(name)
        for spelled in (key, *synonyms):
            entry = parent.get(spelled) if parent.kind == "map" else None
            if entry is None:
                continue
            if entry.node.value != value or type(entry.node.value) is not type(value):
                self.apply(self.editor.replace(entry.node, value), key)
            if spelled != key:
                parent, _ = self.block(name)
                entry = parent.get(spelled)
                if entry is None:
                    raise NotEditableError(f"{spelled} is not the same key after an edit")
                self.apply(self.editor.rename(entry, key), key)
            return
        self.apply(self.editor.add(parent, holder, {key: value}), key)

    def drop(self, name: str | None, *keys: str) -> None:
        """Remove keys that exist."""
        for key in keys:
            while True:
                parent, _ = self.block(name)
                entry = parent.get(key) if parent.kind == "map" else None
                if entry is None:
                    break
                self.apply(self.editor.remove(parent, entry), key)

    def rename(self, name: str | None, key: str, new: str) -> None:
        """Rename a key that exists, unless the new one exists already."""
        parent, _ = self.block(name)
        entry = parent.get(key) if parent.kind == "map" else None
        if entry is not None and parent.get(new) is None:
            self.apply(self.editor.rename(entry, new), key)


def edits_between(before: str, after: str) -> tuple[Edit, ...]:
    """Return the edits, whole lines each, that turn one text into another."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    starts = [0]
    for line in old:
        starts.append(starts[-1] + len(line))
    edits = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, first, last, new_first, new_last in matcher.get_opcodes():
        if tag != "equal":
            edits.append(Edit(starts[first], starts[last], "".join(new[new_first:new_last])))
    return tuple(edits)
