"""What reading a configuration yields: settings, where each came from, and what was found."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from fsdptool.config.programs import Consumer
from fsdptool.errors import ConfigError, ExitCode
from fsdptool.files.text import SourceText
from fsdptool.files.tree import Document, Entry
from fsdptool.records.diagnostic import (
    Diagnostic,
    EffectiveDtypes,
    EffectiveSetting,
    IgnoredKey,
    Severity,
    envelope,
)
from fsdptool.records.sharding import FsdpSettings

if TYPE_CHECKING:
    from fsdptool.config.command_lines import NamedFiles
    from fsdptool.config.dialects.protocol import Dialect
    from fsdptool.config.rules.model import Hardware
    from fsdptool.records.anatomy import Anatomy
    from fsdptool.records.config_documents import CodeCount, ConsumerVersion, FileStatus, FileVerdict, Finding
    from fsdptool.records.described_run import DescribedRun


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a file is judged by, besides its text.

    Attributes:
        dialect: A dialect or its name; None recognises it by the content.
        consumer: ``accelerate``, ``fsdptool``, ``trainer``, ...; None takes what the file says in a
            ``# fsdptool: consumer=NAME`` comment, else the dialect's own program.
        target: Version to judge for, ``accelerate==1.15``.
        environment: Environment variables the program would inherit; by default none that matter.
        model: The inspected model, for the rules of the family ``model``.
        hardware: GPUs and hosts, for the rules of the family ``hardware``.
        files: Where the files that a command line names are looked for; None: in the working directory,
            else beside the file that holds the line.
    """

    dialect: str | Dialect | None = None
    consumer: str | None = None
    target: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    model: Anatomy | None = None
    hardware: Hardware | None = None
    files: NamedFiles | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """A configuration as its consumer will understand it.

    Attributes:
        settings: The settings in canonical form (an FSDP1 file as FSDP2 would express it), or None
            when the text yields none. Best effort while there are errors: see :meth:`require`.
        diagnostics: Findings, in the order of the file.
        effective: Every setting that takes effect, with its origin.
        ignored: What was written and does nothing.
        dialect: Name of the dialect, or None when it was not recognised; ``written_in`` is the dialect.
        consumer: Who the file was judged for.
        conditions: What else it was judged by.
        version: FSDP version the consumer would run, or None if it would not run FSDP.
        changes: Per diagnostic (same index): settings its fix changes, by key.
        named: The files that it names and that were read.
        suppressed: Findings that a ``# fsdptool: ignore[...]`` comment silences.
        open: Settings that are variables of the shell, and the text that is written: no value is known.
        used: Entries of the document that settings were read from.
        dtypes: What is stored, computed and reduced in which dtype, or None if FSDP does not run.
    """

    settings: FsdpSettings | None
    diagnostics: tuple[Diagnostic, ...]
    effective: tuple[EffectiveSetting, ...] = field(repr=False)
    ignored: tuple[IgnoredKey, ...] = field(repr=False)
    dialect: str | None
    consumer: Consumer
    conditions: Conditions = field(repr=False)
    version: int | None = None
    path: str | None = None
    source: SourceText | None = field(default=None, repr=False)
    document: Document | None = field(default=None, repr=False)
    changes: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    suppressed: tuple[Diagnostic, ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict, repr=False)
    written_in: Dialect | None = field(default=None, repr=False)
    used: tuple[Entry, ...] = field(default=(), repr=False)
    dtypes: EffectiveDtypes | None = None
    named: tuple[str, ...] = ()
    open: Mapping[str, str] = field(default_factory=dict)

    @property
    def errors(self) -> tuple[Diagnostic, ...]:
        """Findings of severity ``error``."""
        return tuple(item for item in self.diagnostics if item.severity == "error")

    @property
    def status(self) -> FileStatus:
        """``error`` (something no fix repairs), ``fixable`` or ``ok`` (contract ``validate``)."""
        if any(item.fix is None for item in self.errors):
            return "error"
        if any(item.fix is not None and item.severity != "info" for item in self.diagnostics):
            return "fixable"
        return "ok"

    @property
    def passed_over(self) -> bool:
        """Whether the file is another program's, found in a folder: there are notes on it only."""
        return self.dialect is None and all(item.severity == "info" for item in self.diagnostics)

    def unknown(self, *, but: Container[str] = ()) -> str | None:
        """Return in words which settings are variables, ``but`` for some; None: every value is known."""
        words = [f"{key} is {text}" for key, text in self.open.items() if key not in but]
        one = "a variable whose value is" if len(words) == 1 else "variables whose values are"
        return f"{' and '.join(words)}: {one} not known here" if words else None

    def require(self) -> FsdpSettings:
        """Return the settings of a file without errors.

        Raises:
            ConfigError: There are errors; the message is the first one, with its place.
        """
        if self.open and not self.errors:
            raise ConfigError(f"{self.path or 'the command'}: {self.unknown()}", help=WRITE_IT)
        if self.errors or self.settings is None:
            first = self.errors[0] if self.errors else None
            if first is None:
                raise ConfigError(f"{self.path or 'the configuration'} does not contain FSDP settings")
            place = (
                f"{first.path or 'configuration'}:{first.line}:{first.column}: "
                if first.line
                else (f"{first.path}: " if first.path else "")
            )
            raise ConfigError(f"{place}{first.code} {first.message}", help=first.help)
        return self.settings


