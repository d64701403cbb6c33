"""Reading: text, tree, dialect, facts, checks. A person's mistake is a finding, never an exception."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.config.canonical import COMMON, DETAILS, LEGACY, MESH, OF_FSDP, settings_from
from fsdptool.config.dialects import (
    REMEDIES,
    detect_dialect,
    known_programs,
    load_registry,
    resolve_consumer,
    script_versions,
    sniff_dialect,
)
from fsdptool.config.dialects.protocol import OF_ABSENCE, Dialect, DialectFinding, LintContext, parse_source
from fsdptool.config.edits import NotEditableError, Rewriter, edits_between
from fsdptool.config.programs import Consumer
from fsdptool.config.result import Conditions, Reading
from fsdptool.config.rules import RULES, file_rules
from fsdptool.config.rules.meaning import check_meaning
from fsdptool.errors import FsdptoolError
from fsdptool.files.text import SourceText, UnreadableError, read_source
from fsdptool.files.tree import Document, ParseError, duplicates, walk
from fsdptool.records.diagnostic import Diagnostic, Edit, EffectiveSetting, apply_edits
from fsdptool.scripts import SCRIPTS

if TYPE_CHECKING:
    from fsdptool.config.command_lines import Line, NamedFiles
    from fsdptool.config.rules.model import Hardware
    from fsdptool.records.anatomy import Anatomy


def read_settings(
    path_or_text: str | Path | SourceText,
    *,
    dialect: str | Dialect | None = None,
    consumer: str | None = None,
    target: str | None = None,
    environment: Mapping[str, str] | None = None,
    model: Anatomy | None = None,
    hardware: Hardware | None = None,
    files: NamedFiles | None = None,
) -> Reading:
    """Read a configuration as its consumer will read it.

    Args:
        path_or_text: A path, or the text itself (a string that holds a newline).
        dialect, consumer, target, environment, model, hardware, files: As for :class:`Conditions`.

    Raises:
        ConfigError: ``dialect``, ``consumer`` or ``target`` is not known. Whatever is wrong with the
            file itself is a diagnostic of the result.
    """
    return judge_file(
        path_or_text, Conditions(dialect, consumer, target, environment or {}, model, hardware, files)
    )


def judge_file(path_or_text: str | Path | SourceText, conditions: Conditions) -> Reading:
    """Read a configuration under given conditions, as :func:`read_settings`; errors are the same."""
    reading = _read(path_or_text, conditions)
    return withhold_refused(reading) if any(item.fix is not None for item in reading.diagnostics) else reading


def judged_or_failed(
    path_or_text: str | Path | SourceText, conditions: Conditions, *, fixes: bool = True
) -> Reading:
    """Read a file as :func:`judge_file`; whatever it holds, the other files of a call are judged as well.

    A failure of our own is a finding of the file. Without ``fixes``, none is tried and no migration is worked
    out, which takes half of the time.

    Raises:
        ConfigError: As :func:`read_settings`.
    """
    try:
        return judge_file(path_or_text, conditions) if fixes else _read(path_or_text, conditions, trial=True)
    except FsdptoolError:
        raise
    except Exception as error:
        path = path_or_text.path if isinstance(path_or_text, SourceText) else str(path_or_text)
        message = f"the file cannot be judged: internal error: {type(error).__name__}: {error}"
        judge = _consumer(conditions, None)
        return _failed("FSD101", message, judge, conditions, path=path, help="report it, with the file")


def read_again(reading: Reading, text: str, *, trial: bool = False) -> Reading:
    """Return the reading of a changed text, judged as ``reading`` was; its fixes are not tried.

    Whether a run fits does not depend on how its file is fixed. In a ``trial`` only the findings are needed,
    and no migration is worked out.
    """
    assert reading.source is not None
    conditions = replace(reading.conditions, dialect=reading.written_in)
    if conditions.hardware is not None:
        conditions = replace(conditions, hardware=replace(conditions.hardware, fit=None))
    return _read(reading.source.with_text(text), conditions, judge=reading.consumer, trial=trial)


def _consumer(
    conditions: Conditions, dialect: Dialect | None, natural: str | None = None, noted: str | None = None
) -> Consumer:
    """Return who a file is judged for: as it is asked for, as its comment says, or as is natural for it."""
    programs = dialect.programs if dialect is not None else ()
    natural = natural or (dialect.consumers[0] if dialect is not None else "accelerate")
    return resolve_consumer(conditions.consumer, conditions.target, natural, noted=noted, programs=programs)


def _read(
    path_or_text: str | Path | SourceText,
    conditions: Conditions,
    *,
    judge: Consumer | None = None,
    trial: bool = False,
) -> Reading:
    """Read and judge a text, without trying its fixes; ``judge`` is a consumer that was resolved before."""
    form = conditions.dialect
    path = path_or_text.path if isinstance(path_or_text, SourceText) else str(path_or_text)
    if form is None and path is not None and path.endswith(SCRIPTS) and "\n" not in path:
        return _read_script(path_or_text, path, conditions)
    if isinstance(form, str):
        form = load_registry().get(form)
    failed = partial(_failed, judged_for=_consumer(conditions, form), conditions=conditions)
    try:
        source = _source(path_or_text)
    except UnreadableError as error:
        return failed(error.code, error.message, path=str(path_or_text))
    failed = partial(failed, path=source.path, source=source)
    if source.text.startswith("\ufeff"):
        message = "the file begins with two byte-order marks: the second one is a part of the first key"
        return failed("FSD104", message, index=0, help="remove the byte-order marks")
    try:
        form = form or sniff_dialect(source.text)
        document = parse_source(source, form)
    except ParseError as error:
        return failed(error.code, error.message, index=error.index)
    root = document.root
    if root is None or root.kind != "map":
        return failed("FSD107", f"the file {_lack(source, document)}", index=0)
    if form is None:
        form, refusal = detect_dialect(root)
        if form is None:
            code, message = refusal or ("FSD109", "nothing in the file identifies the program that reads it")
            return failed(code, message, index=root.start, help=REMEDIES.get(message))
    judged = partial(_judge, source, form, read_comments(source), conditions, judge=judge, trial=trial)
    if document.language != "flags":
        return judged(document)
    from fsdptool.config.command_lines import read_lines

    first, *others = (judged(line.document, line) for line in read_lines(source, conditions.files))
    return _together(first, others)


def _read_script(path_or_text: str | Path | SourceText, path: str, conditions: Conditions) -> Reading:
    """Judge a training script; it is parsed, and never imported or run."""
    from fsdptool.scripts.judge import judge_script

    versions = script_versions(conditions.target)
    consumer = Consumer("torch", versions["torch"], beside=tuple(versions.items()))
    try:
        source = _source(path_or_text)
    except UnreadableError as error:
        return _failed(error.code, error.message, consumer, conditions, path=path)
    judged = judge_script(source, versions)
    if judged.refusal is not None:
        message, line, column = judged.refusal
        index = source.line_start(line) + column - 1
        return _failed("FSD104", message, consumer, conditions, path=path, source=source, index=index)
    if source.text.count("Layer") + source.text.count("Block"):
        from fsdptool.config.script_classes import absent_classes

        absent = absent_classes(source, conditions.model)
        judged = replace(judged, findings=(*judged.findings, *absent))
    return Reading(
        None, judged.findings, (), (), "python", consumer, conditions, path=source.path, source=source,
        changes=tuple({} for _ in judged.findings), suppressed=judged.suppressed,
    )  # fmt: skip


def _judge(
    source: SourceText,
    form: Dialect,
    comments: Comments,
    conditions: Conditions,
    document: Document,
    line: Line | None = None,
    *,
    judge: Consumer | None,
    trial: bool,
) -> Reading:
    """Return the reading of a file, or of one command ``line`` of it, as its program reads it."""
    reader = load_registry().get(line.dialect) if line is not None and line.dialect is not None else form
    root = document.root
    assert root is not None
    failed = partial(_failed, conditions=conditions, path=source.path, source=source, dialect=form.name)
    noted = comments.consumer
    if conditions.consumer is None and noted is not None and noted not in known_programs():
        return failed(
            "FSD114",
            f"the file says consumer={noted}; there is no known program of that name",
            _consumer(conditions, reader),
            index=comments.consumer_at,
            help=f"choose one of: {', '.join(known_programs())}",
        )
    natural = (line.consumer if line is not None else None) or reader.consumer_of(root)
    consumer = judge or _consumer(conditions, reader, natural, noted)
    if consumer.name not in reader.consumers:
        return failed(
            "FSD114",
            f"{consumer.name} does not read {reader.name} files",
            consumer,
            index=comments.consumer_at if conditions.consumer is None else None,
            help=_advice(reader, natural, consumer.name),
        )
    lint = LintContext(source, document, consumer, reader, RULES, conditions.environment, trial=trial)
    if line is None:
        _check_text(lint)
        reader.read(lint)
    else:
        _read_line(lint, line)
    lint.leave_open()
    if line is None or not line.refused:
        check_meaning(lint, model=conditions.model, hardware=conditions.hardware)
    for index, message in comments.unknown:
        lint.report("FSD112", message, index)
    for problem in load_registry().problems.values():
        lint.report("FSD115", problem)
    reading = _finish(lint, comments, form, conditions)
    return reading if line is None else replace(reading, named=line.files)


def _read_line(lint: LintContext, line: Line) -> None:
    """Read one command: what a launcher sets first, then what its script makes of that."""
    from fsdptool.config.command_lines import export

    lint.environment = {**lint.environment, **line.environment}
    lint.open.update(line.open)
    for code, text, at, advice in line.findings:
        lint.report(code, text, at, help=advice)
    for entry in line.replaced:
        lint.ignore(entry, "the command line decides")
    if line.refused:
        lint.runs_fsdp = lint.configures_fsdp = False
        return
    below: LintContext | None = None
    if line.launcher is not None:
        launcher = load_registry().get(line.launcher.dialect or "flags")
        judge = resolve_consumer(None, None, launcher.consumers[0], programs=launcher.programs)
        below = LintContext(lint.source, line.launcher.document, judge, launcher, RULES, lint.environment)
        launcher.read(below)
        below.open.update(line.launcher.open)
        below.leave_open()
        lint.findings.extend(item for item in below.findings if item.diagnostic.code in _LAUNCH_STOPS)
        lint.environment = {**lint.environment, **export(below)}
    _check_text(lint)
    lint.dialect.read(lint)
    if below is not None:
        for key, fact in below.facts.items():
            unwritten = key == "mixed_precision" and lint.get(key) == "no" and not lint.written(key)
            if key not in lint.facts or unwritten:
                lint.facts[key] = fact
        lint.parallelism_block = lint.parallelism_block or below.parallelism_block
        lint.open = {**below.open, **lint.open}
        lint.deepspeed = lint.deepspeed or below.distributed_type == "DEEPSPEED"
    if not line.known:
        # What is written was judged; what is not written, the file decides that was not read.
        lint.configures_fsdp = False
        lint.facts = {key: fact for key, fact in lint.facts.items() if fact.entry is not None}
        lint.findings = [item for item in lint.findings if item.diagnostic.code not in OF_ABSENCE]


_LAUNCH_STOPS = frozenset({"FSD201", "FSD205", "FSD208", "FSD210", "FSD212", "FSD218", "FSD219"})
"""Findings about a file that ``accelerate launch`` itself refuses, whatever its script reads."""


def _together(first: Reading, others: Iterable[Reading]) -> Reading:
    """Return the reading of the first command, with what is found in the others."""
    seen = {(item.code, item.message, item.line) for item in first.diagnostics}
    diagnostics, changes = list(first.diagnostics), list(first.changes)
    for other in others:
        for item, change in zip(other.diagnostics, other.changes, strict=True):
            if (item.code, item.message, item.line) not in seen:
                seen.add((item.code, item.message, item.line))
                diagnostics.append(item)
                changes.append(change)
    return replace(first, diagnostics=tuple(diagnostics), changes=tuple(changes))


def _lack(source: SourceText, document: Document) -> str:
    if document.root is None and not source.text.strip():
        return "is empty"
    if document.language in ("env", "flags"):
        return (
            "does not contain `NAME=value` lines"
            if document.language == "env"
            else "does not contain a `--flag`"
        )
    return "contains comments only" if document.root is None else "does not contain `key: value` pairs"


def _advice(dialect: Dialect, natural: str, consumer: str) -> str:
    """Return what to do with a file that its consumer does not read."""
    also = " (accelerate launch reads it, whatever script it starts)" if dialect.name == "accelerate" else ""
    readable = [other.name for other in load_registry().read_by(consumer)]
    rewrite = f", or write it for {consumer}: fsdptool migrate --to {readable[0]} FILE" if readable else ""
    return f"check it with --consumer {natural}{also}{rewrite}"


def _source(path_or_text: str | Path | SourceText) -> SourceText:
    if isinstance(path_or_text, SourceText):
        return path_or_text
    if isinstance(path_or_text, str) and "\n" in path_or_text:
        return SourceText(path_or_text)
    return read_source(path_or_text)


def _check_text(lint: LintContext) -> None:
    """Report what is wrong with the text itself, whatever the dialect."""
    seen: set[int] = set()
    for node in walk(lint.root):
        if id(node) in seen or node.alias:
            continue
        seen.add(id(node))
        if node.error:
            lint.report("FSD111", node.error, node)
        for loser, winner in duplicates(node):
            lint.ignore(loser, f"written again on line {lint.line(winner)}, which takes effect")
            lint.report(
                "FSD108",
                f"{loser.key} is written again on line {lint.line(winner)}, which takes effect",
                loser,
                edits=lint.editor.remove(node, loser),
                fix=f"remove this {loser.key}",
            )


def _finish(lint: LintContext, comments: Comments, form: Dialect, conditions: Conditions) -> Reading:
    facts = {key: fact.value for key, fact in lint.facts.items()}
    effective = []
    for key in (*COMMON, *DETAILS, *LEGACY):
        fact = lint.facts.get(key)
        if fact is None or (not lint.runs_fsdp and key in _FSDP_ONLY):
            continue
        here = fact.entry is not None and fact.entry.key_node.file is None
        line = lint.line(fact.entry) if fact.entry is not None and here else None
        value: Any = list(fact.value) if isinstance(fact.value, tuple) else fact.value
        origin = fact.origin
        if key in lint.overridden:
            value, origin, line = lint.overridden[key], f"default of {lint.consumer}", None
        effective.append(EffectiveSetting(key, value, origin, line))
    ordered = sorted(lint.findings, key=lambda finding: (finding.order, finding.diagnostic.code))
    silenced = {id(item) for item in ordered if _silenced(item, comments)}
    kept = condense(lint, [item for item in ordered if id(item) not in silenced])
    return Reading(
        settings=settings_from(facts) if lint.runs_fsdp and lint.configures_fsdp else None,
        diagnostics=tuple(finding.diagnostic for finding in kept),
        effective=tuple(effective),
        ignored=tuple(sorted(lint.ignored, key=lambda item: item.line or 0)),
        dialect=form.name,
        consumer=lint.consumer,
        conditions=conditions,
        version=lint.get("fsdp_version") if lint.runs_fsdp else None,
        path=lint.source.path,
        source=lint.source,
        document=lint.document,
        changes=tuple(finding.changes for finding in kept),
        suppressed=tuple(item.diagnostic for item in ordered if id(item) in silenced),
        facts=facts,
        written_in=form,
        open={key: str(entry.node.value) for key, entry in lint.open.items()},
        used=tuple(fact.entry for fact in lint.facts.values() if fact.entry is not None),
        dtypes=lint.dialect.dtypes(lint) if lint.runs_fsdp and lint.configures_fsdp else None,
    )


def _silenced(item: DialectFinding, comments: Comments) -> bool:
    """Whether a comment silences a finding, in the file that was read or in the one that it is about."""
    if comments.silences(item.diagnostic):
        return True
    if item.elsewhere is None:
        return False
    source, line = item.elsewhere
    return read_comments(source).silences(replace(item.diagnostic, line=line))


_FSDP_ONLY = frozenset((*OF_FSDP, *DETAILS, *LEGACY, *MESH, "cp_comm_strategy"))


def _failed(
    code: str,
    message: str,
    judged_for: Consumer,
    conditions: Conditions,
    *,
    path: str | None,
    source: SourceText | None = None,
    index: int | None = None,
    dialect: str | None = None,
    help: str | None = None,
) -> Reading:
    """Return the reading of a file that is not judged any further, with the finding that says why."""
    rule = RULES[code]
    line, column = source.place(index) if source is not None and index is not None else (None, None)
    end = column + 1 if column else None
    first = Diagnostic(code, rule.severity, message, help or rule.fix, path, line, column, line, end)
    rule = RULES["FSD115"]
    left_out = (
        Diagnostic(rule.code, rule.severity, problem, rule.fix, path)
        for problem in load_registry().problems.values()
    )
    found = (first, *left_out)
    return Reading(
        None, found, (), (), dialect, judged_for, conditions, path=path, source=source,
        changes=tuple({} for _ in found),
    )  # fmt: skip


_COMMENT = re.compile(r"#\s*fsdptool:\s*(.*)")
_WORD = re.compile(
    r"(?:(ignore)(?:\[([^\[\]]*)\])?|consumer\s*=\s*([A-Za-z][\w-]*)|(?:layout|plan)=[^\s,;#]+)(?=[\s,;#]|$)[\s,;]*",
    re.I,
)
"""``layout`` and ``plan`` say where an emitted file comes from."""


@dataclass(slots=True)
class Comments:
    """What the comments of one file say.

    Attributes:
        consumer: The name after ``consumer=``, in lower case, or None.
        consumer_at: Index of that comment.
        unknown: What was not understood, with the index of its comment: it silences nothing.
    """

    consumer: str | None = None
    consumer_at: int | None = None
    unknown: list[tuple[int, str]] = field(default_factory=list)
    _file: set[str] = field(default_factory=set)
    _lines: dict[int, set[str]] = field(default_factory=dict)

    def silences(self, diagnostic: Diagnostic) -> bool:
        """Whether a comment on the finding's line, or one for the whole file, names its code."""
        codes = self._file | self._lines.get(diagnostic.line or -1, set())
        return "*" in codes or diagnostic.code in codes

    def take(self, source: SourceText, number: int, match: re.Match[str]) -> None:
        """Read the comment on a line: word after word, up to the first that is not fsdptool's."""
        at, text = source.line_start(number) + match.start(), match.group(1).rstrip()
        own_line = not source.line(number)[: match.start()].strip()
        while text:
            word = _WORD.match(text)
            if word is None:
                self.unknown.append(
                    (at, f"{text.split()[0]!r} is not understood (ignore[CODE], consumer=NAME)")
                )
                return
            if word.group(3):
                self.consumer, self.consumer_at = word.group(3).lower(), at
            elif word.group(1):
                self._silence(number, own_line, at, word.group(2))
            text = text[word.end() :]
            if text.startswith("#"):  # another comment
                return

    def _silence(self, number: int, own_line: bool, at: int, named: str | None) -> None:
        codes = {"*"} if named is None else {code.strip().upper() for code in named.split(",")} - {""}
        if not codes:
            self.unknown.append((at, "ignore[] does not name a rule"))
        self.unknown.extend(
            (at, f"{code} is not a rule") for code in sorted(codes - {"*"}) if code not in file_rules()
        )
        (self._file if own_line else self._lines.setdefault(number, set())).update(codes)


