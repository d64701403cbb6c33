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

    def drop(self, item: ast.AST, items: Sequence[ast.AST]) -> Edit:
        """Return the edit that removes one of several items that commas separate.

        An item with lines of its own takes them along, and a comment on them; else its comma goes with it.
        """
        start, end = self.start(item), self.end(item)
        first, last = self.line_span(item)
        rest = self.text[end:last].lstrip()
        alone = not self.text[first:start].strip() and rest.startswith(",")
        if alone and (not rest[1:].strip() or rest[1:].lstrip().startswith("#")):
            return Edit(first, last, "")
        position = list(items).index(item)
        if position + 1 < len(items):
            return Edit(start, self.start(items[position + 1]), "")
        if position:
            return Edit(self.end(items[position - 1]), end, "")
        after = self.text[end:]
        comma = len(after) - len(after.lstrip()) + 1 if after.lstrip().startswith(",") else 0
        return Edit(start, end + comma, "")

    def fix(self, change: Change) -> Fix | None:
        """Return the safe fix that makes a change, or None where the text does not allow it."""
        node = change.node
        if isinstance(node, ast.keyword) and node.arg is not None and change.call is not None:
            if node not in change.call.keywords:
                return None
            if change.text is None:
                arguments = ordered(change.call)
                return Fix(True, f"remove {node.arg}", (self.drop(node, arguments),))
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
