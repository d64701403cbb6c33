"""Finds embeddings whose weight the model's code reads without calling them.

A unit is gathered when its module is called. DeBERTa takes ``self.rel_embeddings.weight`` instead: as a
unit of its own it would still be sharded there, while the root's parameters are gathered. What counts
is the source of the classes the model is made of, but for functions that run before training.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

_NOT_FORWARD = (
    "__init__",
    "_init",
    "init_",
    "tie_",
    "_tie",
    "reset_",
    "resize_",
    "set_",
    "get_input_",
    "load",
)
"""Beginnings of the names of functions that do not run in a training step."""
_HARMLESS = frozenset({"device", "dtype", "is_floating_point", "ndim", "requires_grad", "shape", "size"})
"""What may be asked of a sharded weight: a DTensor answers with the whole tensor's properties."""


def weights_read(paths: Iterable[str], kinds: Iterable[type]) -> tuple[str, ...]:
    """Return the paths of embeddings whose weight the model's code reads.

    Args:
        paths: Of the embeddings.
        kinds: The classes of the model's modules.
    """
    classes = {base for kind in kinds for base in kind.__mro__ if not base.__module__.startswith("torch.")}
    modules = {kind.__module__ for kind in classes}
    names = {kind.__name__ for kind in classes}
    found = []
    for path in paths:
        name = next((part for part in reversed(path.split(".")) if not part.isdigit()), path)
        # Most sources never write it down, and parsing one takes far longer than searching it.
        hits = [module for module in modules if _mentions(name, _source(module))]
        if any(name in reads for module in hits for owner, reads in _read_in(module) if owner in names):
            found.append(path)
    return tuple(found)


def _mentions(name: str, text: str) -> bool:
    """Say whether a source has the name's weight outside a quoted key (``"model.embed.weight"``)."""
    if name not in text or ".weight" not in text:
        return False
    start = r"""(?:(?<=[\])]\.)|(?<!["'\w.])(?:\w+\.)*)"""
    return re.search(rf"{start}{re.escape(name)}(?:\[[^\]]*\])?\.weight\b", text) is not None


@cache
def _source(module: str) -> str:
    file = getattr(sys.modules.get(module), "__file__", None)
    try:
        return Path(file).read_text(encoding="utf-8") if file else ""
    except (OSError, ValueError):
        return ""


@cache
def _read_in(module: str) -> tuple[tuple[str, frozenset[str]], ...]:
    """Return, for each class of a Python module, the attributes of which it reads ``.weight``."""
    try:
        tree = ast.parse(_source(module))
    except SyntaxError:
        return ()
    return tuple((node.name, frozenset(_reads(node))) for node in tree.body if isinstance(node, ast.ClassDef))


def _reads(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef) and child.name.startswith(_NOT_FORWARD):
            continue
        if isinstance(child, ast.Attribute) and child.attr in _HARMLESS and _owner(child.value):
            continue
        if name := _owner(child):
            yield name
        yield from _reads(child)


def _owner(node: ast.AST) -> str | None:
    """Return ``name`` of an expression ``name.weight`` or ``name[...].weight`` that is read."""
    if not isinstance(node, ast.Attribute) or node.attr != "weight" or not isinstance(node.ctx, ast.Load):
        return None
    owner = node.value.value if isinstance(node.value, ast.Subscript) else node.value
    if isinstance(owner, ast.Attribute):
        return owner.attr
    return owner.id if isinstance(owner, ast.Name) else None
