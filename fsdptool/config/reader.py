"""Reading: text, tree, dialect, facts, checks. A person's mistake is a finding, never an exception."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.config.canonical import COMMON, DETAILS, LEGACY, MESH, OF_FSDP, settings_from
from fsdptool.config.checks.meaning import check_meaning
from fsdptool.config.condense import condense
from fsdptool.config.context import Finding, LintContext
from fsdptool.config.dialects import detect_dialect, load_registry, parse_source, sniff_dialect
from fsdptool.config.dialects.protocol import PROGRAMS, Consumer, Dialect, known_programs, resolve_consumer
from fsdptool.config.result import Reading
from fsdptool.config.rules import RULES
from fsdptool.errors import FsdptoolError
from fsdptool.files.text import SourceText, UnreadableError, read_source
from fsdptool.files.tree import Document, ParseError, duplicates, walk
from fsdptool.records.diagnostic import Diagnostic, EffectiveSetting

if TYPE_CHECKING:
    from fsdptool.config.checks.hardware import Hardware
    from fsdptool.config.command_lines import Line, NamedFiles
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
        dialect: A dialect or its name; None recognises it by the content.
        consumer: ``accelerate``, ``fsdptool``, ``trainer``, ...; None takes what the file says in a
            ``# fsdptool: consumer=NAME`` comment, else the dialect's own program.
        target: Version to judge for, ``accelerate==1.15``.
        environment: Environment variables the program would inherit; None: none that matter.
        model: The inspected model, for the rules of the family ``model``.
        hardware: GPUs and hosts, for the rules of the family ``hardware``.
        files: Where the files that a command line names are looked for; None: in the working directory,
            else beside the file that holds the line.

    Raises:
        ConfigError: ``dialect``, ``consumer`` or ``target`` is not known. Whatever is wrong with the
            file itself is a diagnostic of the result.
    """
    conditions: dict[str, Any] = {"environment": environment, "model": model, "hardware": hardware}
    written_in = load_registry().get(dialect) if isinstance(dialect, str) else dialect
    reading = _read(path_or_text, written_in, consumer, target, files=files, **conditions)
    if not any(item.fix is not None for item in reading.diagnostics):
        return reading
    from fsdptool.config.fixes import withhold_refused

    return withhold_refused(reading, **conditions)


def read_again(
    reading: Reading,
    text: str,
    *,
    environment: Mapping[str, str] | None = None,
    model: Anatomy | None = None,
    hardware: Hardware | None = None,
    trial: bool = False,
) -> Reading:
    """Return the reading of a changed text, judged as ``reading`` was; its fixes are not tried.

    In a ``trial`` only the findings are needed, and no migration is worked out.
    """
    assert reading.source is not None
    return _read(
        reading.source.with_text(text),
        reading.written_in,
        reading.consumer.name,
        None,
        files=reading.files,
        judge=reading.consumer,
        environment=environment,
        model=model,
        hardware=hardware,
        trial=trial,
    )


def _read(
    path_or_text: str | Path | SourceText,
    written_in: Dialect | None,
    consumer: str | None,
    target: str | None,
    *,
    files: NamedFiles | None,
    judge: Consumer | None = None,
    environment: Mapping[str, str] | None,
    model: Anatomy | None,
    hardware: Hardware | None,
    trial: bool = False,
) -> Reading:
    """Read and judge a text, without trying its fixes; ``judge`` is a consumer that was resolved before."""
    natural = written_in.consumers[0] if written_in is not None else "accelerate"
    brought = written_in.programs if written_in is not None else ()
    failed = partial(_failed, judged_for=resolve_consumer(consumer, target, natural, programs=brought))
    try:
        source = _source(path_or_text)
    except UnreadableError as error:
        return failed(error.code, error.message, str(path_or_text), None, None)
    if source.text.startswith("\ufeff"):
        message = "the file begins with two byte-order marks: the second one is a part of the first key"
        return failed("FSD104", message, source.path, source, 0, help="remove the byte-order marks")
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
    judged: Callable[..., Reading] = partial(
        _judge, source, document, written_in, comments, failed,
        consumer=consumer, target=target, judge=judge, environment=environment or {}, model=model,
        hardware=hardware, trial=trial,
    )  # fmt: skip
    if document.language != "flags":
        return judged()
    from fsdptool.config.command_lines import read_lines

    first, *others = (judged(line=line) for line in read_lines(source, files))
    return replace(_together(first, others), files=files)


