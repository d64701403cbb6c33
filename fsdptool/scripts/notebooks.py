"""Notebooks as scripts: the code of all cells, one after the other, and where each line comes from."""

from __future__ import annotations

import ast
import re
import shlex
import string
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fsdptool.files.values import load_json

_PYTHON = re.compile(r"%%(?:time|timeit|capture|prun|memit)\b")
"""Magics of a whole cell that is Python all the same."""
_WRITES = re.compile(r"%%(?:writefile|file)\s+(-a\s+|--append\s+)?([\w./~-]+)\s*$")
_VARIABLE = re.compile(r"%(?:set_)?env\s+(\w+)(?:\s*=\s*|\s+)(.+)", re.DOTALL)
_CAPTURED = re.compile(r"^(\s*[A-Za-z_][\w, ]*=\s*)[!%].*$")
"""What a command prints, as a value."""
_DOLLAR = re.compile(r"(?<![\\$\w])\$([A-Za-z_]\w*)")
_CALL = "_line_of_notebook"
_NOT_KNOWN = "python_value"
"""Variable that no shell has: it stands for values that only Python knows."""
_ABSENT: Any = object()
_END = "END_OF_CELL"


@dataclass(frozen=True, slots=True)
class Notebook:
    """The code of a notebook.

    Attributes:
        text: The script.
        places: For each of its lines the number of the cell, the line in the cell, and the line of the file;
            cells and lines count from 1, and the line of the file is None where it is not known.
    """

    text: str
    places: tuple[tuple[int, int, int | None], ...]


def read_notebook(text: str) -> Notebook | None:
    """Return the code of a notebook (nbformat 4), or None if the text is not one.

    Lines that begin with ``%`` or ``!`` are commands of the notebook and are left out, as are cells that do
    not parse.
    """
    try:
        document: Any = load_json(text)
    except (ValueError, RecursionError):
        return None
    cells = document.get("cells") if isinstance(document, dict) else None
    if not isinstance(cells, list):
        return None
    starts = [number for number, line in enumerate(text.split("\n"), 1) if line.strip() == '"source": [']
    lists = [cell for cell in cells if isinstance(cell, dict) and cell.get("source")]
    known = len(starts) == len(lists) and all(isinstance(cell["source"], list) for cell in lists)
    lines: list[str] = []
    places: list[tuple[int, int, int | None]] = []
    for number, cell in enumerate(cells, 1):
        if not isinstance(cell, dict):
            continue
        start = starts[_index(lists, cell)] if known and cell.get("source") else None
        code = _code(cell)
        of_python = not code.lstrip().startswith("%%") or _PYTHON.match(code.lstrip()) is not None
        if cell.get("cell_type") != "code" or not of_python:
            continue
        own = [_plain(line) for line in code.split("\n")]
        if not _parses("\n".join(own)):
            continue
        lines.extend(own)
        places.extend(
            (number, index, start + index if start is not None else None) for index in range(1, len(own) + 1)
        )
    return Notebook("\n".join(lines), tuple(places))


def commands_of(text: str) -> str:
    """Return the shell commands of a notebook, with the variables and files that its cells give them."""
    try:
        document: Any = load_json(text)
    except (ValueError, RecursionError):
        return ""
    cells = document.get("cells") if isinstance(document, dict) else None
    commands = _Commands()
    for cell in cells if isinstance(cells, list) else ():
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        code = _code(cell)
        head, _, rest = code.lstrip().partition("\n")
        written = _WRITES.match(head)
        if written is not None:
            opens = ">>" if written[1] else ">"
            commands.found.append(f"cat {opens} {written[2]} <<'{_END}'\n{rest}\n{_END}")
        elif head.startswith(("%%bash", "%%sh", "%%script bash")):
            commands.found.append(rest)
        elif not head.startswith("%%") or _PYTHON.match(head):
            commands.follow(rest if head.startswith("%%") else code)
    return "\n".join(commands.found)


