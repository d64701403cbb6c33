"""Plant faults in the product, one at a time, and see whether the tests of their package notice.

A fault is an operator, a constant or a condition that is changed. The same seed plants the same faults. Each
is planted in a copy of the checkout, never in the checkout itself; first the test files run that import the
module or share a word with its path, then the other files of the package's folder. A fault that no test
notices is one for which a test is missing, or one that changes nothing that can be observed: the committed
rows say under ``equivalent`` why.

Usage: python benchmarks/tests/mutate.py --count 60 --output benchmarks/results/mutation.jsonl
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import random
import re
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from planted import ROOT, copy_checkout, failing_test

PACKAGES = ("memory", "config", "planning", "distributed", "training")
FOLDERS = {"distributed": "training"}
"""Folders of tests whose name is not the package's."""

_OPERATORS: dict[type[ast.AST], type[Any]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
}


@dataclass(frozen=True)
class Fault:
    """Where a fault is planted: a part of a module, what it says and what replaces it."""

    module: str
    line: int
    original: str
    planted: str
    start: int
    end: int


def planted(node: ast.AST) -> ast.AST | None:
    """Return what replaces a node, or None for a node that stays."""
    if not isinstance(node, ast.Compare | ast.BinOp | ast.BoolOp | ast.Constant | ast.UnaryOp):
        return None
    changed: Any = copy.deepcopy(node)
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _OPERATORS:
        changed.ops = [_OPERATORS[type(node.ops[0])]()]
    elif isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _OPERATORS:
        if any(isinstance(part, ast.JoinedStr) or _is_text(part) for part in ast.walk(node)):
            return None  # texts that are put together
        changed.op = _OPERATORS[type(node.op)]()
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        changed.value = not node.value
    elif isinstance(node, ast.Constant) and type(node.value) is int:
        changed.value = node.value + 1
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        changed = changed.operand
    else:
        return None
    return changed  # type: ignore[no-any-return]


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def code(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of functions that run: no annotations, no formatted texts, no raised messages."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(node, ast.JoinedStr | ast.Raise):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from code(child)


def faults(path: Path) -> Iterator[Fault]:
    """Yield every fault that a module offers."""
    text = path.read_text(encoding="utf-8")
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for function in ast.walk(ast.parse(text)):
        if not isinstance(function, ast.FunctionDef):
            continue
        for node in code(function):
            changed = planted(node)
            if changed is None or not isinstance(node, ast.expr) or node.end_lineno is None:
                continue
            first = starts[node.lineno - 1] + node.col_offset
            last = starts[node.end_lineno - 1] + (node.end_col_offset or 0)
            new = f"({ast.unparse(changed)})"
            module = path.relative_to(ROOT).as_posix()
            yield Fault(module, node.lineno, ast.unparse(node), new, first, last)


def choose(count: int, seed: int) -> list[Fault]:
    """Return faults, as many of each package as of the others."""
    chooser = random.Random(seed)
    chosen = []
    for number, package in enumerate(PACKAGES):
        paths = sorted((ROOT / "fsdptool" / package).rglob("*.py"))
        every = sorted(
            {fault for path in paths for fault in faults(path)},
            key=lambda f: (f.module, f.start, f.end, f.planted),
        )
        share = count // len(PACKAGES) + (number < count % len(PACKAGES))
        chosen += chooser.sample(every, share)
    return chosen


@cache
def _helpers() -> dict[str, Path]:
    """Return the files that tests share, by name."""
    found = (ROOT / "tests").rglob("*.py")
    return {path.stem: path for path in found if not path.stem.startswith(("test_", "conf"))}


@cache
def imported_by(path: Path, deep: bool = True) -> frozenset[str]:
    """Return the dotted names that a test file imports, also through other files of the tests."""
    found: set[str] = set()
    helpers = _helpers() if deep else {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    for name in found & helpers.keys():
        if helpers[name] != path:
            found = found | imported_by(helpers[name], deep=False)
    return frozenset(found)


def tests_of(fault: Fault) -> list[str]:
    """Return the test files that import the module of a fault, then the others of its package's folder."""
    dotted = fault.module.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    package = dotted.split(".")[1]
    tests = ROOT / "tests"
    files = sorted(tests.rglob("test_*.py"), key=lambda path: path.stat().st_size)
    words = set(re.split(r"[._]", dotted)[2:])
    folder = tests / FOLDERS.get(package, package)

    def distance(path: Path) -> int:
        shared = len(words & set(path.stem.split("_")))
        return 0 if dotted in imported_by(path) else 9 - shared

    chosen = [path for path in files if path.parent == folder or not distance(path)]
    return [path.relative_to(ROOT).as_posix() for path in sorted(chosen, key=distance)]


def judge(fault: Fault, folder: Path, marks: str) -> str:
    """Plant a fault in a copy of the checkout; return the test that notices it, or an empty text."""
    path = folder / fault.module
    whole = path.read_bytes()
    path.write_bytes(whole[: fault.start] + fault.planted.encode() + whole[fault.end :])
    try:
        return failing_test(folder, ["-m", marks, *tests_of(fault)])
    finally:
        path.write_bytes(whole)


def main() -> None:
    """Plant the faults and write one line of JSON for each, with the test that noticed it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--package", choices=PACKAGES, help="only the faults of one package")
    parser.add_argument("--marks", default="", help="pytest -m: which tests run, e.g. 'not slow'")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    chosen = [
        fault
        for fault in choose(options.count, options.seed)
        if options.package is None or fault.module.startswith(f"fsdptool/{options.package}/")
    ]
    with tempfile.TemporaryDirectory(prefix="mutation-") as name:
        folder = Path(name)
        copy_checkout(folder)
        caught = 0
        with options.output.open("a", encoding="utf-8") as output:
            for number, fault in enumerate(chosen, 1):
                noticed = judge(fault, folder, options.marks)
                caught += bool(noticed)
                output.write(json.dumps({**asdict(fault), "noticed_by": noticed}) + "\n")
                output.flush()
                print(
                    f"{number}/{len(chosen)} {fault.module}:{fault.line} {noticed or 'NOT NOTICED'}",
                    flush=True,
                )
        print(f"{caught} of {len(chosen)} noticed")


if __name__ == "__main__":
    main()
