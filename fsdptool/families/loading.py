"""Loading what other people's packages name as entry points: bounded in time, kept from the output."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

SECONDS = float(os.environ.get("FSDPTOOL_PLUGIN_SECONDS", "60"))
"""How long one plugin may take to load; ours take milliseconds."""


class PluginTimeoutError(Exception):
    """A plugin did not load in time. It is left where it hangs, in a thread that ends with the process."""


def load_bounded(load: Callable[[], T]) -> T:
    """Return what ``load`` does, unless it takes longer than :data:`SECONDS`.

    What it prints goes to standard error, whichever way it is printed: standard output belongs to the
    answer, which may be JSON.

    Raises:
        PluginTimeoutError: It took too long.
        BaseException: What ``load`` raised, ``SystemExit`` included.
    """
    values: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            values.append(load())
        except BaseException as error:
            errors.append(error)

    with _output_aside():
        thread = threading.Thread(target=work, name="plugin", daemon=True)
        thread.start()
        thread.join(SECONDS)
    if thread.is_alive():
        raise PluginTimeoutError(f"it did not load within {SECONDS:g} s")
    if errors and isinstance(errors[0], KeyboardInterrupt):
        # Nobody pressed Ctrl-C: that would have reached the main thread, not this one.
        raise RuntimeError("it raised KeyboardInterrupt")
    if errors:
        raise errors[0]
    return values[0]


@contextlib.contextmanager
def _output_aside() -> Iterator[None]:
    """Send standard output to standard error, for Python and for what lies below it."""
    stack = contextlib.ExitStack()
    with stack:
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        # Without real streams (a notebook, a test) there is nothing below.
        with contextlib.suppress(OSError, ValueError):
            kept = os.dup(1)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, 1)
            # What a plugin left in the buffer goes where the plugin's output goes.
            stack.callback(_flush)
            _flush()
            os.dup2(2, 1)
        yield


def _flush() -> None:
    for stream in (sys.stdout, sys.__stdout__):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()  # type: ignore[union-attr]
