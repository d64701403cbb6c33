"""Fixes: edits to spans. One is offered, and applied, only where the program accepts the result.

A copy of the text is edited and judged like the original: the finding must be gone, no other error may be
new, and the settings may change only as announced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fsdptool.config.lint_settings import FindingSelector, selector_of
from fsdptool.config.reader import disjoint, key_of, try_fixes, withhold_refused
from fsdptool.config.result import Reading
from fsdptool.files.text import SourceText
from fsdptool.records.diagnostic import Diagnostic

_PASSES = 8


@dataclass(frozen=True, slots=True)
class Applied:
    """One fix that was applied, in words, and the settings it changed (none for a safe one)."""

    code: str
    line: int | None
    description: str
    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Repaired:
    """A file after fixing. ``after`` equals ``before`` when nothing was or could be applied."""

    before: SourceText
    after: SourceText
    reading: Reading
    applied: tuple[Applied, ...] = ()


def repair(reading: Reading, *, unsafe: bool = False, only: frozenset[str] | None = None) -> Repaired:
    """Apply the fixes of a reading until none is left.

    Every fix is checked by reading the result: what it changes must be what it said, and it must not
    bring new errors. A fix that fails the check is not applied.

    Args:
        reading: What :func:`read_settings` returned.
        unsafe: Also apply fixes that change the run.
        only: Codes to fix, or None for all.
    """
    assert reading.source is not None
    before = reading.source
    refused: set[tuple[str, str]] = set()
    applied: list[Applied] = []
    # Safe fixes first: an unsafe one (a migration) rewrites lines that they repair. And once more
    # afterwards, for what an unsafe one brought to light.
    for safe in (True, False, True) if unsafe else (True,):
        for _ in range(_PASSES):
            step = _step(reading, safe, only, refused)
            if step is None:
                break
            reading, done = step
            applied.extend(done)
    if applied:
        reading = withhold_refused(reading)
    assert reading.source is not None
    return Repaired(before, reading.source, reading, tuple(applied))


def repair_selected(
    reading: Reading, selectors: Iterable[FindingSelector], *, unsafe: bool = False
) -> Repaired:
    """Apply the fixes of selected findings and no others, each checked as :func:`repair` checks it.

    Places are those of the reading that is given. Findings that a fix brings to light stay.

    Args:
        reading: What :func:`read_settings` returned.
        selectors: Which findings.
        unsafe: Also apply fixes that change the run.
    """
    assert reading.source is not None
    before = reading.source
    wanted = [
        item
        for item in selected(reading, selectors)
        if item.fix is not None and item.fix.edits and (unsafe or item.fix.safe)
    ]
    # Safe fixes first, as in repair; from the end, so that those before keep their places.
    wanted.sort(key=lambda item: (item.fix is None or item.fix.safe, item.line or 0, item.column or 0))
    keys = Counter(map(key_of, reading.diagnostics))
    applied = []
    for item in reversed(wanted):
        index = _index(reading, item, unique=keys[key_of(item)] == 1)
        result = try_fixes(reading, [index]) if index is not None else None
        if index is not None and result is not None:
            applied.append(_applied(reading, index))
            reading = result
    if applied:
        reading = withhold_refused(reading)
    assert reading.source is not None
    return Repaired(before, reading.source, reading, tuple(applied))


def selected(reading: Reading, selectors: Iterable[FindingSelector]) -> list[Diagnostic]:
    """Return the findings of a reading that any selector matches."""
    every = tuple(selectors)
    return [item for item in reading.diagnostics if any(one.matches(item) for one in every)]


def _index(reading: Reading, wanted: Diagnostic, *, unique: bool) -> int | None:
    """Return where a finding stands after other fixes: at its place, or moved if it was ``unique``."""
    alike = [index for index, item in enumerate(reading.diagnostics) if key_of(item) == key_of(wanted)]
    if not unique:
        place = selector_of(wanted)
        alike = [index for index in alike if selector_of(reading.diagnostics[index]) == place]
    return alike[0] if alike else None


def _step(
    reading: Reading,
    safe: bool,
    only: frozenset[str] | None,
    refused: set[tuple[str, str]],
) -> tuple[Reading, list[Applied]] | None:
    """Apply all fixes of one kind at once, or one by one where that fails; None when nothing is left."""
    candidates = [
        index
        for index, item in enumerate(reading.diagnostics)
        if item.fix is not None
        and item.fix.safe is safe
        and item.fix.edits
        and (only is None or item.code in only)
        and key_of(item) not in refused
    ]
    if not safe:
        # A migration writes out what runs, so what is to begin to count must count by then.
        first = [index for index in candidates if reading.diagnostics[index].code != "FSD301"]
        candidates = first or candidates
    if not candidates:
        return None
    chosen = disjoint(reading, candidates)
    result = try_fixes(reading, chosen)
    if result is not None:
        return result, [_applied(reading, index) for index in chosen]
    # One by one, from the end: what uses an anchor stands behind it, and has to go first.
    done: list[Applied] = []
    for key in [key_of(reading.diagnostics[index]) for index in reversed(candidates)]:
        index = next((i for i, item in enumerate(reading.diagnostics) if key_of(item) == key), None)
        fix = reading.diagnostics[index].fix if index is not None else None
        if index is None or fix is None or fix.safe is not safe:
            continue
        result = try_fixes(reading, [index])
        if result is None:
            refused.add(key)
        else:
            done.append(_applied(reading, index))
            reading = result
    return (reading, done) if done else None


def _applied(reading: Reading, index: int) -> Applied:
    item = reading.diagnostics[index]
    assert item.fix is not None
    return Applied(item.code, item.line, item.fix.description, reading.changes[index])
