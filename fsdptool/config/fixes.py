"""Fixes: edits to spans. One is offered, and applied, only where the program accepts the result.

A copy of the text is edited and judged like the original: the finding must be gone, no other error may be
new, and the settings may change only as announced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fsdptool.config.canonical import COMMON, DETAILS, LEGACY
from fsdptool.config.edits import apply_edits
from fsdptool.config.reader import read_again
from fsdptool.config.result import Reading
from fsdptool.config.selection import FindingSelector, selector_of
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


def repair(
    reading: Reading, *, unsafe: bool = False, only: frozenset[str] | None = None, **judged: Any
) -> Repaired:
    """Apply the fixes of a reading until none is left.

    Every fix is checked by reading the result: what it changes must be what it said, and it must not
    bring new errors. A fix that fails the check is not applied.

    Args:
        reading: What :func:`read_settings` returned.
        unsafe: Also apply fixes that change the run.
        only: Codes to fix, or None for all.
        judged: What :func:`read_settings` judged by besides the file (``environment``, ``model``,
            ``hardware``), so that every pass judges alike.
    """
    assert reading.source is not None
    before = reading.source
    refused: set[tuple[str, str]] = set()
    applied: list[Applied] = []
    arguments = _conditions(judged)
    # Safe fixes first: an unsafe one (a migration) rewrites lines that they repair. And once more
    # afterwards, for what an unsafe one brought to light.
    for safe in (True, False, True) if unsafe else (True,):
        for _ in range(_PASSES):
            step = _step(reading, safe, only, refused, arguments)
            if step is None:
                break
            reading, done = step
            applied.extend(done)
    if applied:
        reading = withhold_refused(reading, **arguments)
    assert reading.source is not None
    return Repaired(before, reading.source, reading, tuple(applied))


def repair_selected(
    reading: Reading, selectors: Iterable[FindingSelector], *, unsafe: bool = False, **judged: Any
) -> Repaired:
    """Apply the fixes of selected findings and no others, each checked as :func:`repair` checks it.

    Places are those of the reading that is given. Findings that a fix brings to light stay.

    Args:
        reading: What :func:`read_settings` returned.
        selectors: Which findings.
        unsafe: Also apply fixes that change the run.
        judged: As for :func:`repair`.
    """
    assert reading.source is not None
    before, arguments = reading.source, _conditions(judged)
    wanted = [
        item
        for item in selected(reading, selectors)
        if item.fix is not None and item.fix.edits and (unsafe or item.fix.safe)
    ]
    # Safe fixes first, as in repair; from the end, so that those before keep their places.
    wanted.sort(key=lambda item: (item.fix is None or item.fix.safe, item.line or 0, item.column or 0))
    keys = Counter(map(_key, reading.diagnostics))
    applied = []
    for item in reversed(wanted):
        index = _index(reading, item, unique=keys[_key(item)] == 1)
        result = _try(reading, [index], arguments) if index is not None else None
        if index is not None and result is not None:
            applied.append(_applied(reading, index))
            reading = result
    if applied:
        reading = withhold_refused(reading, **arguments)
    assert reading.source is not None
    return Repaired(before, reading.source, reading, tuple(applied))


def selected(reading: Reading, selectors: Iterable[FindingSelector]) -> list[Diagnostic]:
    """Return the findings of a reading that any selector matches."""
    every = tuple(selectors)
    return [item for item in reading.diagnostics if any(one.matches(item) for one in every)]


def _index(reading: Reading, wanted: Diagnostic, *, unique: bool) -> int | None:
    """Return where a finding stands after other fixes: at its place, or moved if it was ``unique``."""
    alike = [index for index, item in enumerate(reading.diagnostics) if _key(item) == _key(wanted)]
    if not unique:
        place = selector_of(wanted)
        alike = [index for index in alike if selector_of(reading.diagnostics[index]) == place]
    return alike[0] if alike else None


def _conditions(judged: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a changed text is judged by; whether a run fits does not depend on how a file is fixed."""
    kept = {key: judged[key] for key in ("environment", "model", "hardware") if judged.get(key) is not None}
    if "hardware" in kept:
        kept["hardware"] = replace(kept["hardware"], fit=None)
    return kept


def withhold_refused(reading: Reading, **judged: Any) -> Reading:
    """Return a reading without the fixes whose result its program would refuse.

    Safe fixes, which leave the run as it is, are tried together, and one by one where that fails.

    Args:
        reading: A reading whose fixes have not been tried.
        judged: As for :func:`repair`.
    """
    arguments = {**_conditions(judged), "trial": True}
    offered = [index for index, item in enumerate(reading.diagnostics) if item.fix and item.fix.edits]
    safe = [index for index in offered if reading.diagnostics[index].fix.safe]  # type: ignore[union-attr]
    together = _disjoint(reading, safe)
    good = set(together) if len(together) > 1 and _try(reading, together, arguments) is not None else set()
    good.update(
        index for index in offered if index not in good and _try(reading, [index], arguments) is not None
    )
    refused = {index for index in offered if index not in good}
    if not refused:
        return reading
    diagnostics = tuple(
        replace(item, fix=None) if index in refused else item
        for index, item in enumerate(reading.diagnostics)
    )
    changes = tuple({} if index in refused else item for index, item in enumerate(reading.changes))
    return replace(reading, diagnostics=diagnostics, changes=changes)


