"""The arithmetic of a shell, with whole numbers."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

_LONGEST = 200
"""Characters of an expression: nobody writes more."""


def computed(expression: str, value_of: Callable[[str], str | None]) -> str | None:
    """Return a whole number that ``$((...))`` computes, or None.

    Args:
        expression: What stands between the brackets, with its known variables put in.
        value_of: Returns the value of a variable that is named without ``$``.
    """
    text = expression.replace("/", "//")
    if len(text) > _LONGEST or "#" in text:  # the base of a number, as in 10#08
        return None
    try:
        number = _number(ast.parse(text.strip(), mode="eval").body, value_of)
    except (SyntaxError, ValueError, RecursionError, MemoryError, ZeroDivisionError):
        return None
    return str(number) if abs(number) < 1e18 else None


def _number(node: ast.expr, value_of: Callable[[str], str | None]) -> int:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.Name):
        value = value_of(node.id) or ""
        return int(value if re.fullmatch(r"-?(?:0|[1-9]\d*)", value) else "")
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_number(node.operand, value_of)
    if isinstance(node, ast.BinOp):
        left, right = _number(node.left, value_of), _number(node.right, value_of)
        match node.op:
            case ast.Add():
                return left + right
            case ast.Sub():
                return left - right
            case ast.Mult():
                return left * right
            case ast.FloorDiv():
                return _divided(left, right)
            case ast.Mod():
                return left - right * _divided(left, right)
    raise ValueError("not arithmetic of whole numbers")


def _divided(left: int, right: int) -> int:
    """Return a quotient as a shell rounds it, towards zero."""
    whole = abs(left) // abs(right)
    return whole if (left < 0) == (right < 0) else -whole
