"""What ``audit`` says of files: as text, as annotations of GitHub, and as SARIF."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fsdptool.formatting import printable
from fsdptool.records.advisory import AuditedFile, AuditFinding, AuditReport
from fsdptool.report.code_scanning import artifact, sarif_log, workflow_command


def text_lines(report: AuditReport) -> Iterator[str]:
    """Yield a paragraph for each advisory that applies to a file, two lines for one that may, and the sum."""
    for file in report.files:
        if file.problem is not None:
            yield f"{printable(file.path)}: not audited: {printable(file.problem)}"
        for item in file.findings:
            yield from _applied(file, item) if item.verdict == "applies" else _possible(file, item)
    if report.not_pinned:
        yield f"not pinned in {printable(report.versions_from)}, not audited: {', '.join(report.not_pinned)}"
    yield summary(report)


def _applied(file: AuditedFile, item: AuditFinding) -> Iterator[str]:
    yield f"{printable(file.path)}: {item.id} ({item.effect})"
    yield f"  {_versions(item)}"
    yield f"  {_consequence(item)}"
    if item.memory is not None:
        yield f"  memory: {item.memory}"
    if item.error is not None:
        yield f"  ends with: {item.error}"
    yield f"  change: {item.change}"
    yield f"  {item.references[0]}"


def _possible(file: AuditedFile, item: AuditFinding) -> Iterator[str]:
    yield f"{printable(file.path)}: {item.id} ({item.effect}) {_depends(item)}"
    yield f"  {_versions(item)}: {item.summary}: {item.references[0]}"


def _depends(item: AuditFinding) -> str:
    return f"may apply; the file does not show {'; '.join(item.unknown)}"


def _versions(item: AuditFinding) -> str:
    repaired = f"fixed in {item.fixed_in}" if item.fixed_in is not None else "no repaired release is known"
    return f"{item.package} {printable(item.installed)}, {repaired}"


def _consequence(item: AuditFinding) -> str:
    believed = " (reported, not reproduced)" if item.evidence == "reported" else ""
    return f"{item.consequence}{believed}"


def summary(report: AuditReport) -> str:
    """Return how many advisories apply, in a line."""
    found = [item for file in report.files for item in file.findings]
    applied = sum(item.verdict == "applies" for item in found)
    versions = ", ".join(f"{name} {' and '.join(items)}" for name, items in report.versions.items())
    count = len(report.files)
    applies = "1 applies" if applied == 1 else f"{applied} apply"
    return (
        f"{count} file{'s' * (count != 1)}, {report.advisories} advisories: {applies}, "
        f"{len(found) - applied} may apply ({printable(versions)})"
    )


def _message(item: AuditFinding) -> str:
    verdict = "" if item.verdict == "applies" else f" {_depends(item)}"
    return f"{item.id}{verdict}: {_versions(item)}. {_consequence(item)} Change: {item.change}"


def render_github(report: AuditReport) -> str:
    """Return one workflow command per advisory of a file."""
    lines = []
    for file in report.files:
        if file.problem is not None:
            fields = {"title": "fsdptool audit", "file": file.path}
            lines.append(workflow_command("error", fields, f"not audited: {file.problem}", None))
        for item in file.findings:
            fields = {"title": f"fsdptool {item.id}", "file": file.path}
            lines.append(workflow_command(_level(item, "notice"), fields, _message(item), item.references[0]))
    return "".join(lines)


def _level(item: AuditFinding, least: str) -> str:
    """Return how severe a finding is in code scanning; ``least`` is the name of the lowest level."""
    if item.verdict == "may_apply" or item.effect == "cosmetic":
        return least
    return "error" if item.effect in ("wrong results", "crash") else "warning"


def sarif_document(report: AuditReport) -> dict[str, Any]:
    """Return the log: one run, the advisories that were found, and a result for each in each file."""
    found = [(file, item) for file in report.files for item in file.findings]
    rules: dict[str, AuditFinding] = {}
    for _, item in found:
        rules.setdefault(item.id, item)
    names = sorted(rules)
    results = [
        {
            "ruleId": item.id,
            "ruleIndex": names.index(item.id),
            "level": _level(item, "note"),
            "message": {"text": _message(item)},
            "locations": [{"physicalLocation": {"artifactLocation": artifact(file.path)}}],
        }
        for file, item in found
    ]
    return sarif_log([_rule(rules[name]) for name in names], results)


def _rule(item: AuditFinding) -> dict[str, Any]:
    return {
        "id": item.id,
        "shortDescription": {"text": item.summary},
        "fullDescription": {"text": item.consequence},
        "help": {"text": item.change},
        "helpUri": item.references[0],
        "defaultConfiguration": {"level": _level(item, "note")},
    }
