"""Docstrings describe what exists: every name under ``Args:`` and ``Attributes:`` is one of its subject."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "fsdptool"


def described(node: ast.AST, section: str) -> set[str]:
    """Return the names a docstring lists in one of its sections."""
    doc = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.ClassDef) else None
    body = re.search(rf"^{section}:\n((?: {{4}}.*\n|\n)*)", inspect.cleandoc(doc or "") + "\n", re.MULTILINE)
    entries = re.findall(r"^ {4}(\*{0,2}[A-Za-z_][\w, *]*): ", body[1], re.MULTILINE) if body else []
    return {name.strip(" *") for entry in entries for name in entry.split(",")}


def parameters(node: ast.FunctionDef) -> set[str]:
    """Return the names of a function's parameters."""
    args = node.args
    starred = [item for item in (args.vararg, args.kwarg) if item is not None]
    return {item.arg for item in (*args.posonlyargs, *args.args, *args.kwonlyargs, *starred)}


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the names a class has: fields, methods, constants, and what its methods set."""
    names = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
    for item in ast.walk(node):
        if isinstance(item, ast.Name) and isinstance(item.ctx, ast.Store):
            names.add(item.id)
        elif isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Store):
            names.add(item.attr)
    return names


def strangers(source: str) -> Iterator[str]:
    """Yield what docstrings describe although it does not exist."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef):
            yield from (f"{node.name}: {name}" for name in described(node, "Args") - parameters(node))
        elif isinstance(node, ast.ClassDef):
            own = attributes(node)
            initialisers = [
                item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"
            ]
            taken = own.union(*(parameters(item) for item in initialisers))
            # A base class may be another module's.
            unknown = (described(node, "Attributes") - own) | (described(node, "Args") - taken)
            yield from (f"{node.name}: {name}" for name in (() if node.bases else unknown))


def test_docstrings_describe_what_exists() -> None:
    found = {path: list(strangers(path.read_text(encoding="utf-8"))) for path in PACKAGE.rglob("*.py")}
    assert len(found) > 300
    assert {path: names for path, names in found.items() if names} == {}


def test_a_stranger_is_noticed() -> None:
    planted = 'def run(path):\n    """Run.\n\n    Args:\n        path: It.\n        folder: Gone.\n    """\n'
    assert list(strangers(planted)) == ["run: folder"]
