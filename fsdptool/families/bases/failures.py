"""Turns other libraries' exceptions into one line, and keeps their remarks off the terminal."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fsdptool.errors import ModelError

_SPACE = re.compile(r"\s+")
_LIMIT = 300


def one_line(error: BaseException) -> str:
    """Return what went wrong on one line: an import error names the package, a cause is followed."""
    cause: BaseException = error
    while cause.__cause__ is not None and not str(cause).strip():
        cause = cause.__cause__
    text = _SPACE.sub(" ", str(cause)).strip() or type(cause).__name__
    if isinstance(cause, KeyError):
        text = f"missing key {text}"
    elif isinstance(cause, ImportError):
        text = f"a package is missing: {text}"
    elif isinstance(cause, MemoryError):
        text = f"too large to build: {text}"
    return text if len(text) <= _LIMIT else text[: _LIMIT - 1] + "…"


def a_model(name: str, found: Any) -> Any:
    """Return what a library has under the name of a model's class.

    Raises:
        ModelError: It is something else: a pipeline, a configuration, an automatic class.
    """
    from torch import nn

    # Stand-ins for classes whose packages are missing say so themselves when they are built.
    stand_in = ".dummy_" in getattr(found, "__module__", "")
    if not stand_in and not (isinstance(found, type) and issubclass(found, nn.Module)):
        raise ModelError(
            f"{name} is not the class of a model",
            help="name the class that is trained under 'architectures' or '_class_name'",
        )
    return found


@contextmanager
def quiet(library: str) -> Iterator[None]:
    """Silence a library's logger and Python warnings below errors (both remark on valid models)."""
    logger = logging.getLogger(library)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