def _step(
    reading: Reading,
    safe: bool,
    only: frozenset[str] | None,
    refused: set[tuple[str, str]],
    arguments: dict[str, Any],
) -> tuple[Reading, list[Applied]] | None:
    """Apply all fixes of one kind at once, or one by one where that fails; None when nothing is left."""
    candidates = [
        index
        for index, item in enumerate(reading.diagnostics)
        if item.fix is not None
        and item.fix.safe is safe
        and item.fix.edits
        and (only is None or item.code in only)
        and _key(item) not in refused
    ]
    if not safe:
        # A migration writes out what runs, so what is to begin to count must count by then.
        first = [index for index in candidates if reading.diagnostics[index].code != "FSD301"]
        candidates = first or candidates
    if not candidates:
        return None
    chosen = _disjoint(reading, candidates)
    result = _try(reading, chosen, arguments)
    if result is not None:
        return result, [_applied(reading, index) for index in chosen]
    # One by one, from the end: what uses an anchor stands behind it, and has to go first.
    done: list[Applied] = []
    for key in [_key(reading.diagnostics[index]) for index in reversed(candidates)]:
        index = next((i for i, item in enumerate(reading.diagnostics) if _key(item) == key), None)
        fix = reading.diagnostics[index].fix if index is not None else None
        if index is None or fix is None or fix.safe is not safe:
            continue
        result = _try(reading, [index], arguments)
        if result is None:
            refused.add(key)
        else:
            done.append(_applied(reading, index))
            reading = result
    return (reading, done) if done else None


def _key(item: Diagnostic) -> tuple[str, str]:
    return item.code, item.message


def _applied(reading: Reading, index: int) -> Applied:
    item = reading.diagnostics[index]
    assert item.fix is not None
    return Applied(item.code, item.line, item.fix.description, reading.changes[index])


def _disjoint(reading: Reading, candidates: list[int]) -> list[int]:
    """Choose fixes whose edits do not touch; those left out come with the next pass."""
    taken: list[tuple[int, int]] = []
    chosen = []
    for index in candidates:
        fix = reading.diagnostics[index].fix
        assert fix is not None
        spans = [(edit.start, edit.end) for edit in fix.edits]
        if all(end < start or stop < begin for begin, end in taken for start, stop in spans):
            taken.extend(spans)
            chosen.append(index)
    return chosen


def _try(reading: Reading, group: list[int], arguments: dict[str, Any]) -> Reading | None:
    assert reading.source is not None
    edits = [edit for index in group for edit in reading.diagnostics[index].fix.edits]  # type: ignore[union-attr]
    try:
        text = apply_edits(reading.source.text, edits)
    except ValueError:
        return None
    if text == reading.source.text:
        return None
    again = read_again(reading, text, **arguments)
    if not _gone(reading, again, group):
        return None
    promised: dict[str, Any] = {}
    for index in group:
        promised.update(reading.changes[index])
    return again if kept(reading, again, promised) else None


def _gone(before: Reading, after: Reading, group: list[int]) -> bool:
    """Whether each finding of a group is gone."""
    left, had = Counter(map(_key, after.diagnostics)), Counter(map(_key, before.diagnostics))
    taken = Counter(_key(before.diagnostics[index]) for index in group)
    return all(left[key] <= had[key] - count for key, count in taken.items())


def kept(before: Reading, after: Reading, promised: Mapping[str, Any]) -> bool:
    """Whether a changed file means exactly what was promised, and nothing else moved.

    Args:
        before, after: The file read before and after the edits.
        promised: Settings with their new values; ``*`` allows a group of keys to begin to count (a
            misspelt key, a switch), never to change one that counted already.
    """
    if after.dialect != before.dialect or _errors(after) - _errors(before):
        return False
    old, new = before.facts, after.facts
    for key in (*COMMON, *DETAILS, *LEGACY):
        was, now = old.get(key), new.get(key)
        if _plain(was) == _plain(now):
            continue
        if key in promised and fulfils(promised[key], now):
            continue
        counted = any(setting.key == key and setting.line is not None for setting in before.effective)
        if "*" in promised and not counted:
            continue
        return False
    return True


def _errors(reading: Reading) -> Counter[str]:
    """Return how often each code is an error, with those that settings or a baseline hold back.

    The file is read again without settings and baseline, so both sides must count them.
    """
    found = (*reading.diagnostics, *reading.suppressed)
    return Counter(item.code for item in found if item.severity == "error")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def fulfils(promise: Any, now: Any) -> bool:
    """A fix announces the canonical value, or the text whose canonical value the reader decides."""
    if promise is None:
        return now is None
    if isinstance(promise, bool | int) and not isinstance(now, str):
        return bool(promise == now)
    return now is not None
