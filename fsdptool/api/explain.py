"""``fsdptool.explain``: the effective settings of files, and the whole runs that they describe."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.config.command_lines import default_files
from fsdptool.config.described import describe_run, loader
from fsdptool.config.dialects import load_registry
from fsdptool.config.reader import read_settings
from fsdptool.config.result import Reading, explain_document
from fsdptool.errors import ConfigError, ExitCode
from fsdptool.records.diagnostic import Diagnostic
from fsdptool.scripts import SCRIPTS
from fsdptool.spelling import suggest_keywords

if TYPE_CHECKING:
    from fsdptool.files.text import SourceText
    from fsdptool.records.described_run import DescribedRun

_NOT_JUDGED = frozenset({"FSD107", "FSD109", "FSD110"})
"""Findings that say that nobody judges the FSDP settings of a file."""


@dataclass(frozen=True, slots=True, repr=False)
class Explained:
    """One file, explained.

    Attributes:
        reading: Its FSDP settings with their origins, and findings.
        run: The whole run that it describes, or None where no program's training file is recognised.
    """

    reading: Reading
    run: DescribedRun | None

    def document(self) -> Mapping[str, Any]:
        """Return the JSON document ``explain``."""
        return explain_document(self.reading, self.run)

    def exit_code(self) -> int:
        """Return 1 for an error finding, else 0."""
        return int(ExitCode.FINDINGS if self.reading.errors else ExitCode.CLEAN)

    def __repr__(self) -> str:
        """Return who reads the file, whether FSDP runs, the run, and findings, in a few lines."""
        from fsdptool.report.summaries import explained_lines

        return "\n".join(explained_lines(self.reading, self.run))


def explain_one(
    source: str | Path | SourceText,
    *,
    consumer: str | None = None,
    target: str | None = None,
    dialect: str | None = None,
    environment: Mapping[str, str] | None = None,
    words: Sequence[str] = (),
) -> Explained:
    """Return one file, explained; arguments and errors as :func:`explain`.

    ``words`` are the arguments that a script is started with.
    """
    judged = dialect is None or dialect in load_registry().names
    form = dialect if judged else None
    reading = read_settings(source, dialect=form, consumer=consumer, target=target, environment=environment)
    if reading.source is None:
        return Explained(reading, None)
    judged_for = reading.consumer
    version = (judged_for.name, judged_for.version) if target is not None else None
    try:
        run = describe_run(reading.source, program=dialect, words=words, version=version)
    except ConfigError as error:
        if reading.errors:
            return Explained(reading, None)
        message = error.message.removeprefix(f"{reading.path}: ")
        finding = Diagnostic("FSD109", "error", message, error.help, reading.path)
        return Explained(_with(reading, (finding, *reading.diagnostics)), None)
    if run is not None and (reading.path or "").endswith(SCRIPTS):
        from fsdptool.config.script_runs import script_settings

        load = loader(default_files(reading.source.path))
        reading = replace(reading, effective=script_settings(reading.source, words, load))
    if run is not None and reading.dialect == "flags" and run.fsdp in (1, 2):
        reading = _sharded_by_script(reading, run)
    if run is not None and reading.dialect is None:
        reading = _with(reading, tuple(_as_note(item, run.program) for item in reading.diagnostics))
    return Explained(reading, run)


@suggest_keywords()
def explain(
    files: str | PathLike[str] | Iterable[str | PathLike[str]],
    *,
    consumer: str | None = None,
    target: str | None = None,
    dialect: str | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[Explained, ...]:
    """Explain files: every effective setting with its origin, and the whole run that each describes.

    Args:
        files: A file, or several.
        consumer: Program that reads the files; None is what is natural for each.
        target: Version to judge for, ``accelerate==1.15``.
        dialect: Name of the format or the program; None recognises it by the content.
        environment: Variables that the program would inherit.

    Raises:
        ConfigError: ``consumer``, ``target`` or ``dialect`` is not known. What is wrong with a
            file is a finding.
    """
    paths = [files] if isinstance(files, str | PathLike) else list(files)
    return tuple(
        explain_one(Path(path), consumer=consumer, target=target, dialect=dialect, environment=environment)
        for path in paths
    )


def _as_note(item: Diagnostic, program: str) -> Diagnostic:
    script = item.code == "FSD104" and (item.path or "").endswith((".sh", ".bash", ".sbatch", ".slurm"))
    if item.code not in _NOT_JUDGED and not script:
        return item
    message = f"a training file of {program}: its run is read; its sharding settings are not judged"
    return replace(item, code="FSD110", severity="info", message=message, help=None)


def _sharded_by_script(reading: Reading, run: DescribedRun) -> Reading:
    """Return what was read of a command line whose flags leave FSDP to the script that it starts."""
    left = tuple(item for item in reading.diagnostics if item.code != "FSD113")
    if len(left) == len(reading.diagnostics) or run.fsdp not in (1, 2):
        return reading
    return replace(_with(reading, left), version=run.fsdp)


def _with(reading: Reading, diagnostics: tuple[Diagnostic, ...]) -> Reading:
    return replace(reading, diagnostics=diagnostics, changes=tuple({} for _ in diagnostics))
