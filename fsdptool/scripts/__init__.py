"""Training scripts, judged from their text: they are parsed, and never imported or run."""

from __future__ import annotations

import re
from pathlib import Path

from fsdptool.files.text import UnreadableError, read_bytes

SCRIPTS = (".py", ".ipynb")
"""Endings of the files that are read as training scripts."""
_NAMES = re.compile(rb"fsdp|fully_?shard", re.IGNORECASE)


def mentions_fsdp(path: Path) -> bool:
    """Say whether a file that was found in a folder mentions FSDP; others are not parsed."""
    try:
        return _NAMES.search(read_bytes(path)) is not None
    except UnreadableError:
        return False
