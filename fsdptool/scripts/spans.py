"""Where the parts of a script stand in its text, and edits of them that leave the rest of the text alone."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass

from fsdptool.files.text import SourceText
from fsdptool.records.diagnostic import Edit, Fix


@dataclass(frozen=True, slots=True)
class Change:
    """What would repair a finding, as a change of one part of a script.

    Attributes:
        node: A keyword is renamed to ``text``, or removed where that is None. An import takes ``text`` as
            its module. Any other expression is replaced by the source of ``by``.
        text: New name.
        call: The call that a keyword stands in.
        by: A part of ``node``.
    """

    node: ast.AST
    text: str | None = None
    call: ast.Call | None = None
    by: ast.AST | None = None


class Spans:
    """The text of a script by the nodes of its tree; ``ast`` counts columns in bytes of UTF-8."""

    def __init__(self, text: str) -> None:
        self.source = SourceText(text)
        self.text = text

    def index(self, line: int, column: int) -> int:
        """Return the index of the character at a line (from 1) and a column in bytes (from 0)."""
        start = self.source.line_start(line)
        head = self.text[start : start + column]
        if head.isascii():
            return start + column
        return start + len(head.encode()[:column].decode(errors="ignore"))

    def start(self, node: ast.AST) -> int:
        """Return the index of a node's first character; decorators belong to it."""
        first = min(getattr(node, "decorator_list", ()), key=lambda item: item.lineno, default=None)
        if first is not None:
            return self.text.rindex("@", 0, self.index(first.lineno, first.col_offset))
        return self.index(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def end(self, node: ast.AST) -> int:
        """Return the index behind a node's last character."""
        return self.index(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def of(self, node: ast.AST) -> str:
        """Return the text of a node."""
        return self.text[self.start(node) : self.end(node)]

    def replace(self, node: ast.AST, text: str) -> Edit:
        """Return the edit that puts ``text`` in the place of a node."""
        return Edit(self.start(node), self.end(node), text)

    def line_span(self, node: ast.AST) -> tuple[int, int]:
        """Return the span of the whole lines that a node stands on."""
        first = self.source.line_start(node.lineno)  # type: ignore[attr-defined]
        last: int = node.end_lineno  # type: ignore[attr-defined]
        end = self.source.line_start(last + 1) if last < self.source.line_count else len(self.text)
        return first, end

    def drop(self, gone: Sequence[ast.AST], items: Sequence[ast.AST]) -> tuple[Edit, ...]:
        """Return the edits that remove some of several items that commas separate.

        Items with lines of their own take them along, and a comment on them; else a comma goes with each.
        """
        if all(self._is_alone(item) for item in gone):
            return tuple(Edit(*self.line_span(item), "") for item in gone)
        edits: list[Edit] = []
        position = 0
        while position < len(items):
            first = position
            while position < len(items) and items[position] in gone:
                position += 1
            if position == first:
                position += 1
            elif position < len(items):
                edits.append(Edit(self.start(items[first]), self.start(items[position]), ""))
            elif first:
                edits.append(Edit(self.end(items[first - 1]), self.end(items[-1]), ""))
            else:
                end = self.end(items[-1])
                after = self.text[end:]
                comma = len(after) - len(after.lstrip()) + 1 if after.lstrip().startswith(",") else 0
                edits.append(Edit(self.start(items[0]), end + comma, ""))
        return tuple(edits)

    def _is_alone(self, item: ast.AST) -> bool:
        """Say whether an item, its comma and a comment have lines of their own."""
        first, last = self.line_span(item)
        rest = self.text[self.end(item) : last].strip()
        after = rest[1:].lstrip()
        return not self.text[first : self.start(item)].strip() and rest[:1] == "," and after[:1] in ("", "#")

    def fix(self, change: Change) -> Fix | None:
        """Return the safe fix that makes a change, or None where the text does not allow it."""
        node = change.node
        if isinstance(node, ast.keyword) and node.arg is not None and change.call is not None:
            if node not in change.call.keywords:
                return None
            if change.text is None:
                arguments = ordered(change.call)
                return Fix(True, f"remove {node.arg}", self.drop([node], arguments))
            if any(item.arg == change.text for item in change.call.keywords):
                return None
            start = self.start(node)
            edit = Edit(start, start + len(node.arg), change.text)
            return Fix(True, f"rename {node.arg} to {change.text}", (edit,))
        if isinstance(node, ast.ImportFrom) and node.module is not None and change.text is not None:
            at = self.text.find(node.module, self.start(node), self.end(node))
            if at < 0:
                return None
            edit = Edit(at, at + len(node.module), change.text)
            return Fix(True, f"import from {change.text}", (edit,))
        if change.by is not None:
            text = self.of(change.by)
            return Fix(True, f"write {text.splitlines()[0]}", (self.replace(node, text),))
        return None


def ordered(call: ast.Call) -> list[ast.expr | ast.keyword]:
    """Return the arguments of a call in the order of the text."""
    return sorted((*call.args, *call.keywords), key=lambda item: (item.lineno, item.col_offset))
