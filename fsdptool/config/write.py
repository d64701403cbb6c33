"""Writing settings out in a dialect; what a dialect cannot express is an error that names it."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from fsdptool.config.dialects import DIALECTS
from fsdptool.errors import ConfigError
from fsdptool.records.settings import FsdpSettings

MODELINE = "# yaml-language-server: $schema=accelerate-fsdp2.schema.json"


def write_settings(settings: FsdpSettings, dialect: str = "accelerate", *, header: Sequence[str] = ()) -> str:
    """Return the settings as a file of a dialect, every default that differs between programs written out.

    Args:
        settings: What to write.
        dialect: ``accelerate``, ``trainer``, ``axolotl``, ``llamafactory``, ``simpletuner``, ``env``
            or ``flags``.
        header: Comment lines (without ``#``) to put first, where the dialect has comments.

    Raises:
        ConfigError: The dialect is unknown, or cannot express a setting; the message names it.
    """
    if dialect not in DIALECTS:
        raise ConfigError(f"unknown dialect {dialect!r}", help=f"choose one of: {', '.join(DIALECTS)}")
    text: str = import_module(f"fsdptool.config.dialects.{DIALECTS[dialect]}").write(settings, tuple(header))
    return text
