"""Notebooks as scripts: the code of all cells, one after the other, and where each line comes from."""

from __future__ import annotations

import ast
import warnings
from dataclasses import dataclass
from typing import Any

from fsdptool.files.values import load_json


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
        source = cell.get("source")
        code = "".join(map(str, source)) if isinstance(source, list) else str(source or "")
        if cell.get("cell_type") != "code" or code.lstrip().startswith("%%"):
            continue
        own = [_plain(line) for line in code.split("\n")]
        if not _parses("\n".join(own)):
            continue
        lines.extend(own)
        places.extend(
            (number, index, start + index if start is not None else None) for index in range(1, len(own) + 1)
        )
    return Notebook("\n".join(lines), tuple(places))


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
