"""Notebooks as scripts: the code of all cells, one after the other, and where each line comes from."""

from __future__ import annotations

import ast
import re
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fsdptool.files.values import load_json

_PYTHON = re.compile(r"%%(?:time|timeit|capture|prun|memit)\b")
"""Magics of a whole cell that is Python all the same."""
_WRITES = re.compile(r"%%(?:writefile|file)\s+(?!-a\b)([\w./~-]+)\s*$")
_VARIABLE = re.compile(
    r"""(?:%(?:set_)?env\s+(\w+)[=\s](?!\$)(.+)|os\.environ\[["'](\w+)["']\]\s*=\s*["'](.*)["'])$"""
)
_CONSTANT = re.compile(r"""([A-Za-z_]\w*)\s*=\s*("[^"\\]*"|'[^'\\]*'|-?\d[\d.e-]*)\s*(?:\#.*)?$""")
_NAMED = re.compile(r"(?<!\$)\{([A-Za-z_]\w*)\}")
"""A name of Python in a command: IPython puts its value there."""
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
    found: list[str] = []
    for cell in cells if isinstance(cells, list) else ():
        if not isinstance(cell, dict) or cell.get("cell_type") != "code":
            continue
        code = _code(cell)
        head, _, rest = code.lstrip().partition("\n")
        written = _WRITES.match(head)
        if written is not None:
            found.append(f"cat > {written[1]} <<'{_END}'\n{rest}\n{_END}")
        elif head.startswith(("%%bash", "%%sh", "%%script bash")):
            found.append(rest)
        elif not head.startswith("%%") or _PYTHON.match(head):
            found.extend(_lines(code))
    return "\n".join(found)


def _lines(code: str) -> Iterator[str]:
    """Yield what the lines of a cell say to a shell: commands, and names for constants."""
    continues = False
    for line in code.split("\n"):
        stripped = line.strip()
        if continues or stripped.startswith("!"):
            yield _NAMED.sub(r"${\1}", line if continues else stripped.lstrip("! "))
            continues = stripped.endswith("\\")
        elif (variable := _VARIABLE.match(stripped)) is not None:
            name, value = variable[1] or variable[3], variable[2] if variable[1] else variable[4]
            yield f"export {name}={shlex.quote(value.strip())}"
        elif (constant := _CONSTANT.match(line)) is not None:
            yield f"{constant[1]}={shlex.quote(constant[2].strip(chr(34) + chr(39)))}"


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
