"""What is found in a script."""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fsdptool.files.text import SourceText
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.scripts.facts import Facts
from fsdptool.scripts.interpreter import Interpreter
from fsdptool.scripts.notebooks import Notebook, read_notebook
from fsdptool.scripts.rules import GROUPS, RULES
from fsdptool.scripts.spans import Change, Spans
from fsdptool.scripts.state import TooLongError

TABLE = {rule.code: rule for rule in RULES}
_NOQA = re.compile(r"#\s*noqa(?P<codes>\s*:\s*[A-Z]+[0-9]+(?:[\s,]+[A-Z]+[0-9]+)*)?", re.IGNORECASE)
_CODE = re.compile(r"[A-Z]+[0-9]+", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Judged:
    """What is found in a script.

    Attributes:
        findings: In the order of the script.
        suppressed: What a ``# noqa`` comment silences.
        refusal: Why it cannot be parsed, with its line and column; None where it can.
    """

    findings: tuple[Diagnostic, ...] = ()
    suppressed: tuple[Diagnostic, ...] = ()
    refusal: tuple[str, int, int] | None = None


def judge_script(source: SourceText, versions: Mapping[str, str]) -> Judged:
    """Return what is found in a script for versions of libraries, by distribution.

    A script that takes too many steps to follow has no findings: what would be reported might not be certain.
    """
    tree, notebook = parsed_script(source)
    if not isinstance(tree, ast.Module):
        return Judged(refusal=tree)
    text = source.text if notebook is None else notebook.text
    try:
        found = _findings(tree, versions, () if notebook is None else notebook.places)
    except (TooLongError, RecursionError):
        return Judged()
    lines = text.split("\n")
    diagnostics: list[Diagnostic] = []
    hushed: list[Diagnostic] = []
    spans = Spans(text)
    for (code, line, column), (node, message, change) in sorted(
        found.items(), key=lambda item: (item[0][1], item[0][2], item[0][0])
    ):
        rule = TABLE[code]
        item = Diagnostic(
            code, rule.severity, message, rule.fix, source.path, line, column,
            getattr(node, "end_lineno", None), (getattr(node, "end_col_offset", None) or 0) + 1,
            fix=spans.fix(change) if change is not None and notebook is None else None,
        )  # fmt: skip
        last = min(getattr(node, "end_lineno", line) or line, len(lines))
        if notebook is not None:
            item = _in_cell(item, notebook)
        (hushed if silenced(code, lines[line - 1 : last]) else diagnostics).append(item)
    return Judged(tuple(diagnostics), tuple(hushed))


def _in_cell(item: Diagnostic, notebook: Notebook) -> Diagnostic:
    """Return a finding of a notebook's code with its cell, and its place in the file."""
    cell, line, of_file = notebook.places[(item.line or 1) - 1]
    message = f"cell {cell}, line {line}: {item.message}"
    return replace(item, message=message, line=of_file, column=None, end_line=None, end_column=None)


def parsed_script(source: SourceText) -> tuple[ast.Module | tuple[str, int, int], Notebook | None]:
    """Return the tree of a script or of a notebook's code, or why there is none, and the notebook."""
    if not (source.path or "").endswith(".ipynb"):
        return parsed(source.text), None
    notebook = read_notebook(source.text)
    if notebook is None:
        return ("the file is not a notebook of nbformat 4", 1, 1), None
    return parsed(notebook.text), notebook


def parsed(text: str) -> ast.Module | tuple[str, int, int]:
    """Return the tree of a script, or why there is none, with its line and column."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text)
    except SyntaxError as error:
        return f"the script does not parse: {error.msg}", error.lineno or 1, max(error.offset or 1, 1)
    except (ValueError, RecursionError, MemoryError) as error:
        return f"the script does not parse: {type(error).__name__}: {error}", 1, 1


def _findings(
    tree: ast.Module, versions: Mapping[str, str], cells: Sequence[tuple[int, int, int | None]]
) -> dict[tuple[str, int, int], tuple[ast.AST, str, Change | None]]:
    found: dict[tuple[str, int, int], tuple[ast.AST, str, Change | None]] = {}

    def report(code: str, node: ast.AST, message: str, change: Change | None = None, /) -> None:
        place = (code, getattr(node, "lineno", 1), getattr(node, "col_offset", 0) + 1)
        found.setdefault(place, (node, message, change))

    for path in Interpreter(tree).paths():
        facts = Facts(path, versions, cells)
        for group in GROUPS:
            group.check(facts, report)
    return found


def silenced(code: str, lines: list[str]) -> bool:
    """Say whether a comment on one of the lines of a finding silences it."""
    for line in lines:
        match = _NOQA.search(line)
        if match is None:
            continue
        if match["codes"] is None:
            return True
        if any(code.startswith(named.upper()) for named in _CODE.findall(match["codes"])):
            return True
    return False
