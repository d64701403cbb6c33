"""A script with the value of each of its expressions: what edits of it ask about its text."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from fsdptool.records.diagnostic import Edit
from fsdptool.scripts.facts import FSDP1, unwrapped
from fsdptool.scripts.interpreter import Interpreter
from fsdptool.scripts.names import short
from fsdptool.scripts.spans import Spans
from fsdptool.scripts.values import Choice, Class, Const, Function, Library, Thing, Value

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_SCOPES = (*_FUNCTIONS, ast.Module)


class _Recorder(Interpreter):
    """Follows every function of a script and keeps what each expression stood for."""

    def __init__(self, tree: ast.Module) -> None:
        super().__init__(tree)
        self.seen: dict[ast.AST, list[Value]] = {}

    def value(self, node: ast.AST | None) -> Value:
        found = super().value(node)
        if node is not None:
            self.seen.setdefault(node, []).append(found)
        return found

    def _matters(self, _root: Function) -> bool:
        return True


class Blocked(Exception):
    """Something cannot be migrated by an edit; the message says what and why."""


@dataclass(frozen=True, slots=True)
class MigrationStep:
    """A change of a script.

    Attributes:
        node: What it is about.
        edits: The change.
        imports: Names that it needs, as pairs of module and name.
        notes: What the author of the script should know.
    """

    node: ast.AST
    edits: tuple[Edit, ...]
    imports: tuple[tuple[str, str], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass
class Recorded:
    """A script that was followed.

    Attributes:
        text: The script.
        tree: Its tree.
        spans: Where nodes stand.
        values: What each expression stood for, each time that it was reached.
        parents: The node around each node.

    Raises:
        SyntaxError, ValueError: The text does not parse.
        TooLongError, RecursionError: It cannot be followed.
    """

    text: str
    tree: ast.Module = field(init=False)
    spans: Spans = field(init=False)
    values: dict[ast.AST, list[Value]] = field(init=False)
    parents: dict[ast.AST, ast.AST] = field(init=False)
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.tree = ast.parse(self.text)
        self.spans = Spans(self.text)
        recorder = _Recorder(self.tree)
        recorder.paths()
        self.values = recorder.seen
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        self.names = frozenset(
            getattr(node, "id", None) or getattr(node, "arg", None) or getattr(node, "name", None) or ""
            for node in ast.walk(self.tree)
        )

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes around a node, the nearest first."""
        while node in self.parents:
            node = self.parents[node]
            yield node

    def scope(self, node: ast.AST) -> ast.AST:
        """Return the function that a node stands in, or the module."""
        return next(item for item in self.around(node) if isinstance(item, _SCOPES))

    def statement(self, node: ast.AST) -> ast.stmt:
        """Return the statement that a node stands in."""
        return next(item for item in (node, *self.around(node)) if isinstance(item, ast.stmt))

    def library(self, node: ast.AST) -> str:
        """Return the name that rules know a function or class of a library by; else an empty text."""
        if isinstance(node, ast.Attribute) and node not in self.values:
            whole = self.values.get(node.value, ())
            names = {item.name for item in whole if isinstance(item, Library)}
            return (
                short(f"{names.pop()}.{node.attr}") if len(names) == 1 == len(set(map(type, whole))) else ""
            )
        found = self.values.get(node, ())
        names = {item.name if isinstance(item, Library) else "" for item in found}
        return short(names.pop()) if len(names) == 1 else ""

    def calls(self, *names: str) -> Iterator[ast.Call]:
        """Yield the calls of functions of libraries."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Call) and self.library(node.func) in names:
                yield node

    def methods(self, *names: str) -> Iterator[tuple[ast.Call, ast.expr]]:
        """Yield the calls of methods with these names, and what each is called on."""
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Call)
                and isinstance(node.func, ast.Attribute)
                and node.func.attr in names
            ):
                yield node, node.func.value

    def wrapped(self, node: ast.AST) -> bool | None:
        """Say whether an expression is an FSDP1 module; None: sometimes, or not known."""
        found = self.values.get(node, [])
        answers = {_is_wrapped(value) for value in found}
        return answers.pop() if len(answers) == 1 else None

    def value(self, node: ast.AST | None) -> Value | None:
        """Return the one value of an expression; None where there are several or none."""
        found = self.values.get(node, []) if node is not None else []
        if not found:
            return None
        first = found[0]
        if all(item is first for item in found):
            return first
        if isinstance(first, Const) and all(
            isinstance(item, Const) and item.value == first.value for item in found
        ):
            return first
        if isinstance(first, Library) and all(
            isinstance(item, Library) and item.name == first.name for item in found
        ):
            return first
        if isinstance(first, Thing) and all(
            isinstance(item, Thing) and item.node is first.node for item in found
        ):
            return first
        return None

    def fresh(self, *names: str) -> str:
        """Return the first of some names that the script does not use."""
        return next((name for name in names if name not in self.names), f"{names[0]}_of_fsdp")

    def indent(self, statement: ast.stmt) -> str:
        """Return the indentation of a statement.

        Raises:
            Blocked: Something else stands on its lines.
        """
        start, end = self.spans.start(statement), self.spans.end(statement)
        first, last = self.spans.line_span(statement)
        head, rest = self.text[first:start], self.text[end:last].strip()
        if head.strip() or (rest and not rest.startswith("#")):
            raise Blocked("shares its line with other statements")
        return head

    @property
    def step(self) -> str:
        """Return one step of indentation."""
        return "\t" if "\n\t" in self.text else "    "

    def comments(self, node: ast.AST) -> list[tuple[int, str]]:
        """Return the comments inside a node, with their lines."""
        start, end = self.spans.start(node), self.spans.end(node)
        found = []
        for token in tokenize.generate_tokens(io.StringIO(self.text, newline="").readline):
            at = self.spans.source.line_start(token.start[0]) + token.start[1]
            if token.type == tokenize.COMMENT and start <= at < end:
                found.append((token.start[0], token.string))
        return found

    def text_lines(self) -> frozenset[int]:
        """Return the lines that begin inside a text of several lines."""
        inside: set[int] = set()
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno is not None:
                inside.update(range(node.lineno + 1, node.end_lineno + 1))
        return frozenset(inside)

    def unwrap(
        self, statement: ast.With | ast.AsyncWith, before: Sequence[str], after: Sequence[str]
    ) -> tuple[Edit, ...]:
        """Return the edits that replace a ``with`` by statements before and after its body.

        Raises:
            Blocked: The form of the text does not allow it.
        """
        margin, newline = self.indent(statement), self.spans.source.newline
        last = statement.items[-1]
        begin = self.spans.end(last.optional_vars or last.context_expr)
        colon = self.text.index(":", begin)
        body = statement.body[0]
        inner = self.text[self.spans.line_span(body)[0] : self.spans.start(body)]
        if inner.strip():
            raise Blocked("has its body on the line of the with")
        lines = self.spans.source
        first_line = lines.place(colon)[0] + 1
        head_end = lines.line_start(first_line)
        comment = self.text[colon + 1 : head_end].strip()
        head = [*([comment] if comment else []), *before]
        edits = [
            Edit(
                lines.line_start(statement.lineno),
                head_end,
                "".join(margin + item + newline for item in head),
            )
        ]
        texts = self.text_lines()
        end_line = statement.end_lineno or statement.lineno
        for number in range(first_line, end_line + 1):
            start = lines.line_start(number)
            if number not in texts and self.text.startswith(inner, start):
                edits.append(Edit(start, start + len(inner), margin))
        if after:
            end = self.spans.line_span(statement)[1]
            lead = "" if self.text[:end].endswith(("\n", "\r")) else newline
            edits.append(Edit(end, end, lead + "".join(margin + item + newline for item in after)))
        return tuple(edits)


def _is_wrapped(value: Value) -> bool | None:
    if isinstance(value, Choice):
        answers = {_is_wrapped(option) for option in value.options}
        return answers.pop() if len(answers) == 1 else None
    if not isinstance(value, Thing):
        return False
    if value.kind == FSDP1 or value.annotation == FSDP1:
        return True
    if value.kind in ("get_peft_model", "checkpoint_wrapper", "PeftModel.from_pretrained") and value.inner:
        return _is_wrapped(value.inner)
    return None if value.kind in ("parameter", "unknown", "result", "attribute") else False


def visible(script: Recorded, name: str) -> str | None:
    """Return the shortest expression by which a module of the script reaches a name of a library."""
    found = []
    for node in script.tree.body:
        for item in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            whole = f"{node.module}.{item.name}" if isinstance(node, ast.ImportFrom) else item.name
            bound = item.asname or item.name
            if name == whole or name.startswith(f"{whole}."):
                found.append(bound + name[len(whole) :])
    return min(found, key=len, default=None)


def reached(script: Recorded, module: str, name: str) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Return an expression for a name of a library, and what has to be imported for it."""
    known = visible(script, f"{module}.{name}")
    return (known, ()) if known is not None else (name, ((module, name),))


def class_name(script: Recorded, value: Value | None) -> str | None:
    """Return the name by which a module of the script sees a class; None where it has none."""
    if isinstance(value, Class):
        return value.node.name if value.node in script.tree.body else None
    return visible(script, value.name) if isinstance(value, Library) else None


def owner_of(value: Value | None) -> str:
    """Return the name of a module's class, where the script has it; else an empty text."""
    if not isinstance(value, Thing):
        return ""
    owner = unwrapped(value).owner
    return owner.node.name if owner is not None else ""
