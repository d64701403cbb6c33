"""Configuration files: every dialect, what it really means, fixes, migration. Torch-free.

The functions load on first use: a command that only needs the table of rules imports no reader.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdptool.config.programs import Consumer
    from fsdptool.config.reader import read_settings
    from fsdptool.config.result import Reading
    from fsdptool.config.writer import write_settings

__all__ = ["Consumer", "Reading", "read_settings", "write_settings"]

_HOMES = {"Consumer": "programs", "Reading": "result", "read_settings": "reader", "write_settings": "writer"}


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
