"""Reading: text to tree to dialect to facts to rules. A person's mistake is a finding, never an exception."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from fsdptool.config.canonical import COMMON, DETAILS, LEGACY, settings_from
from fsdptool.config.checks import meaning as judge
from fsdptool.config.comments import Notes, read_notes
from fsdptool.config.consumers import CONSUMERS, NATURAL, READS, resolve_consumer
from fsdptool.config.context import LintContext
from fsdptool.config.dialects import DIALECTS, detect_dialect
from fsdptool.config.line_tree import parse_env, parse_flags, sniff
from fsdptool.config.result import Consumer, Reading, Setting
from fsdptool.config.rules import RULES
from fsdptool.errors import ConfigError
from fsdptool.files.json_tree import parse_json
from fsdptool.files.text import SourceText, UnreadableError, read_source
from fsdptool.files.tree import Document, ParseError, duplicates, walk
from fsdptool.files.yaml_tree import parse_yaml
from fsdptool.records.diagnostic import Diagnostic


def read_settings(
    path_or_text: str | Path | SourceText,
    *,
    dialect: str | None = None,
    consumer: str | None = None,
    target: str | None = None,
    environment: Mapping[str, str] | None = None,
    model: Any = None,
    hardware: Any = None,
) -> Reading:
    """Read a configuration as its consumer will read it.

    Args:
        path_or_text: A path, or the text itself (a string that holds a newline).
        dialect: Name of the dialect; None detects it from the content.
        consumer: ``accelerate``, ``fsdptool``, ``trainer``, ...; None takes what the file says in a
            ``# fsdptool: consumer=NAME`` comment, else the dialect's own program.
        target: Version to judge for, ``accelerate==1.15``.
        environment: Environment variables the program would inherit; None: none that matter.
        model: An :class:`~fsdptool.records.anatomy.Anatomy`, to judge the family ``model``.
        hardware: A :class:`fsdptool.config.checks.hardware.Hardware`, to judge the family ``hardware``.

    Raises:
        ConfigError: ``dialect``, ``consumer`` or ``target`` is not known. Whatever is wrong with the
            file itself is a diagnostic of the result.
    """
    if dialect is not None and dialect not in DIALECTS:
        raise ConfigError(f"unknown dialect {dialect!r}", help=f"choose one of: {', '.join(DIALECTS)}")
    resolve_consumer(consumer, target, dialect or "accelerate")
    failed = partial(_failed, consumer=consumer, target=target)
    try:
        source = _source(path_or_text)
    except UnreadableError as error:
        return failed(error.code, error.message, str(path_or_text), None, None)
    notes = read_notes(source)
    try:
        document = _parse(source, dialect)
    except ParseError as error:
        return failed(error.code, error.message, source.path, source, error.index)
    if document.root is None or document.root.kind != "map":
        return failed("FSD107", f"the file {_lack(source, document)}", source.path, source, 0)
    found, refusal = _dialect(document, dialect, source)
    if found is None:
        code, message = refusal or ("FSD109", "nothing in the file tells which program reads it")
        return failed(code, message, source.path, source, document.root.start)
    if consumer is None and notes.consumer is not None and notes.consumer not in CONSUMERS:
        message = f"the file says consumer={notes.consumer}; no program of that name is known"
        advice = f"choose one of: {', '.join(CONSUMERS)}"
        return failed("FSD114", message, source.path, source, notes.consumer_at, dialect=found, help=advice)
    written_for = _writer(found, document)
    judged_for = resolve_consumer(consumer, target, written_for, noted=notes.consumer)
    if found not in READS[judged_for.name]:
        message = f"{judged_for.name} does not read {found} files"
        place = notes.consumer_at if consumer is None else None
        return _failed(
            "FSD114",
            message,
            source.path,
            source,
            place,
            consumer=judged_for.name,
            target=judged_for.version,
            dialect=found,
            help=_advice(written_for, judged_for.name),
        )
    lint = LintContext(source, document, judged_for, found, environment or {})
    _general(lint)
    import_module(f"fsdptool.config.dialects.{DIALECTS[found]}").read(lint)
    judge.judge(lint, model=model, hardware=hardware)
    for index, message in notes.unknown:
        lint.report("FSD112", message, index)
    return _finish(lint, notes)


def _writer(dialect: str, document: Document) -> str:
    """Return the dialect whose program a file is for: a command line may be SimpleTuner's."""
    if dialect == "flags" and document.root is not None:
        from fsdptool.config.dialects.flags.reader import for_simpletuner

        return "simpletuner" if for_simpletuner(document.root) else dialect
    return dialect


def _lack(source: SourceText, document: Document) -> str:
    if document.root is None and not source.text.strip():
        return "is empty"
    if document.language in ("env", "flags"):
        return "holds no `NAME=value` lines" if document.language == "env" else "holds no `--flag`"
    return "holds comments only" if document.root is None else "holds no `key: value` pairs"


