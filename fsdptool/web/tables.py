"""Texts that tables of several pages share."""

from __future__ import annotations

import time


def moment_text(seconds: float) -> str:
    """Return a moment as ``2026-01-31 12:00:00 UTC``.

    Args:
        seconds: Since 1970.
    """
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
