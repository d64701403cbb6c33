"""Code that a person names as ``package.module:name``. Callers check that it may be imported."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from fsdptool.errors import ModelError
from fsdptool.families.bases.families import one_line
from fsdptool.spelling import nearest


def import_named(reference: str, folder: str | None) -> Any:
    """Return what a reference names.

    The folder comes last on the path, so nothing in it can take the place of an installed package.

    Args:
        reference: ``package.module:name``; the name may have dots.
        folder: Where the top package is, if not on the path.

    Raises:
        ModelError: The module cannot be imported, or has nothing of that name.
    """
    name, _, path = reference.partition(":")
    if folder is not None and folder not in sys.path:
        sys.path.append(folder)
    try:
        value: Any = import_module(name)
    except Exception as error:
        raise ModelError(
            f"{name} cannot be imported: {type(error).__name__}: {one_line(error)}",
            help="start fsdptool in the folder that contains it, install it, or set PYTHONPATH",
        ) from error
    names = [key for key in vars(value) if not key.startswith("_")]
    for attribute in path.split("."):
        value = getattr(value, attribute, None)
    if value is None:
        near = nearest(path, names, cutoff=0.6)
        raise ModelError(
            f"{reference} does not exist",
            help=f"did you mean {name}:{near}?" if near else f"define {path} in {name}",
        )
    return value