def read_comments(source: SourceText) -> Comments:
    """Return what the comments say; on a line of its own one is about the whole file, else about its line."""
    comments = Comments()
    if "fsdptool:" in source.text:
        for number in range(1, source.line_count + 1):
            match = _COMMENT.search(source.line(number))
            if match is not None:
                comments.take(source, number, match)
    return comments


_JOINED = {
    "FSD204": "{count} keys are read under other names: {keys}",
    "FSD302": "{count} FSDP1 keys have no effect: {keys}",
}
"""Codes whose findings in one file become one, and what it says of the keys."""

_ONLY_FSDP1 = frozenset((*LEGACY, "backward_prefetch_policy", "flatten_parameters"))
_UNREAD = frozenset({"FSD202", "FSD211", "FSD302"})


def condense(lint: LintContext, findings: Iterable[DialectFinding]) -> list[DialectFinding]:
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


def _as_note(finding: DialectFinding) -> DialectFinding:
    item = finding.diagnostic
    leftover = (finding.key or "").removeprefix("fsdp_") in _ONLY_FSDP1
    if item.code not in _UNREAD or not leftover or item.severity != "warning":
        return finding
    return replace(finding, diagnostic=replace(item, severity="info"))


def _joined(lint: LintContext, members: list[DialectFinding], words: str) -> DialectFinding:
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


