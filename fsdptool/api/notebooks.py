"""Notebooks: progress of long work below a cell, and records that show themselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any, TypeVar

from fsdptool.runs.work import listening


@contextmanager
def notebook_progress() -> Iterator[Callable[[str], None] | None]:
    """Show the progress of the work in this block below a notebook's cell: one line, removed at the end.

    IPython's own display is used, which needs no widgets. IPython is not imported here: in a notebook it is.

    Yields:
        What is called with each line; None outside a notebook.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is None or not shell.has_trait("kernel"):  # a script, or IPython in a terminal
        yield None
        return
    display = sys.modules["IPython"].display.display
    handle: Any = None

    def show(text: str) -> None:
        nonlocal handle
        line = {"text/plain": text}
        if handle is None:
            handle = display(line, raw=True, display_id=True)
        else:
            handle.update(line, raw=True)

    try:
        with listening(show):
            yield show
    finally:
        if handle is not None:
            show("")


_Record = TypeVar("_Record")


def shown(kind: type[_Record], record: Any) -> _Record:
    """Return a record as its subclass that shows itself."""
    return kind(**{field.name: getattr(record, field.name) for field in fields(record)})
