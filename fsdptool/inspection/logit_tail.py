"""What a model does to the logits between its head and its loss, by the source of its ``forward``.

A head that computes the loss itself has to do the same to each chunk. Anything beyond a scale and a soft cap
is unknown, and so is a model that calls its head elsewhere.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import TYPE_CHECKING, Any

from fsdptool.records.anatomy import LogitTail

if TYPE_CHECKING:
    from torch import nn

_UNCHANGED = frozenset({"float", "to", "contiguous", "type", "type_as"})
"""Methods that change the dtype or the layout of logits alone."""


class _UnknownError(Exception):
    """The source does more than is known here."""


def logit_tail(model: nn.Module, head: str | None) -> LogitTail | None:
    """Return what the forward of a model does to its logits, or None where that is unknown.

    Args:
        model: On any device; its attributes give the numbers.
        head: Path of the head.
    """
    if head is None:
        return None
    try:
        text = textwrap.dedent(inspect.getsource(inspect.unwrap(type(model).forward)))
        function = ast.parse(text).body[0]
    except (OSError, TypeError, SyntaxError, ValueError, IndexError):
        return None
    if not isinstance(function, ast.FunctionDef):
        return None
    try:
        return _Reader(model, head).read(function)
    except _UnknownError:
        return None


class _Reader:
    """Follows the logits through the statements of a forward."""

    def __init__(self, model: nn.Module, head: str) -> None:
        self._model = model
        self._head = head
        self._name: str | None = None
        self._returned = False
        self._local: dict[str, Any] = {}
        self._steps: list[tuple[str, float]] = []

    def read(self, function: ast.FunctionDef) -> LogitTail:
        """Return the tail of one forward."""
        calls = [node for node in ast.walk(function) if self._is_head(node)]
        if len(calls) != 1:
            raise _UnknownError
        for statement in function.body:
            self._statement(statement)
        if not self._returned:
            raise _UnknownError
        return self._tail()

    def _statement(self, statement: ast.stmt) -> None:
        if self._name is None:
            if any(self._is_head(node) for node in ast.walk(statement)):
                name = _assigned(statement)
                self._follow(statement.value)  # type: ignore[attr-defined]
                self._name = name
        elif isinstance(statement, ast.Return):
            self._return(statement)
        elif not self._contains(statement):
            return
        elif isinstance(statement, ast.If):
            self._branch(statement)
        elif _assigned(statement) == self._name:
            self._follow(statement.value)  # type: ignore[attr-defined]
        else:
            raise _UnknownError

    def _return(self, statement: ast.Return) -> None:
        """Let a forward return its logits under that name, and as nothing else."""
        keywords = [node for node in ast.walk(statement) if isinstance(node, ast.keyword)]
        named = [item.arg for item in keywords if self._is_logits(item.value)]
        if named != ["logits"] or sum(map(self._is_logits, ast.walk(statement))) != 1:
            raise _UnknownError
        self._returned = True

    def _branch(self, statement: ast.If) -> None:
        """Take the branch that the model's own attributes decide, without labels and with named outputs."""
        test = statement.test
        names = {node.id for node in ast.walk(test) if isinstance(node, ast.Name)}
        if names & {"labels", "return_dict"}:
            taken = False
        elif isinstance(test, ast.Compare) and len(test.ops) == 1 and _is_none(test.comparators[0]):
            taken = (self._value(test.left) is None) == isinstance(test.ops[0], ast.Is)
        else:
            taken = bool(self._value(test))
        for inner in statement.body if taken else statement.orelse:
            self._statement(inner)

    def _follow(self, value: ast.expr) -> None:
        """Note what an expression does to the logits in it."""
        if self._is_head(value) or self._is_logits(value):
            return
        if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Div):
            left = self._contains(value.left)
            if not left and isinstance(value.op, ast.Div):
                raise _UnknownError
            self._follow(value.left if left else value.right)
            number = self._number(value.right if left else value.left)
            self._steps.append(("scale", number if isinstance(value.op, ast.Mult) else 1.0 / number))
        elif isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
            self._call(value, value.func)
        else:
            raise _UnknownError

    def _call(self, value: ast.Call, function: ast.Attribute) -> None:
        if function.attr == "tanh":
            inner = value.args[0] if value.args else function.value
            self._follow(inner)
            self._steps.append(("tanh", 0.0))
        elif function.attr in _UNCHANGED and self._contains(function.value):
            self._follow(function.value)
        else:
            raise _UnknownError

    def _tail(self) -> LogitTail:
        kinds = [kind for kind, _ in self._steps]
        if "tanh" not in kinds:
            scale = 1.0
            for _, number in self._steps:
                scale *= number
            return LogitTail(scale)
        # A soft cap: divided by it, tanh, multiplied by it.
        if kinds != ["scale", "tanh", "scale"]:
            raise _UnknownError
        (_, before), _, (_, cap) = self._steps
        if abs(before * cap - 1.0) > 1e-12:
            raise _UnknownError
        return LogitTail(cap=cap)

    def _number(self, node: ast.expr) -> float:
        value = self._value(node)
        if isinstance(value, bool) or not isinstance(value, int | float) or value == 0:
            raise _UnknownError
        return float(value)

    def _value(self, node: ast.expr) -> Any:
        """Return the value of a constant, of an attribute of the model, or of a name given to one."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.NamedExpr):
            self._local[node.target.id] = self._value(node.value)
            return self._local[node.target.id]
        if isinstance(node, ast.Name):
            if node.id == "self":
                return self._model
            if node.id in self._local:
                return self._local[node.id]
        elif isinstance(node, ast.Attribute):
            owner = self._value(node.value)
            if hasattr(owner, node.attr):
                return getattr(owner, node.attr)
        elif ast.unparse(node).endswith(".get_text_config()") and isinstance(node, ast.Call):
            assert isinstance(node.func, ast.Attribute)
            return self._value(node.func.value).get_text_config()
        raise _UnknownError

    def _is_head(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Call) and ast.unparse(node.func) == f"self.{self._head}"

    def _contains(self, node: ast.AST) -> bool:
        return any(self._is_head(part) or self._is_logits(part) for part in ast.walk(node))

    def _is_logits(self, node: ast.AST) -> bool:
        return isinstance(node, ast.Name) and node.id == self._name


def _assigned(statement: ast.stmt) -> str:
    """Return the one name that a statement assigns to."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
        if isinstance(target, ast.Name):
            return target.id
    raise _UnknownError


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