def _advice(dialect: str, consumer: str) -> str:
    """Return what to do with a file that its consumer does not read."""
    also = " (accelerate launch reads it, whatever script it starts)" if dialect == "accelerate" else ""
    return (
        f"judge it with --consumer {NATURAL[dialect]}{also}, or write it for {consumer}: "
        f"fsdptool migrate --to {READS[consumer][0]} FILE"
    )


def _source(given: str | Path | SourceText) -> SourceText:
    if isinstance(given, SourceText):
        return given
    if isinstance(given, str) and "\n" in given:
        return SourceText(given)
    return read_source(given)


def _parse(source: SourceText, dialect: str | None) -> Document:
    name = (source.path or "").lower()
    kind = dialect if dialect in ("env", "flags") else None if dialect else sniff(source.text)
    if kind == "env":
        return parse_env(source.text)
    if kind == "flags":
        return parse_flags(source.text)
    if name.endswith(".json") or (dialect == "simpletuner" and source.text.lstrip()[:1] == "{"):
        if source.bom:
            raise ParseError("FSD104", "not JSON to Python: the file begins with a byte-order mark", 0)
        return parse_json(source.text)
    return parse_yaml(source.text)


def _dialect(
    document: Document, dialect: str | None, source: SourceText
) -> tuple[str | None, tuple[str, str] | None]:
    if dialect is not None:
        return dialect, None
    if document.language in ("env", "flags"):
        return document.language, None
    assert document.root is not None
    return detect_dialect(document.root, source.path or "")


def _general(lint: LintContext) -> None:
    """Findings about the text itself, whatever the dialect."""
    seen: set[int] = set()
    for node in walk(lint.root):
        if id(node) in seen or node.alias:
            continue
        seen.add(id(node))
        if node.error:
            lint.report("FSD111", node.error, node)
        for loser, winner in duplicates(node):
            lint.ignore(loser, f"written again on line {lint.line(winner)}, which counts")
            lint.report(
                "FSD108",
                f"{loser.key} is written again on line {lint.line(winner)}; that one counts",
                loser,
                edits=lint.editor.remove(node, loser),
                fix=f"remove this {loser.key}",
            )


def _finish(lint: LintContext, notes: Notes) -> Reading:
    facts = {key: fact.value for key, fact in lint.facts.items()}
    effective = []
    for key in (*COMMON, *DETAILS, *LEGACY):
        fact = lint.facts.get(key)
        if fact is None or (not lint.runs_fsdp and key in _FSDP_ONLY):
            continue
        line = lint.line(fact.entry) if fact.entry is not None else None
        value, origin = list(fact.value) if isinstance(fact.value, tuple) else fact.value, fact.origin
        if key in lint.unheeded:
            value, origin, line = lint.unheeded[key], f"default of {lint.consumer}", None
        effective.append(Setting(key, value, origin, line))
    ordered = sorted(lint.findings, key=lambda finding: (finding.order, finding.diagnostic.code))
    kept = [finding for finding in ordered if not notes.silences(finding.diagnostic)]
    silent = [finding for finding in ordered if notes.silences(finding.diagnostic)]
    settings = None
    if lint.runs_fsdp and lint.extras.get("configures", True):
        settings = settings_from(facts)
    return Reading(
        settings=settings,
        diagnostics=tuple(finding.diagnostic for finding in kept),
        effective=tuple(effective),
        ignored=tuple(sorted(lint.ignored, key=lambda item: item.line or 0)),
        dialect=lint.dialect,
        consumer=lint.consumer,
        version=lint.get("fsdp_version") if lint.runs_fsdp else None,
        path=lint.source.path,
        source=lint.source,
        document=lint.document,
        changes=tuple(finding.changes for finding in kept),
        suppressed=tuple(finding.diagnostic for finding in silent),
        facts=facts,
    )


_FSDP_ONLY = (
    frozenset(COMMON[:11])
    | frozenset((*DETAILS, *LEGACY))
    | {"dp_replicate", "dp_shard", "cp", "cp_comm_strategy", "tp", "sp"}
)


def _failed(
    code: str,
    message: str,
    path: str | None,
    source: SourceText | None,
    index: int | None,
    *,
    consumer: str | None,
    target: str | None,
    dialect: str | None = None,
    help: str | None = None,
) -> Reading:
    """Return the reading of a file that is not judged any further, with the one finding that says why."""
    rule = RULES[code]
    line, column = source.place(index) if source is not None and index is not None else (None, None)
    diagnostic = Diagnostic(
        code,
        rule.severity,
        message,
        help or rule.fix,
        path,
        line,
        column,
        line,
        column + 1 if column else None,
    )
    judged_for: Consumer = resolve_consumer(consumer, target, dialect or "accelerate")
    return Reading(None, (diagnostic,), (), (), dialect, judged_for, path=path, source=source, changes=({},))


__all__ = ["read_settings"]
