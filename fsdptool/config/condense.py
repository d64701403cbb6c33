"""One finding for what is one thing to a reader: leftovers of FSDP1, and keys in an old spelling."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from fsdptool.config.canonical import LEGACY
from fsdptool.config.context import Finding, LintContext
from fsdptool.config.fsdp1 import NotEditableError, Rewriter, edits_between
from fsdptool.records.diagnostic import Edit

_JOINED = {
    "FSD204": "{count} keys are read under other names: {keys}",
    "FSD302": "{count} FSDP1 keys have no effect: {keys}",
}
"""Codes whose findings in one file become one, and what it says of the keys."""

_ONLY_FSDP1 = frozenset((*LEGACY, "backward_prefetch_policy", "flatten_parameters"))
_UNREAD = frozenset({"FSD202", "FSD211", "FSD302"})


def condense(lint: LintContext, findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings of a file with those joined that are one thing to do.

    Where FSDP1 runs, its unread keys are notes: the finding that FSDP1 runs is the one to act on, and
    migrating removes them.

    Args:
        lint: The file.
        findings: What no comment silences, in the order of the file.
    """
    kept = list(findings)
    if any(finding.diagnostic.code == "FSD301" for finding in kept):
        kept = [_as_note(finding) for finding in kept]
    for code, words in _JOINED.items():
        members = [item for item in kept if item.diagnostic.code == code and item.elsewhere is None]
        if len(members) > 1:
            at = kept.index(members[0])
            kept = [finding for finding in kept if finding not in members]
            kept.insert(at, _joined(lint, members, words))
    return kept


def _as_note(finding: Finding) -> Finding:
    item = finding.diagnostic
    leftover = (finding.key or "").removeprefix("fsdp_") in _ONLY_FSDP1
    if item.code not in _UNREAD or not leftover or item.severity != "warning":
        return finding
    return replace(finding, diagnostic=replace(item, severity="info"))


def _joined(lint: LintContext, members: list[Finding], words: str) -> Finding:
    first = members[0].diagnostic
    keys = ", ".join(member.key or "?" for member in members)
    fixable = [member for member in members if member.diagnostic.fix is not None]
    fix, changes = None, dict[str, Any]()
    for member in fixable:
        changes.update(member.changes)
    if fixable:
        sample = fixable[0].diagnostic.fix
        assert sample is not None
        verb = sample.description.split()[0]
        named = ", ".join(
            member.diagnostic.fix.description.removeprefix(f"{verb} ")
            for member in fixable
            if member.diagnostic.fix is not None
        )
        edits = _edits(lint, fixable)
        fix = replace(sample, description=f"{verb} {named}", edits=edits) if edits else None
    severity = min((member.diagnostic.severity for member in members), key=_WEIGHT.index)
    item = replace(first, message=words.format(count=len(members), keys=keys), severity=severity, fix=fix)
    return replace(members[0], diagnostic=item, changes=changes if fix is not None else {})


_WEIGHT = ("error", "warning", "info")


def _edits(lint: LintContext, members: list[Finding]) -> tuple[Edit, ...] | None:
    """Return the edits of all members together."""
    edits = sorted(
        (edit for member in members if member.diagnostic.fix for edit in member.diagnostic.fix.edits),
        key=lambda edit: (edit.start, edit.end),
    )
    if all(before.end <= after.start for before, after in pairwise(edits)):
        return tuple(edits)
    # Neighbours at the end of a mapping share a comma or a newline: remove them one after another.
    steps = Rewriter(lint.source, lint.dialect)
    try:
        for member in members:
            key = member.key or ""
            steps.drop(None if lint.root.get(key) is not None else "fsdp_config", key)
    except NotEditableError:
        return None
    return edits_between(lint.source.text, steps.source.text)
