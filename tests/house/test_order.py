"""The order of the rooms: a module imports its own room and rooms before it, wherever the import stands."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "fsdptool"

ORDER = (
    "errors",
    "formatting",
    "spelling",
    "garbage",
    "files",
    "records",
    "options",
    "versions",
    "rules",
    "cache",
    "families",
    "source",
    "layout",
    "inspection",
    "modeling",
    "config",
    "memory",
    "runs",
    "planning",
    "distributed",
    "training",
    "launch",
    "api",
    "report",
    "web",
    "cli",
    "testing",
)
"""Lowest first. ``fsdptool/__init__.py`` and ``__main__.py`` are doors, not rooms: nothing imports them."""


def room_of(module: str) -> str:
    """Return the room of a dotted name: the part after ``fsdptool``."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else ""


def imported(tree: ast.AST, module: str) -> Iterator[tuple[int, str]]:
    """Yield line and dotted name of every import of this package: lazy, for types only, relative."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if room_of(alias.name) and alias.name.startswith("fsdptool."):
                    yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: -node.level]
                base = ".".join([*parent, base] if base else parent)
            if base == "fsdptool":
                yield from ((node.lineno, f"fsdptool.{alias.name}") for alias in node.names)
            elif base.startswith("fsdptool."):
                yield node.lineno, base
        elif isinstance(node, ast.Call):
            # import_module("fsdptool.x") and import_module(f"fsdptool.x.{name}") are imports, too.
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and node.args:
                first = node.args[0]
                if isinstance(first, ast.JoinedStr) and first.values:
                    first = first.values[0]
                text = first.value if isinstance(first, ast.Constant) else ""
                if isinstance(text, str) and text.startswith("fsdptool."):
                    yield node.lineno, text.rstrip(".")


def violations(source: str, module: str) -> list[str]:
    """Return the imports of ``source`` that run against the order, as ``line: name``."""
    own = room_of(module)
    place = ORDER.index(own)
    wrong = []
    tree = ast.parse(source)
    for line, name in imported(tree, module):
        target = room_of(name)
        if target == own or (own == "api" and target == "report" and "_repr_html_" in source):
            continue
        if target not in ORDER or ORDER.index(target) > place:
            wrong.append(f"line {line}: {name}")
    return wrong


def test_imports_follow_the_order() -> None:
    wrong = {}
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        module = ".".join(parts).removesuffix(".__init__")
        if room_of(module) not in ("", "__main__"):
            wrong[module] = violations(path.read_text(encoding="utf-8"), module)
    assert len(wrong) > 300
    assert {module: found for module, found in wrong.items() if found} == {}


def test_every_room_is_in_the_order() -> None:
    rooms = {
        path.stem if path.is_file() else path.name
        for path in PACKAGE.iterdir()
        if (path.suffix == ".py" and not path.stem.startswith("__")) or (path / "__init__.py").exists()
    }
    assert rooms <= set(ORDER), rooms - set(ORDER)


@pytest.mark.parametrize(
    "planted",
    [
        "from fsdptool.training import loop",
        "def f():\n    from fsdptool.planning.search import search",
        "if TYPE_CHECKING:\n    from fsdptool.cli.app import run",
        "import fsdptool.report.page.plan",
        "from fsdptool import launch",
        "import_module(f'fsdptool.runs.{name}')",
        "from ..planning import search",
    ],
)
def test_a_planted_violation_is_found(planted: str) -> None:
    assert violations(planted, "fsdptool.memory.footprint")
    assert not violations("from fsdptool.records.trace import Trace", "fsdptool.memory.footprint")
