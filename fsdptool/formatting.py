"""Byte counts as people read them."""

from __future__ import annotations

_UNITS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def amount(value: int | None) -> str:
    """Return bytes in binary units with the digits that matter, ``53.9 GiB``; None is ``unknown``."""
    if value is None:
        return "unknown"
    sign, value = ("-", -value) if value < 0 else ("", value)
    for size, unit in _UNITS:
        if value >= size:
            number = value / size
            return f"{sign}{number:.1f} {unit}" if number >= 10 else f"{sign}{number:.2f} {unit}"
    return f"{sign}{value} B"
