"""Load what most questions need, before the first one is asked."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module


def load(progress: Callable[[str], None]) -> None:
    """Import torch and what traces a model with it."""
    progress("loading PyTorch")
    for name in ("torch", "fsdptool.inspection", "fsdptool.planning.plan"):
        import_module(name)
