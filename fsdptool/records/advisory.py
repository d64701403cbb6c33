"""Advisories: bugs of library versions that change FSDP runs, and the document that ``audit`` writes.

An advisory is a file in the schema of OSV (https://ossf.github.io/osv-schema/). What OSV has no field for
stands in ``database_specific``: which runs are affected, what happens to them, and what avoids it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from fsdptool.records.annotations import Keywords, Text

Effect = Literal["wrong results", "crash", "memory", "speed", "cosmetic"]
"""What a bug does to a run that it affects; ``cosmetic`` changes names or meanings, and no result."""

Evidence = Literal["reproduced", "source", "reported"]
"""Why the effect is believed: it was seen in a run, it was read in the source, or somebody reported it."""

AdvisoryVerdict = Literal["applies", "may_apply"]

Link = Annotated[str, Keywords(pattern="^https://")]
AdvisoryId = Annotated[str, Keywords(pattern="^[a-z0-9]+(-[a-z0-9]+)+$")]


@dataclass(frozen=True, slots=True)
class OsvPackage:
    """A package of a registry."""

    name: Text
    ecosystem: Literal["PyPI"] = "PyPI"


@dataclass(frozen=True, slots=True)
class OsvEvent:
    """A version at which a range begins (``introduced``; ``0``: the first release) or ends (``fixed``)."""

    introduced: Text | None = None
    fixed: Text | None = None


@dataclass(frozen=True, slots=True)
class OsvRange:
    """Affected versions, in their order by PEP 440."""

    events: tuple[OsvEvent, ...]
    type: Literal["ECOSYSTEM"] = "ECOSYSTEM"


@dataclass(frozen=True, slots=True)
class OsvAffected:
    """The affected versions of a package."""

    package: OsvPackage
    ranges: tuple[OsvRange, ...]


@dataclass(frozen=True, slots=True)
class OsvReference:
    """A public page about the bug: a report, its repair, or the source that shows it."""

    type: Literal["REPORT", "FIX", "WEB"]
    url: Link


@dataclass(frozen=True, slots=True)
class FactTest:
    """What a fact of the run must be; exactly one of the first five is given.

    Attributes:
        equals: The value.
        any_of: Values, one of which it is; of a list, one of its items.
        none_of: Values, none of which it is known to be; of a list, no item.
        greater: A number that it exceeds.
        present: Whether the file must have it.
        default: The value that counts where a key of the file is not written.
    """

    equals: bool | int | str | None = None
    any_of: tuple[bool | int | str, ...] = ()
    none_of: tuple[bool | int | str, ...] = ()
    greater: float | None = None
    present: bool | None = None
    default: bool | int | str | None = None


@dataclass(frozen=True, slots=True)
class ExampleRun:
    """A configuration with the versions that it runs with.

    Attributes:
        text: A file or a command line.
        versions: Version of each package that the advisory names.
        files: Texts of the files that the command line names, by their names.
    """

    text: Text
    versions: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AdvisoryExamples:
    """An affected and a not affected configuration."""

    affected: ExampleRun
    not_affected: ExampleRun


@dataclass(frozen=True, slots=True)
class RunEffect:
    """Which runs a bug affects, what happens to them, and what avoids it.

    Attributes:
        condition: Facts of an affected run, all of which hold; of several such lists, one. Names are those
            of `DescribedRun` (``method``, ``mesh.tp``), ``settings.`` with those of accelerate's settings in
            canonical form, or ``keys.`` with a key as it is written anywhere in the file.
        unseen: What must hold besides and no file shows, one clause each: where the condition holds, the
            advisory may apply.
        also: Further packages and the specifiers (PEP 440) of their versions, any of which is affected; a
            package that is not installed is not affected.
        consequence: What happens, in a sentence or two.
        error: The message in which it ends, or null.
        memory: Formula of the additional memory, or null.
        change: What avoids it.
        effect: What kind of harm it is.
        evidence: Why it is believed.
        examples: An affected and a not affected configuration, which every entry has; only installed copies
            leave them out.
    """

    condition: tuple[Mapping[str, FactTest], ...]
    consequence: Text
    change: Text
    effect: Effect
    evidence: Evidence
    unseen: tuple[Text, ...] = ()
    also: Mapping[str, tuple[str, ...]] | None = None
    error: str | None = None
    memory: str | None = None
    examples: AdvisoryExamples | None = None


@dataclass(frozen=True, slots=True)
class Advisory:
    """A bug of some versions of a package that changes FSDP runs, in the schema of OSV.

    Attributes:
        id: Name of the advisory, and of its file: the package and the bug.
        modified: When the entry was changed last (RFC 3339).
        summary: The bug in a line.
        details: Which runs are affected, in words.
        affected: The package and its affected versions.
        references: Public pages that show the bug or its repair.
        database_specific: Which runs it affects, and how.
        schema_version: Version of OSV's schema.
    """

    id: AdvisoryId
    modified: Annotated[str, Keywords(pattern="^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9:]{8}Z$")]
    summary: Annotated[str, Keywords(minLength=1, maxLength=120)]
    details: Text
    affected: tuple[OsvAffected, ...]
    references: tuple[OsvReference, ...]
    database_specific: RunEffect
    schema_version: Literal["1.7.0"] = "1.7.0"

    @property
    def package(self) -> str:
        """The package whose versions are affected."""
        return self.affected[0].package.name


@dataclass(frozen=True, slots=True)
class AuditFinding:
    """An advisory that applies to a file, or may.

    Attributes:
        id: Name of the advisory.
        package: The affected package.
        installed: Its version.
        fixed_in: The first version after it without the bug; null where none is known.
        verdict: ``may_apply`` where something decides that the file does not show.
        effect: What kind of harm it is.
        evidence: Why it is believed.
        summary: The bug in a line.
        consequence: What happens.
        change: What avoids it.
        unknown: What it depends on that the file does not show; empty where the advisory applies.
        error: The message in which the run ends, or null.
        memory: Formula of the additional memory, or null.
        references: Public pages that show the bug or its repair.
    """

    id: str
    package: str
    installed: str
    fixed_in: str | None
    verdict: AdvisoryVerdict
    effect: Effect
    evidence: Evidence
    summary: str
    consequence: str
    change: str
    unknown: tuple[str, ...]
    error: str | None
    memory: str | None
    references: tuple[Link, ...]


@dataclass(frozen=True, slots=True)
class AuditedFile:
    """The advisories of one file.

    Attributes:
        path: The file.
        program: Program that the file is for; null where it is not known.
        fsdp: Version of FSDP that runs, ``none``, or null where the file does not say.
        findings: The advisories: first those that apply.
        problem: Why the file was not audited, or null.
    """

    path: str
    program: str | None
    fsdp: Literal["none", 1, 2] | None
    findings: tuple[AuditFinding, ...]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What `fsdptool audit --format json` prints: the known bugs of the versions that a run uses.

    Attributes:
        versions_from: Where the versions come from: a lock file, ``--target``, or ``installed``.
        versions: Versions of the packages that advisories name.
        not_pinned: Packages that the lock file names without an exact version: they are not audited.
        advisories: Number of advisories that were compared.
        ignored: Advisories that were left out.
        files: The files, in the order in which they were read.
    """

    versions_from: str
    versions: Mapping[str, tuple[str, ...]]
    not_pinned: tuple[str, ...]
    advisories: int
    ignored: tuple[str, ...]
    files: tuple[AuditedFile, ...]
