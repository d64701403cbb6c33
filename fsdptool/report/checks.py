"""What ``check`` says of training files: as text, annotations of GitHub, a comment in Markdown, and SARIF."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from fsdptool.formatting import amount, printable
from fsdptool.records.advice import SuggestionKind
from fsdptool.records.config_documents import CheckedFile, CheckReport, CheckVerdict
from fsdptool.report.code_scanning import artifact, sarif_log, workflow_command
from fsdptool.report.plan_words import verdict

VERDICTS: Mapping[CheckVerdict, str] = {
    "fits": "fits",
    "does_not_fit": "does not fit",
    "unknown": "unknown",
    "not_planned": "not planned",
}
_LEVELS = {"does_not_fit": "error", "unknown": "notice", "not_planned": "notice"}
MARK = "<!-- fsdptool check -->"
"""First line of the comment in Markdown, by which a workflow finds the comment that it wrote before."""


def answer(item: CheckedFile) -> str:
    """Return the verdict; where a run fits, with the share of published runs that agree."""
    return verdict("fits", item.fit_share) if item.verdict == "fits" else VERDICTS[item.verdict]


def need(item: CheckedFile) -> str:
    """Return what a run needs of what there is, and on which hardware; empty where there is no plan."""
    if item.hardware is None:
        return ""
    if item.needed_bytes is None or item.usable_bytes is None:
        return f"on {item.hardware}"
    return f"needs {amount(item.needed_bytes)} of {amount(item.usable_bytes)} on {item.hardware}"


def before(item: CheckedFile) -> str:
    """Return what the run needed before the change; empty for a new file, and without a base."""
    earlier = item.before
    if earlier is None or item.verdict == "not_planned":
        return ""
    if earlier.same_run:
        return "the same run"
    if earlier.needed_bytes is None:
        return VERDICTS[earlier.verdict]
    fitted = earlier.usable_bytes is not None and earlier.needed_bytes <= earlier.usable_bytes
    return amount(earlier.needed_bytes) + ("" if fitted else ", too much")


def reasons(item: CheckedFile) -> list[str]:
    """Return why a run is not planned, or what decides an unknown verdict."""
    found = [item.reason] if item.reason is not None and item.verdict != "does_not_fit" else []
    found += [f"not planned: {limit.what}" for limit in item.limits if item.verdict == "unknown"]
    return found


def change(item: CheckedFile) -> str:
    """Return the smallest change that makes a run fit; empty where it fits."""
    smallest = item.smallest_change
    if smallest is None:
        return ""
    # The suggestions before it are not shown here.
    if smallest.kind is SuggestionKind.COMBINED:
        changed, first = {**smallest.settings, **smallest.hardware}, []
    elif smallest.with_all_above:
        # The number of GPUs says over how many ranks a model is sharded.
        changed = {name: value for name, value in smallest.settings.items() if name != "dp_shard"}
        first = [smallest.change]
    else:
        return smallest.change
    words = [f"{name.replace('_', ' ')} {str(value).lower()}" for name, value in changed.items()]
    return ", ".join([*first, *words, *(f"{name}={value}" for name, value in smallest.environment.items())])


def message(item: CheckedFile) -> str:
    """Return everything about one file in one line."""
    earlier, smallest = before(item), change(item)
    parts = [
        need(item),
        f"before this change: {earlier}" if earlier else "new file" if _is_new(item) else "",
        f"smallest change that fits: {smallest}" if smallest else "",
        *reasons(item),
    ]
    if item.verdict == "does_not_fit" and item.reason is not None and not _short_of_device_memory(item):
        parts.insert(1, item.reason)
    return printable("; ".join(part for part in parts if part))


def _is_new(item: CheckedFile) -> bool:
    return item.changed_in is not None and item.before is None and item.verdict != "not_planned"


def _short_of_device_memory(item: CheckedFile) -> bool:
    known = item.needed_bytes is not None and item.usable_bytes is not None
    return known and (item.needed_bytes or 0) > (item.usable_bytes or 0)


def text_lines(report: CheckReport) -> Iterator[str]:
    """Yield a line for each file, and the sum; files that nobody named and no program reads are counted."""
    for item in _listed(report):
        place = f"{item.changed_in}:{item.line}" if item.line is not None else item.path
        about = f" ({item.path})" if item.line is not None and item.changed_in != item.path else ""
        line = f"{printable(place)}{printable(about)}: {answer(item)}: {message(item)}"
        yield line + (f" ({printable(item.help)})" if item.help else "")
    yield summary(report)


def summary(report: CheckReport) -> str:
    """Return how many files have which verdict, in a line."""
    planned = [item for item in report.files if item.verdict != "not_planned"]
    verdicts = Counter(item.verdict for item in planned)
    counted = [f"{verdicts[name]} {words}" for name, words in VERDICTS.items() if verdicts[name]]
    since = f" changed since {report.base}" if report.base is not None else ""
    if not report.files:
        return printable(f"no training file{since}")
    head = f"{_files(len(planned))}{since} planned"
    others = len(report.files) - len(planned)
    tail = f"; {_files(others)} not planned" if others else ""
    return printable(f"{head}{': ' if counted else ''}{', '.join(counted)}{tail}")


def _files(count: int) -> str:
    return f"{count} file{'s' * (count != 1)}"


def _listed(report: CheckReport) -> Iterable[CheckedFile]:
    return (item for item in report.files if item.named or item.program is not None)


def github_lines(report: CheckReport) -> Iterator[str]:
    """Yield a workflow command for each file that does not fit, or about which nothing certain is known."""
    for item in _told(report):
        line = str(item.line) if item.line is not None else None
        fields = {"title": "fsdptool check", "file": item.changed_in or item.path, "line": line}
        yield workflow_command(_LEVELS[item.verdict], fields, _said(item), item.help).rstrip("\n")


def sarif_document(report: CheckReport) -> dict[str, Any]:
    """Return the log: one run, a rule for each verdict, and a result for each file that GitHub is told of."""
    told = list(_told(report))
    names = sorted({item.verdict for item in told})
    results = []
    for item in told:
        location: dict[str, Any] = {"artifactLocation": artifact(item.changed_in or item.path)}
        if item.line is not None:
            location["region"] = {"startLine": item.line}
        results.append(
            {
                "ruleId": item.verdict,
                "ruleIndex": names.index(item.verdict),
                "level": _sarif_level(item.verdict),
                "message": {"text": _said(item) + (f" ({printable(item.help)})" if item.help else "")},
                "locations": [{"physicalLocation": location}],
            }
        )
    rules = [
        {
            "id": name,
            "shortDescription": {"text": f"The run of a training file: {VERDICTS[name]}"},
            "defaultConfiguration": {"level": _sarif_level(name)},
        }
        for name in names
    ]
    return sarif_log(rules, results)


def _sarif_level(verdict: CheckVerdict) -> str:
    return "error" if _LEVELS[verdict] == "error" else "note"


def _told(report: CheckReport) -> Iterator[CheckedFile]:
    return (item for item in _listed(report) if item.verdict in _LEVELS)


def _said(item: CheckedFile) -> str:
    about = "" if item.changed_in in (None, item.path) else f"{printable(item.path)}: "
    return f"{about}{answer(item)}: {message(item)}"


def markdown_lines(report: CheckReport) -> Iterator[str]:
    """Yield a comment for a pull request: a table of the files that are planned, and a list of the others."""
    yield MARK
    yield f"**fsdptool check**: {_escaped(summary(report))}"
    listed = list(_listed(report))
    planned = [item for item in listed if item.verdict != "not_planned"]
    if planned:
        heads = ["file", "verdict", "needs", *(["before"] if report.base is not None else [])]
        heads.append("smallest change that fits")
        yield ""
        yield f"| {' | '.join(heads)} |"
        yield "|---" * len(heads) + "|"
        for item in planned:
            earlier = (
                [before(item) or ("new file" if _is_new(item) else "")] if report.base is not None else []
            )
            bold = "**" if item.verdict == "does_not_fit" else ""
            said = f"{bold}{answer(item)}{bold}"
            why = "; ".join(reasons(item))
            cells = [
                f"`{printable(item.path).replace('`', '')}`",
                said + (f": {_escaped(why)}" if why else ""),
            ]
            cells += [_escaped(text) for text in (need(item).removeprefix("needs "), *earlier, change(item))]
            yield f"| {' | '.join(cells)} |"
    others = [item for item in listed if item.verdict == "not_planned"]
    if others:
        yield ""
    for item in others:
        advice = f" ({_escaped(item.help)})" if item.help else ""
        yield f"- `{printable(item.path).replace('`', '')}`: {_escaped(item.reason or '')}{advice}"


def _escaped(text: str) -> str:
    """Return text with every mark escaped: what files say may not link, mention or close a cell."""
    shown = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace("@", "&#64;")
    return "".join(f"\\{mark}" if mark in "\\`*_[]|#!" else mark for mark in shown)