def _edits(lint: LintContext, members: list[DialectFinding]) -> tuple[Edit, ...] | None:
    """Return the edits of all members together."""
    edits = sorted(
        (edit for member in members if member.diagnostic.fix for edit in member.diagnostic.fix.edits),
        key=lambda edit: (edit.start, edit.end),
    )
    if all(before.end <= after.start for before, after in pairwise(edits)):
        return tuple(edits)
    # Neighbours at the end of a mapping share a comma or a newline: remove them one after another.
    steps = Rewriter(lint.source, partial(parse_source, dialect=lint.dialect))
    try:
        for member in members:
            key = member.key or ""
            steps.drop(None if lint.root.get(key) is not None else "fsdp_config", key)
    except NotEditableError:
        return None
    return edits_between(lint.source.text, steps.source.text)


def withhold_refused(reading: Reading) -> Reading:
    """Return a reading without the fixes whose result its program would refuse.

    Safe fixes, which leave the run as it is, are tried together, and one by one where that fails.
    """
    offered = [index for index, item in enumerate(reading.diagnostics) if item.fix and item.fix.edits]
    safe = [index for index in offered if reading.diagnostics[index].fix.safe]  # type: ignore[union-attr]
    together = disjoint(reading, safe)
    good = (
        set(together) if len(together) > 1 and try_fixes(reading, together, trial=True) is not None else set()
    )
    good.update(
        index
        for index in offered
        if index not in good and try_fixes(reading, [index], trial=True) is not None
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


def key_of(item: Diagnostic) -> tuple[str, str]:
    """Return what a finding is known by after other edits: its code and message."""
    return item.code, item.message


def disjoint(reading: Reading, candidates: list[int]) -> list[int]:
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


def try_fixes(reading: Reading, group: list[int], *, trial: bool = False) -> Reading | None:
    """Return the reading with a group of its fixes applied, or None where they do not hold."""
    assert reading.source is not None
    edits = [edit for index in group for edit in reading.diagnostics[index].fix.edits]  # type: ignore[union-attr]
    try:
        text = apply_edits(reading.source.text, edits)
    except ValueError:
        return None
    if text == reading.source.text:
        return None
    again = read_again(reading, text, trial=trial)
    if not _gone(reading, again, group):
        return None
    promised: dict[str, Any] = {}
    for index in group:
        promised.update(reading.changes[index])
    return again if kept(reading, again, promised) else None


def _gone(before: Reading, after: Reading, group: list[int]) -> bool:
    """Whether each finding of a group is gone."""
    left, had = Counter(map(key_of, after.diagnostics)), Counter(map(key_of, before.diagnostics))
    taken = Counter(key_of(before.diagnostics[index]) for index in group)
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
