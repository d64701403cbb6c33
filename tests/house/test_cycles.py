"""No files import each other in circles, wherever the import stands: at the top, in a function, for types."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "fsdptool"


def imported(nodes: Iterator[ast.AST] | list[ast.stmt], modules: set[str]) -> Iterator[str]:
    """Yield the modules of the package that some nodes of a tree import."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from names & modules
            if names - modules:
                yield node.module


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the groups of modules that reach each other, in alphabetical order."""

    def reached(start: str) -> set[str]:
        found: set[str] = set()
        left = [start]
        while left:
            new = graph[left.pop()] - found
            found |= new
            left += new
        return found

    reach = {module: reached(module) for module in graph}
    groups = {tuple(sorted(x for x in reach[m] if m in reach[x])) for m in graph if m in reach[m]}
    return sorted(map(list, groups))


def graph_of(trees: Mapping[str, ast.Module], *, every: bool) -> dict[str, set[str]]:
    """Return what each module imports: while it loads, or in ``every`` place."""
    modules = set(trees)
    return {
        name: set(imported(ast.walk(tree) if every else tree.body, modules)) - {name}
        for name, tree in trees.items()
    }


@cache
def parsed() -> dict[str, ast.Module]:
    """Return the tree of every module of the package, by its dotted name."""
    names = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    assert len(names) > 300
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in names.items()}


def test_no_modules_import_each_other_while_they_load() -> None:
    assert circles(graph_of(parsed(), every=False)) == []


def test_no_files_import_each_other_anywhere() -> None:
    assert circles(graph_of(parsed(), every=True)) == []


def test_a_planted_circle_is_found() -> None:
    sources = {
        "p.a": "from p import b",
        "p.b": "def f():\n    from p.c import x",
        "p.c": "if TYPE_CHECKING:\n    import p.b",
        "p.d": "from p.a import y",
    }
    trees = {name: ast.parse(source) for name, source in sources.items()}
    assert circles(graph_of(trees, every=True)) == [["p.b", "p.c"]]
    assert circles(graph_of(trees, every=False)) == []
