"""No modules import each other while they load: every module can be the first that is imported."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "fsdptool"


def loaded_with(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """Yield the modules of the package that a module imports while it loads."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from names & modules
            if names - modules:
                yield node.module


def cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the modules of one cycle, or nothing."""
    done: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str]:
        if module in path:
            return path[path.index(module) :]
        if module in done:
            return []
        for other in sorted(graph[module] - {module}):
            if ring := visit(other, [*path, module]):
                return ring
        done.add(module)
        return []

    return next((ring for module in sorted(graph) if (ring := visit(module, []))), [])


def test_no_modules_import_each_other_while_they_load() -> None:
    paths = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }
    trees = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in paths.items()}
    graph = {name: set(loaded_with(tree, set(paths))) for name, tree in trees.items()}
    assert cycle(graph) == []


def test_a_planted_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["b", "c"]
