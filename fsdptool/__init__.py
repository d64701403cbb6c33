"""fsdptool: plan, write, check and run PyTorch FSDP2 configurations.

The public functions load on first use, so that ``import fsdptool`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdptool.api.answers import compare as compare
    from fsdptool.api.answers import detect as detect
    from fsdptool.api.answers import plan as plan
    from fsdptool.api.answers import read_plan as read_plan
    from fsdptool.api.audit import audit as audit
    from fsdptool.api.emit_config import emit_config as emit_config
    from fsdptool.api.explain import explain as explain
    from fsdptool.api.integrations import ProofCallback as ProofCallback
    from fsdptool.api.integrations import ProofTracker as ProofTracker
    from fsdptool.api.migrate import migrate as migrate
    from fsdptool.api.prove import prove as prove
    from fsdptool.api.runs import export as export
    from fsdptool.api.runs import precompute as precompute
    from fsdptool.api.runs import train as train
    from fsdptool.api.validate import validate as validate
    from fsdptool.config.reader import read_settings as read_settings
    from fsdptool.config.recipe import read_recipe as read_recipe
    from fsdptool.config.writer import write_settings as write_settings

    __version__: str

_PUBLIC: dict[str, str] = {
    "ProofCallback": "fsdptool.api.integrations",
    "ProofTracker": "fsdptool.api.integrations",
    "audit": "fsdptool.api.audit",
    "compare": "fsdptool.api.answers",
    "detect": "fsdptool.api.answers",
    "emit_config": "fsdptool.api.emit_config",
    "explain": "fsdptool.api.explain",
    "export": "fsdptool.api.runs",
    "migrate": "fsdptool.api.migrate",
    "plan": "fsdptool.api.answers",
    "precompute": "fsdptool.api.runs",
    "prove": "fsdptool.api.prove",
    "read_plan": "fsdptool.api.answers",
    "read_recipe": "fsdptool.config.recipe",
    "read_settings": "fsdptool.config.reader",
    "train": "fsdptool.api.runs",
    "validate": "fsdptool.api.validate",
    "write_settings": "fsdptool.config.writer",
}
"""Public name to the module that defines it."""

__all__ = list(_PUBLIC)


def __getattr__(name: str) -> Any:
    """Load a public function on first use (PEP 562)."""
    if name == "__version__":
        return import_module("fsdptool.records.diagnostic").tool_version()
    if name not in _PUBLIC:
        raise AttributeError(f"module 'fsdptool' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    """List the public names without loading them."""
    return [*__all__, "__version__"]