class _Commands:
    """The commands of cells, in their order, with the values of Python that stand in them.

    A name that is bound to anything but a constant is not known from there on. Of two branches that both
    start something, none is taken.

    Attributes:
        found: Lines for a shell.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self._names: dict[str, object] = {}
        self._lines: list[str] = []

    def follow(self, code: str) -> None:
        """Follow a cell of Python; where one does not parse, the names in it are no longer known."""
        self._lines = []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tree = ast.parse(self._marked(code))
            self._block(tree.body)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self._forget(re.findall(r"[A-Za-z_]\w*", code))

    def _marked(self, code: str) -> str:
        """Return a cell with a call for each line that only a notebook understands."""
        lines: list[str] = []
        continues = False
        for line in code.split("\n"):
            stripped = line.lstrip()
            if continues:
                self._lines[-1] += f"\n{line}"
                lines.append("")
            elif stripped.startswith(("!", "%")):
                lines.append(f"{line[: len(line) - len(stripped)]}{_CALL}({len(self._lines)})")
                self._lines.append(stripped)
            else:
                lines.append(_CAPTURED.sub(rf"\1{_CALL}", line))
                continue
            continues = line.rstrip().endswith("\\")
        return "\n".join(lines)

    def _block(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, ast.Expr) and (at := _marked_line(node.value)) is not None:
                self._command(self._lines[at])
            elif isinstance(node, ast.Assign):
                self._assign(node.targets, node.value)
            elif isinstance(node, ast.AnnAssign) and node.value is not None:
                self._assign([node.target], node.value)
            elif isinstance(node, ast.If):
                self._branch(node)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._forget([node.name])
            else:
                self._leave_open(node)
                if isinstance(node, ast.For | ast.While | ast.With | ast.Try):
                    self._block(node.body)
                    if not isinstance(node, ast.With):
                        self._leave_open(node)

    def _branch(self, node: ast.If) -> None:
        value = self._value(node.test)
        if value is not _ABSENT:
            self._block(node.body if value else node.orelse)
            return
        starting = [part for part in (node.body, node.orelse) if any(map(_starts, part))]
        self._leave_open(node)
        if len(starting) == 1:
            self._block(starting[0])
            self._leave_open(node)

    def _assign(self, targets: list[ast.expr], value: ast.expr) -> None:
        known = self._value(value)
        for target in targets:
            variable = _environment_key(target)
            if isinstance(target, ast.Name) and known is not _ABSENT:
                self._names[target.id] = known
            elif variable is not None:
                self._export(variable, str(known) if known is not _ABSENT else f"${{{_NOT_KNOWN}}}")
            else:
                self._forget(_bound(target))

    def _value(self, node: ast.expr) -> object:
        if isinstance(node, ast.Constant) and isinstance(node.value, str | int | float | None):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._value(node.operand)
            return inner if inner is _ABSENT else not inner
        return self._names.get(node.id, _ABSENT) if isinstance(node, ast.Name) else _ABSENT

    def _leave_open(self, node: ast.stmt) -> None:
        """Let a part of a cell, which may run or not, leave unknown what it sets."""
        self._forget(_bound(node))
        for part in ast.walk(node):
            variable = _environment_key(part)
            if variable is not None and isinstance(part, ast.Subscript) and isinstance(part.ctx, ast.Store):
                self._export(variable, f"${{{_NOT_KNOWN}}}")

    def _forget(self, names: Iterable[str]) -> None:
        for name in names:
            self._names.pop(name, None)

    def _export(self, name: str, value: str) -> None:
        self.found.append(f"export {name}={value if '$' in value else shlex.quote(value)}")

    def _command(self, line: str) -> None:
        variable = _VARIABLE.match(line)
        if variable is not None:
            self._export(variable[1], self._expanded(variable[2].strip()))
        elif line.startswith("!"):
            self.found.append(self._expanded(line.lstrip("! ")))

    def _expanded(self, text: str) -> str:
        """Put values into a command as IPython 9 does (``utils/text.py:DollarFormatter``).

        A command in which something between braces is not an expression stays as it is, JSON for example.
        """
        made = ""
        try:
            for literal, expression, form, converted in string.Formatter().parse(text):
                made += _DOLLAR.sub(self._dollar, literal)
                whole = f"{{{expression}{f'!{converted}' if converted else ''}{f':{form}' if form else ''}}}"
                if expression is None:
                    continue
                if literal.endswith("$"):  # a variable of the shell
                    made += whole
                elif expression in self._names:
                    made += format(self._names[expression], form or "")
                elif isinstance(ast.parse(expression.strip(), mode="eval").body, ast.Constant):
                    return text
                else:
                    made += f"${{{_NOT_KNOWN}}}"
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return text
        return made

    def _dollar(self, found: re.Match[str]) -> str:
        name = found[1]
        return str(self._names[name]) if name in self._names else found[0]


def _marked_line(node: ast.expr) -> int | None:
    """Return which line of a notebook a call stands for, or None."""
    called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == _CALL
    argument = node.args[0] if isinstance(node, ast.Call) and called and node.args else None
    return argument.value if isinstance(argument, ast.Constant) and isinstance(argument.value, int) else None


def _starts(node: ast.stmt) -> bool:
    return any(isinstance(part, ast.expr) and _marked_line(part) is not None for part in ast.walk(node))


def _environment_key(target: ast.AST) -> str | None:
    """Return the variable that ``os.environ[...]`` stands for, or None."""
    if not isinstance(target, ast.Subscript) or ast.unparse(target.value) not in ("os.environ", "environ"):
        return None
    key = target.slice.value if isinstance(target.slice, ast.Constant) else None
    return key if isinstance(key, str) and key.isidentifier() else None


def _bound(node: ast.AST) -> list[str]:
    """Return the names that a part of a cell binds or deletes."""
    found: list[str] = []
    for part in ast.walk(node):
        if isinstance(part, ast.Name) and not isinstance(part.ctx, ast.Load):
            found.append(part.id)
        elif isinstance(part, ast.alias):
            found.append(part.asname or part.name.partition(".")[0])
        elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.append(part.name)
    return found


def _code(cell: dict[str, Any]) -> str:
    source = cell.get("source")
    return "".join(map(str, source)) if isinstance(source, list) else str(source or "")


def _index(cells: list[Any], cell: object) -> int:
    return next(index for index, other in enumerate(cells) if other is cell)


def _plain(line: str) -> str:
    """Return a line without what only a notebook understands."""
    stripped = line.lstrip()
    return f"{line[: len(line) - len(stripped)]}pass" if stripped.startswith(("%", "!")) else line


def _parses(text: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True
