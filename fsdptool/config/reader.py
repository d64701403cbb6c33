"""Reading: text, tree, dialect, facts, checks. A person's mistake is a finding, never an exception."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.config.canonical import COMMON, DETAILS, LEGACY, MESH, OF_FSDP, settings_from
from fsdptool.config.checks.meaning import check_meaning
from fsdptool.config.condense import condense
from fsdptool.config.context import LintContext
from fsdptool.config.dialects import detect_dialect, load_registry, parse_source, sniff_dialect
from fsdptool.config.dialects.protocol import PROGRAMS, Consumer, Dialect, known_programs, resolve_consumer
from fsdptool.config.result import Reading
from fsdptool.config.rules import RULES
from fsdptool.files.text import SourceText, UnreadableError, read_source
from fsdptool.files.tree import Document, ParseError, duplicates, walk
from fsdptool.records.diagnostic import Diagnostic, EffectiveSetting

if TYPE_CHECKING:
    from fsdptool.config.checks.hardware import Hardware
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
) -> Reading:
    """Read a configuration as its consumer will read it.

    Args:
        path_or_text: A path, or the text itself (a string that holds a newline).
        dialect: A dialect or its name; None recognises it by the content.
        consumer: ``accelerate``, ``fsdptool``, ``trainer``, ...; None takes what the file says in a
            ``# fsdptool: consumer=NAME`` comment, else the dialect's own program.
        target: Version to judge for, ``accelerate==1.15``.
        environment: Environment variables the program would inherit; None: none that matter.
        model: The inspected model, for the rules of the family ``model``.
        hardware: GPUs and hosts, for the rules of the family ``hardware``.

    Raises:
        ConfigError: ``dialect``, ``consumer`` or ``target`` is not known. Whatever is wrong with the
            file itself is a diagnostic of the result.
    """
    written_in = load_registry().get(dialect) if isinstance(dialect, str) else dialect
    natural = written_in.consumers[0] if written_in is not None else "accelerate"
    brought = written_in.programs if written_in is not None else ()
    failed = partial(_failed, judged_for=resolve_consumer(consumer, target, natural, programs=brought))
    try:
        source = _source(path_or_text)
    except UnreadableError as error:
        return failed(error.code, error.message, str(path_or_text), None, None)
    comments = read_comments(source)
    try:
        document, written_in = _parse(source, written_in)
    except ParseError as error:
        return failed(error.code, error.message, source.path, source, error.index)
    root = document.root
    if root is None or root.kind != "map":
        return failed("FSD107", f"the file {_lack(source, document)}", source.path, source, 0)
    if written_in is None:
        written_in, refusal = detect_dialect(root)
        if written_in is None:
            code, message = refusal or ("FSD109", "nothing in the file identifies the program that reads it")
            return failed(code, message, source.path, source, root.start)
    failed = partial(
        failed,
        dialect=written_in.name,
        judged_for=resolve_consumer(consumer, target, written_in.consumers[0], programs=written_in.programs),
    )
    noted = comments.consumer
    if consumer is None and noted is not None and noted not in PROGRAMS and noted not in known_programs():
        message = f"the file says consumer={noted}; there is no known program of that name"
        advice = f"choose one of: {', '.join(known_programs())}"
        return failed("FSD114", message, source.path, source, comments.consumer_at, help=advice)
    natural = written_in.consumer_of(root)
    judged_for = resolve_consumer(consumer, target, natural, noted=noted, programs=written_in.programs)
    if judged_for.name not in written_in.consumers:
        return failed(
            "FSD114",
            f"{judged_for.name} does not read {written_in.name} files",
            source.path,
            source,
            comments.consumer_at if consumer is None else None,
            judged_for=judged_for,
            help=_advice(written_in, natural, judged_for.name),
        )
    lint = LintContext(source, document, judged_for, written_in, environment or {})
    reading = _judge(lint, comments, model, hardware)
    if not any(item.fix is not None for item in reading.diagnostics):
        return reading
    from fsdptool.config.fixes import withhold_refused

    return withhold_refused(reading, environment=environment, model=model, hardware=hardware)


def read_again(
    reading: Reading,
    text: str,
    *,
    environment: Mapping[str, str] | None = None,
    model: Anatomy | None = None,
    hardware: Hardware | None = None,
    trial: bool = False,
) -> Reading | None:
    """Return the reading of a changed text, judged as ``reading`` was; its fixes are not tried.

    None: it does not parse, or is no mapping any more. In a ``trial`` only the findings are needed, and no
    migration is worked out.
    """
    assert reading.source is not None and reading.written_in is not None
    source = reading.source.with_text(text)
    try:
        document = parse_source(source, reading.written_in)
    except ParseError:
        return None
    if document.root is None or document.root.kind != "map":
        return None
    comments = read_comments(source)
    lint = LintContext(source, document, reading.consumer, reading.written_in, environment or {}, trial=trial)
    return _judge(lint, comments, model, hardware)


def _judge(
    lint: LintContext, comments: Comments, model: Anatomy | None, hardware: Hardware | None
) -> Reading:
    """Read a tree into facts, and judge them."""
    _check_text(lint)
    lint.dialect.read(lint)
    check_meaning(lint, model=model, hardware=hardware)
    for index, message in comments.unknown:
        lint.report("FSD112", message, index)
    for problem in load_registry().problems.values():
        lint.report("FSD115", problem)
    return _finish(lint, comments)


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


def _parse(source: SourceText, dialect: Dialect | None) -> tuple[Document, Dialect | None]:
    """Return the tree, and the dialect where it is named or known by the form of the text."""
    if dialect is None:
        dialect = sniff_dialect(source.text)
    return parse_source(source, dialect), dialect


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


def _finish(lint: LintContext, comments: Comments) -> Reading:
    facts = {key: fact.value for key, fact in lint.facts.items()}
    effective = []
    for key in (*COMMON, *DETAILS, *LEGACY):
        fact = lint.facts.get(key)
        if fact is None or (not lint.runs_fsdp and key in _FSDP_ONLY):
            continue
        line = lint.line(fact.entry) if fact.entry is not None else None
        value: Any = list(fact.value) if isinstance(fact.value, tuple) else fact.value
        origin = fact.origin
        if key in lint.overridden:
            value, origin, line = lint.overridden[key], f"default of {lint.consumer}", None
        effective.append(EffectiveSetting(key, value, origin, line))
    ordered = sorted(lint.findings, key=lambda finding: (finding.order, finding.diagnostic.code))
    kept = condense(lint, [item for item in ordered if not comments.silences(item.diagnostic)])
    return Reading(
        settings=settings_from(facts) if lint.runs_fsdp and lint.configures_fsdp else None,
        diagnostics=tuple(finding.diagnostic for finding in kept),
        effective=tuple(effective),
        ignored=tuple(sorted(lint.ignored, key=lambda item: item.line or 0)),
        dialect=lint.dialect.name,
        consumer=lint.consumer,
        version=lint.get("fsdp_version") if lint.runs_fsdp else None,
        path=lint.source.path,
        source=lint.source,
        document=lint.document,
        changes=tuple(finding.changes for finding in kept),
        suppressed=tuple(item.diagnostic for item in ordered if comments.silences(item.diagnostic)),
        facts=facts,
        written_in=lint.dialect,
    )


_FSDP_ONLY = frozenset((*OF_FSDP, *DETAILS, *LEGACY, *MESH, "cp_comm_strategy"))


def _failed(
    code: str,
    message: str,
    path: str | None,
    source: SourceText | None,
    index: int | None,
    *,
    judged_for: Consumer,
    dialect: str | None = None,
    help: str | None = None,
) -> Reading:
    """Return the reading of a file that is not judged any further, with the finding that says why."""
    rule = RULES[code]
    line, column = source.place(index) if source is not None and index is not None else (None, None)
    end = column + 1 if column else None
    first = Diagnostic(code, rule.severity, message, help or rule.fix, path, line, column, line, end)
    rule = RULES["FSD115"]
    left_out = [
        Diagnostic(rule.code, rule.severity, problem, rule.fix, path)
        for problem in load_registry().problems.values()
    ]
    diagnostics = (first, *left_out)
    return Reading(
        None,
        diagnostics,
        (),
        (),
        dialect,
        judged_for,
        path=path,
        source=source,
        changes=tuple({} for _ in diagnostics),
    )


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
            (at, f"{code} is not a rule") for code in sorted(codes - {"*"}) if code not in RULES
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