def _judge(
    source: SourceText,
    document: Document,
    form: Dialect,
    comments: Comments,
    failed: Callable[..., Reading],
    *,
    line: Line | None = None,
    consumer: str | None,
    target: str | None,
    judge: Consumer | None,
    environment: Mapping[str, str],
    model: Anatomy | None,
    hardware: Hardware | None,
    trial: bool,
) -> Reading:
    """Return the reading of a file, or of one command of it, as the program that it is for reads it."""
    written_in = form
    if line is not None:
        document = line.document
        written_in = load_registry().get(line.dialect) if line.dialect is not None else form
    root = document.root
    assert root is not None
    failed = partial(
        failed,
        dialect=form.name,
        judged_for=resolve_consumer(consumer, target, written_in.consumers[0], programs=written_in.programs),
    )
    noted = comments.consumer
    if consumer is None and noted is not None and noted not in PROGRAMS and noted not in known_programs():
        message = f"the file says consumer={noted}; there is no known program of that name"
        advice = f"choose one of: {', '.join(known_programs())}"
        return failed("FSD114", message, source.path, source, comments.consumer_at, help=advice)
    natural = (line.consumer if line is not None else None) or written_in.consumer_of(root)
    judged_for = judge or resolve_consumer(
        consumer, target, natural, noted=noted, programs=written_in.programs
    )
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
    lint = LintContext(source, document, judged_for, written_in, environment, trial=trial)
    if line is None:
        _check_text(lint)
        written_in.read(lint)
    else:
        _read_line(lint, line)
    if line is None or not line.refused:
        check_meaning(lint, model=model, hardware=hardware)
    for index, message in comments.unknown:
        lint.report("FSD112", message, index)
    for problem in load_registry().problems.values():
        lint.report("FSD115", problem)
    reading = _finish(lint, comments, form)
    return reading if line is None else replace(reading, named=line.files)


def _read_line(lint: LintContext, line: Line) -> None:
    """Read one command: what a launcher sets first, then what its script makes of that."""
    from fsdptool.config.command_lines import export

    lint.environment = {**lint.environment, **line.environment}
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
        below = LintContext(lint.source, line.launcher.document, judge, launcher, lint.environment)
        launcher.read(below)
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
        lint.deepspeed = lint.deepspeed or below.distributed_type == "DEEPSPEED"
    if not line.known:
        # What is written was judged; what is not written, the file decides that was not read.
        lint.configures_fsdp = False
        lint.facts = {key: fact for key, fact in lint.facts.items() if fact.entry is not None}
        lint.findings = [item for item in lint.findings if item.diagnostic.code not in _OF_ABSENCE]


_LAUNCH_STOPS = frozenset({"FSD201", "FSD205", "FSD208", "FSD210", "FSD212", "FSD218", "FSD219"})
"""Findings about a file that ``accelerate launch`` itself refuses, whatever its script reads."""


_OF_ABSENCE = frozenset({"FSD113", "FSD330", "FSD338", "FSD341"})
"""Findings about what is not written."""


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


def judged_or_failed(path_or_text: str | Path | SourceText, **judged: Any) -> Reading:
    """Read a file as :func:`read_settings`; whatever it holds, the other files of a call are judged as well.

    A failure of our own is a finding of the file.

    Raises:
        ConfigError: As :func:`read_settings`.
    """
    try:
        return read_settings(path_or_text, **judged)
    except FsdptoolError:
        raise
    except Exception as error:
        path = path_or_text.path if isinstance(path_or_text, SourceText) else str(path_or_text)
        judge = resolve_consumer(judged.get("consumer"), judged.get("target"), "accelerate")
        message = f"the file cannot be judged: internal error: {type(error).__name__}: {error}"
        return _failed("FSD101", message, path, None, None, judged_for=judge, help="report it, with the file")


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


def _finish(lint: LintContext, comments: Comments, form: Dialect) -> Reading:
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
        version=lint.get("fsdp_version") if lint.runs_fsdp else None,
        path=lint.source.path,
        source=lint.source,
        document=lint.document,
        changes=tuple(finding.changes for finding in kept),
        suppressed=tuple(item.diagnostic for item in ordered if id(item) in silenced),
        facts=facts,
        written_in=form,
        used=tuple(fact.entry for fact in lint.facts.values() if fact.entry is not None),
        dtypes=lint.dialect.dtypes(lint) if lint.runs_fsdp and lint.configures_fsdp else None,
    )


def _silenced(item: Finding, comments: Comments) -> bool:
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
