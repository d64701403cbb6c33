"""fsdptool: plan, write, check and run PyTorch FSDP2 configurations.

The public functions load on first use, so that ``import fsdptool`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdptool.api.emit_config import emit_config as emit_config
    from fsdptool.api.validate import validate as validate
    from fsdptool.config.reader import read_settings as read_settings
    from fsdptool.config.recipe import read_recipe as read_recipe
    from fsdptool.config.writer import write_settings as write_settings
    from fsdptool.inspection.api import detect as detect
    from fsdptool.planning.plan import plan as plan

_PUBLIC: dict[str, str] = {
    "read_recipe": "fsdptool.config.recipe",
    "read_settings": "fsdptool.config.reader",
    "write_settings": "fsdptool.config.writer",
    "detect": "fsdptool.inspection.api",
    "plan": "fsdptool.planning.plan",
    "emit_config": "fsdptool.api.emit_config",
    "validate": "fsdptool.api.validate",
}
"""Public name to the module that defines it."""

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Load a public function on first use (PEP 562)."""
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fsdptool' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    """List the public names without loading them."""
    return list(__all__)
