"""The rules on meaning: what the settings do together, for the consumer of the file."""

from __future__ import annotations

from typing import Any

from fsdptool.config.draft import Draft


def judge(draft: Draft, *, model: Any = None, hardware: Any = None) -> None:
    """Report what the facts of a draft mean together."""
