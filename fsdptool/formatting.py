"""Byte counts as a person reads them, and names that others chose as a terminal may show them."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Protocol, TypeVar

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


def elapsed(seconds: float | None) -> str:
    """Return a time span, ``45 s``, ``12 min 05 s``, ``3 h 20 min``, ``2 d 4 h``; None is ``unknown``."""
    if seconds is None:
        return "unknown"
    whole = round(max(seconds, 0.0))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600} h"


def printable(text: str) -> str:
    """Return ``text`` as part of one line: control characters, newlines and escapes are replaced.

    Everything that a file, its name or a model said goes through here before a person, a terminal or a
    log of a build server sees it: a newline would begin a line of its own (``::error``), an escape
    sequence would drive the terminal.
    """
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else " " if character == "\t" else "\N{REPLACEMENT CHARACTER}"
        for character in text
    )


def printable_lines(text: str) -> str:
    """Return a text of several lines, each of them as :func:`printable` has it; line ends stay."""
    return re.sub(r"[^\r\n]+|\r(?!\n)", lambda match: printable(match[0]), text)


def printable_json(text: str) -> str:
    """Return JSON text in which every character that is not printable is an escape, line ends apart."""
    return _UNPRINTABLE_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


_UNPRINTABLE_JSON = re.compile("[\x7f-\x9f\xad\u200b-\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""JSON itself escapes the controls below 0x20."""


def numberless(path: str) -> str:
    """Return a path of a module or a parameter with ``*`` for every number."""
    return ".".join("*" if part.isdigit() else part for part in path.split("."))


_Item = TypeVar("_Item")


def alike(
    items: Iterable[_Item], name: Callable[[_Item], str], rest: Callable[[_Item], Hashable]
) -> list[tuple[str, list[_Item]]]:
    """Return items that differ only in the numbers of their names together, in order, with their common name.

    Args:
        items: For example parameters.
        name: The path of an item.
        rest: What else items have in common that stand together.
    """
    groups: dict[tuple[str, Hashable], list[_Item]] = {}
    for item in items:
        groups.setdefault((numberless(name(item)), rest(item)), []).append(item)
    return [(name(same[0]) if len(same) == 1 else key[0], same) for key, same in groups.items()]


def shortened(text: str, width: int) -> str:
    """Return one line of at most ``width`` characters: its middle gives way."""
    if len(text) <= width:
        return text
    head = max(width - 1, 0) // 3
    return f"{text[:head]}…{text[len(text) - (width - 1 - head) :]}"


class Sized(Protocol):
    """A flavour: its exact number of parameters, or None where that was never counted."""

    @property
    def parameters(self) -> int | None: ...


def by_size(flavours: Mapping[str, Sized]) -> list[str]:
    """Return names of flavours by their parameters; without a count, by the size that a name begins with.

    ``14b`` stands for 14e9 parameters, and ``8x7b`` counts as its product. Names without either come first.
    """

    def size(name: str) -> tuple[float, str]:
        counted = flavours[name].parameters
        if counted is not None:
            return float(counted), name
        found = re.match(r"(?:(\d+)x)?(\d+(?:\.\d+)?)([mbt])(?![a-z])", name.casefold())
        if found is None:
            return 0.0, name
        times, number, unit = found.groups()
        return float(times or 1) * float(number) * {"m": 1e6, "b": 1e9, "t": 1e12}[unit], name

    return sorted(flavours, key=size)


def count(value: int) -> str:
    """Return a parameter count as a person reads it, for example ``8.03 B``."""
    for size, unit in ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K")):
        if value >= size:
            return f"{value / size:.3g} {unit}" if value < 100 * size else f"{value / size:.0f} {unit}"
    return str(value)
