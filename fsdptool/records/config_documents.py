"""Documents of the commands about configurations: verdicts, explanations, migrations, files and rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from fsdptool.records.advice import Suggestion
from fsdptool.records.annotations import Count, Digest, Keywords, Positive
from fsdptool.records.described_run import DescribedRun
from fsdptool.records.diagnostic import (
    EffectiveDtypes,
    EffectiveSetting,
    Fix,
    IgnoredKey,
    RuleFamily,
    Safety,
    Severity,
)
from fsdptool.records.plan import PlanLimit
from fsdptool.records.sharding import FsdpSettings, Layout

FileStatus = Literal["ok", "fixable", "error"]


@dataclass(frozen=True, slots=True)
class ConsumerVersion:
    """The program that reads the file, at a version."""

    name: str
    version: str


@dataclass(frozen=True, slots=True)
class Finding:
    """A diagnostic of the file it is listed under. Lines and columns are 1-based."""

    code: Annotated[str, Keywords(pattern="^FSD[1-5][0-9]{2}$")]
    severity: Severity
    line: Positive | None
    column: Positive | None
    end_line: Positive | None
    end_column: Positive | None
    message: str
    help: str | None
    fix: Fix | None


@dataclass(frozen=True, slots=True)
class FileVerdict:
    """One file as its consumer will understand it.

    Attributes:
        path: The file, or null for text from elsewhere.
        digest: SHA-256 of the file's bytes; null if it cannot be read.
        dialect: Name of the dialect, or null when it was not recognised.
        consumer: The program the file was checked for.
        fsdp_version: FSDP version the consumer would run; null if it would not run FSDP.
        status: ``error`` with an error finding, ``fixable`` if fixes remove all of them, else ``ok``.
        effective: Every setting that takes effect, with its origin.
        ignored: Entries of the file that have no effect.
        findings: Findings, in the order of the file.
        suppressed: Findings that a ``# fsdptool: ignore[...]`` comment silences.
        dtypes: The dtypes that the consumer would use; null if it would not run FSDP.
    """

    path: str | None
    digest: Digest | None
    dialect: str | None
    consumer: ConsumerVersion
    fsdp_version: Literal[1, 2] | None
    status: FileStatus
    effective: tuple[EffectiveSetting, ...]
    ignored: tuple[IgnoredKey, ...]
    findings: tuple[Finding, ...]
    suppressed: tuple[Finding, ...]
    dtypes: EffectiveDtypes | None = None


@dataclass(frozen=True, slots=True)
class Explanation(FileVerdict):
    """What `fsdptool explain --format json` prints: effective settings with origins, and what was ignored.

    Attributes:
        run: The whole run that the file describes; null where no program's training file is recognised.
    """

    run: DescribedRun | None = None


@dataclass(frozen=True, slots=True)
class FindingCounts:
    """Number of errors, of warnings, and of those of them that a fix removes."""

    errors: Count
    warnings: Count
    fixable: Count


@dataclass(frozen=True, slots=True)
class CodeCount:
    """How many findings of all files have one code and severity, and how many of these can be fixed."""

    code: Annotated[str, Keywords(pattern="^FSD[1-5][0-9]{2}$")]
    severity: Severity
    count: Count
    fixable: Count


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """What `fsdptool validate --format json` prints: a verdict on each file, and all findings by code."""

    consumer: ConsumerVersion | None
    files: tuple[FileVerdict, ...]
    summary: FindingCounts
    statistics: tuple[CodeCount, ...] = ()


CheckVerdict = Literal["fits", "does_not_fit", "unknown", "not_planned"]


@dataclass(frozen=True, slots=True)
class EarlierRun:
    """The run of a file before a change, on the hardware that it has now.

    Attributes:
        verdict: Whether it fitted; ``not_planned`` where it could not be planned.
        needed_bytes: What a rank needed; null is unknown.
        usable_bytes: What a rank may use.
        same_run: Whether the file described the same run.
    """

    verdict: CheckVerdict
    needed_bytes: Count | None
    usable_bytes: Count | None
    same_run: bool


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """One file, planned.

    Attributes:
        path: The file.
        line: Line of ``changed_in`` that changed the run, or that cannot be read; null if that is not known.
        changed_in: The file that changed: this one, or one that it names; null without a revision to compare.
        program: Program that the file is for; null where none is recognised.
        verdict: Whether the run fits. ``unknown`` where what is not planned could turn the answer, or where
            it would fit with the memory of some published runs; ``not_planned`` where there is no plan.
        reason: Why the verdict is unknown, why there is no plan, or what does not fit; null else.
        help: What to do about that; null where nothing is known.
        hardware: GPUs that the run is planned for, in words.
        needed_bytes: What a rank needs on its GPU; null is unknown.
        usable_bytes: What a rank may use.
        fit_share: Share of published runs with whose error of memory the plan fits; null: not known.
        limits: What changes memory and is not planned.
        before: The run before the change; null for a new file, or without a revision to compare.
        smallest_change: The smallest change that makes the run fit; null where it fits or none is known.
        named: Whether the file was named, is a training file, or cannot be read since the change; others of
            a folder are only counted.
    """

    path: str
    line: Positive | None
    changed_in: str | None
    program: str | None
    verdict: CheckVerdict
    reason: str | None = None
    help: str | None = None
    hardware: str | None = None
    needed_bytes: Count | None = None
    usable_bytes: Count | None = None
    limits: tuple[PlanLimit, ...] = ()
    before: EarlierRun | None = None
    smallest_change: Suggestion | None = None
    named: bool = True
    fit_share: float | None = None


@dataclass(frozen=True, slots=True)
class CheckReport:
    """What `fsdptool check --format json` prints: for each training file, whether its run fits.

    Attributes:
        base: Revision that the files are compared with, or null.
        files: The files, in the order of their paths.
    """

    base: str | None
    files: tuple[CheckedFile, ...]


@dataclass(frozen=True, slots=True)
class Loss:
    """What a program's file cannot say of a run that was described for another program.

    Attributes:
        name: Fact of the run (``mesh.tp``, ``learning.seed``), or key of the source.
        value: What the source says; null for a key.
        becomes: What the other program makes of it; null: it has nothing of that kind.
        why: The reason.
    """

    name: str
    value: str | None
    becomes: str | None
    why: str


@dataclass(frozen=True, slots=True)
class MigratedFile:
    """One file's new text, or why it was refused.

    Attributes:
        path: The file.
        dialect: Name of the dialect, or null when it was not recognised.
        changed: Whether the new text differs.
        refusal: Why nothing was done, or null.
        help: What to do about a refusal, or null.
        notes: What else to know, such as settings that now belong on the launch command line.
        text: The new text, or null when it was refused.
        losses: Of a whole run: what has no counterpart in the other program.
        beside: Texts of files that belong beside the new one, by what follows the stem of its name.
    """

    path: str
    dialect: str | None
    changed: bool
    refusal: str | None
    help: str | None
    notes: tuple[str, ...]
    text: str | None
    losses: tuple[Loss, ...] = ()
    beside: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Migration:
    """What `fsdptool migrate --format json` prints: per file the new text, or why it was refused."""

    files: tuple[MigratedFile, ...]


@dataclass(frozen=True, slots=True)
class EmittedConfig:
    """What `fsdptool emit-config --format json` prints."""

    path: str | None
    layout: Layout
    reference: str | None
    plan_digest: str | None
    settings: FsdpSettings
    differences: tuple[str, ...]
    text: str
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables of the workers that the plan assumes."""
    losses: tuple[Loss, ...] = ()
    """Of a whole run that is written for another program: what has no counterpart there."""


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings with a name and the situation they are for."""

    name: str
    purpose: str
    settings: FsdpSettings


@dataclass(frozen=True, slots=True)
class PresetList:
    """What `fsdptool emit-config --list-presets --format json` prints."""

    presets: tuple[Preset, ...]


@dataclass(frozen=True, slots=True)
class RuleText:
    """What a finding's code means."""

    code: Annotated[str, Keywords(pattern="^[A-Z]{3,5}[0-9]{3}$")]
    family: RuleFamily
    severity: Severity
    title: str
    why: str
    fix: str
    safety: Safety


@dataclass(frozen=True, slots=True)
class RuleList:
    """What `fsdptool rule --format json` prints."""

    rules: tuple[RuleText, ...]