WRITE_IT = "write the value in place of the variable"

_ORDER = ("error", "warning", "info")


@dataclass(frozen=True, slots=True)
class Verdict:
    """All files of one call."""

    readings: tuple[Reading, ...]

    @property
    def errors(self) -> int:
        """Number of error findings."""
        return sum(len(reading.errors) for reading in self.readings)

    @property
    def warnings(self) -> int:
        """Number of warning findings."""
        return sum(item.severity == "warning" for reading in self.readings for item in reading.diagnostics)

    @property
    def fixable(self) -> int:
        """Number of errors and warnings that a fix removes."""
        return sum(
            item.fix is not None and item.severity != "info"
            for reading in self.readings
            for item in reading.diagnostics
        )

    @property
    def passed_over(self) -> int:
        """Number of files of other programs, about which there are notes only."""
        return sum(reading.passed_over for reading in self.readings)

    @property
    def unreadable(self) -> int:
        """Number of files among them that are not UTF-8: whose they are cannot be told."""
        return sum(
            reading.passed_over and any(item.code == "FSD103" for item in reading.diagnostics)
            for reading in self.readings
        )

    def by_code(self) -> tuple[CodeCount, ...]:
        """Return how often each code was found, the errors first and the most frequent first."""
        from fsdptool.records.config_documents import CodeCount

        found: dict[tuple[Severity, str], list[Diagnostic]] = {}
        for reading in self.readings:
            for item in reading.diagnostics:
                found.setdefault((item.severity, item.code), []).append(item)
        return tuple(
            CodeCount(code, severity, len(items), sum(item.fix is not None for item in items))
            for (severity, code), items in sorted(
                found.items(), key=lambda entry: (_ORDER.index(entry[0][0]), -len(entry[1]), entry[0][1])
            )
        )

    def exit_code(self, *, strict: bool = False) -> int:
        """Return 1 for an error (or a warning under ``strict``), else 0."""
        return int(ExitCode.FINDINGS if self.errors or (strict and self.warnings) else ExitCode.CLEAN)

    def document(self) -> dict[str, Any]:
        """Return the document of schema ``validate``."""
        from fsdptool.records.config_documents import FindingCounts, ValidationReport

        first = self.readings[0].consumer if self.readings else None
        digests = [reading.source.digest if reading.source else None for reading in self.readings]
        report = ValidationReport(
            consumer=_consumer(first) if first else None,
            files=tuple(file_verdict(reading) for reading in self.readings),
            summary=FindingCounts(self.errors, self.warnings, self.fixable),
            statistics=self.by_code(),
        )
        return envelope("validate", digests, report)


def file_verdict(reading: Reading) -> FileVerdict:
    """Return one file's part of the document."""
    # The records of documents cost the quick text output more than the checks do.
    from fsdptool.records.config_documents import FileVerdict

    return FileVerdict(
        path=reading.path,
        digest=f"sha256:{reading.source.digest}" if reading.source else None,
        dialect=reading.dialect,
        consumer=_consumer(reading.consumer),
        fsdp_version=reading.version,  # type: ignore[arg-type]  # 1, 2 or None
        status=reading.status,
        effective=reading.effective,
        ignored=tuple(replace(item, value=_json(item.value)) for item in reading.ignored),
        findings=tuple(finding(item) for item in reading.diagnostics),
        suppressed=tuple(finding(item) for item in reading.suppressed),
        dtypes=reading.dtypes,
    )


def _consumer(consumer: Consumer) -> ConsumerVersion:
    from fsdptool.records.config_documents import ConsumerVersion

    return ConsumerVersion(consumer.name, consumer.version)


def finding(item: Diagnostic) -> Finding:
    """Return a diagnostic as it is listed under its file."""
    from fsdptool.records.config_documents import Finding

    names = Finding.__dataclass_fields__
    return Finding(**{name: getattr(item, name) for name in names})


def _json(value: Any) -> Any:
    if (isinstance(value, float) and value != value) or value in (float("inf"), float("-inf")):
        return str(value)
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value)


def explain_document(reading: Reading, run: DescribedRun | None = None) -> Mapping[str, Any]:
    """Return the document of schema ``explain``: one file's effective settings and its run."""
    from fsdptool.records.config_documents import Explanation

    verdict = file_verdict(reading)
    names = verdict.__dataclass_fields__
    body = Explanation(**{name: getattr(verdict, name) for name in names}, run=run)
    digest = reading.source.digest if reading.source else None
    return envelope("explain", digest, body, diagnostics=reading.diagnostics)
