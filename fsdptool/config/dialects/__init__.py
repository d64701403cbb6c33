"""The dialects: one module each, with ``read`` and ``write``.

Those that are mappings have ``matches``, to be recognised by, and ``migrate``, from FSDP1 to FSDP2 in place.
"""

from __future__ import annotations

from importlib import import_module

from fsdptool.files.tree import Node

DIALECTS = {
    "accelerate": "accelerate.reader",
    "trainer": "trainer.reader",
    "axolotl": "axolotl.reader",
    "llamafactory": "llamafactory.reader",
    "simpletuner": "simpletuner.reader",
    "env": "environment.reader",
    "flags": "flags.reader",
}
"""Dialect name to module under ``fsdptool.config.dialects``."""

_MAPPINGS = ("accelerate", "axolotl", "simpletuner", "llamafactory", "trainer")


def detect_dialect(root: Node, path: str) -> tuple[str | None, tuple[str, str] | None]:
    """Return the dialect of a mapping, or None and a refusal ``(code, message)`` that names the format."""
    from fsdptool.config.dialects import foreign

    if foreign.is_xla(root):
        return None, ("FSD110", foreign.XLA)
    scores = {name: import_module(f"{__name__}.{DIALECTS[name]}").matches(root) for name in _MAPPINGS}
    best = max(scores, key=lambda name: scores[name])
    if scores[best] >= 0.9:
        return best, None
    refusal = foreign.refuse(root, path)
    if refusal is not None:
        return None, ("FSD110", refusal)
    return (best, None) if scores[best] > 0.2 else (None, None)
