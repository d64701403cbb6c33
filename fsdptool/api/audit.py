"""``fsdptool.audit``: the known bugs of library versions that affect the runs of files."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Annotated, TypedDict, Unpack

from fsdptool.advisories.catalogue import Versions, advisories, named_packages
from fsdptool.advisories.facts import read_facts
from fsdptool.advisories.locks import installed, read_lock, read_targets
from fsdptool.advisories.matching import findings
from fsdptool.api.check import SUFFIXES
from fsdptool.api.validate import Linter
from fsdptool.errors import ConfigError, ExitCode
from fsdptool.files.text import SourceText, UnreadableError, read_source
from fsdptool.options import EXCLUDE, ISOLATED, Option, takes, with_defaults
from fsdptool.records.advisory import AuditedFile, AuditReport
from fsdptool.spelling import nearest, suggest_keywords


class AuditOptions(TypedDict, total=False):
    """Every option of ``audit``."""

    # fmt: off
    lock: Annotated[str | Path | None, Option(
        "Take versions from uv.lock, poetry.lock, pylock.toml, requirements.txt or environment.yml, not the"
        " installed ones.")]
    target: Annotated[Sequence[str] | None, Option(
        "Version of a package, as accelerate==1.13.0, over those of --lock (repeatable). Without --lock only"
        " these packages are known.")]
    ignore: Annotated[Sequence[str] | None, Option("Name of an advisory to leave out (repeatable).")]
    exclude: Annotated[Sequence[str] | None, EXCLUDE]
    isolated: Annotated[bool, ISOLATED]
    # fmt: on


@suggest_keywords()
@takes(AuditOptions)
def audit(
    files: str | PathLike[str] | Iterable[str | PathLike[str]], **options: Unpack[AuditOptions]
) -> AuditReport:
    """Name the known bugs of library versions that affect the runs of files; nothing is downloaded.

    Args:
        files: A file or a folder, or several: configurations, training files, scripts with command lines.
        **options: The options of ``fsdptool audit``.

    Returns:
        For each file the advisories that apply, and those that may: what decides about them is not in the
        file. A file that cannot be read has a ``problem``.

    Raises:
        ConfigError: The versions are not known, a target or the lock file is wrong, an ignored advisory does
            not exist, or a folder holds no configuration.
    """
    paths = [files] if isinstance(files, str | PathLike) else list(files)
    given = with_defaults(AuditOptions, options)
    ignored = tuple(given["ignore"] or ())
    _check_ignored(ignored)
    versions, loose, source = _versions(given["lock"], given["target"] or ())
    linter = Linter(exclude=given["exclude"], isolated=given["isolated"], suffixes=SUFFIXES)
    audited = [
        audit_file(path, named, versions, ignored)
        for path, named in linter.expand([Path(path) for path in paths]).items()
    ]
    return AuditReport(
        versions_from=source,
        versions={name: tuple(map(str, items)) for name, items in sorted(versions.items())},
        not_pinned=loose,
        advisories=len(advisories()),
        ignored=ignored,
        files=tuple(item for item in audited if item is not None),
    )


def _check_ignored(ignored: Iterable[str]) -> None:
    known = [advisory.id for advisory in advisories()]
    for name in ignored:
        if name not in known:
            near = nearest(name, known)
            raise ConfigError(
                f"there is no advisory {name!r}",
                help=f"did you mean {near}?" if near else "give the name that audit prints first",
            )


def _versions(lock: str | Path | None, targets: Sequence[str]) -> tuple[Versions, tuple[str, ...], str]:
    """Return the versions, the packages of the lock file without one, and where they come from."""
    named = read_targets(targets)
    loose: tuple[str, ...] = ()
    if lock is not None:
        versions, loose = read_lock(Path(lock))
        source = str(lock)
    else:
        versions = {} if named else installed()
        source = "--target" if named else "installed"
    versions = {**versions, **named}
    if not versions.keys() & named_packages():
        where = "installed" if source == "installed" else f"in {source} with an exact version"
        raise ConfigError(
            f"none of the packages that advisories name is {where}",
            help="give --lock FILE, or --target accelerate==1.13.0",
        )
    return versions, tuple(name for name in loose if name not in named), source


def audit_file(
    path: Path,
    named: bool,
    versions: Versions,
    ignored: Collection[str] = (),
    source: SourceText | None = None,
) -> AuditedFile | None:
    """Return the advisories of a file; None for one that was found in a folder and that no program reads."""
    try:
        facts = read_facts(source or read_source(path), versions)
    except (UnreadableError, ConfigError) as error:
        return AuditedFile(str(path), None, None, (), error.message) if named else None
    except Exception as error:
        problem = f"the file cannot be audited: internal error: {type(error).__name__}: {error}"
        return AuditedFile(str(path), None, None, (), problem)
    found = findings(facts, versions, ignored)
    return AuditedFile(str(path), facts.values.get("program"), facts.values.get("fsdp"), found)


def exit_code(report: AuditReport) -> int:
    """Return 2 where a file cannot be read, 1 where an advisory applies that is not cosmetic, else 0."""
    if any(file.problem for file in report.files):
        return int(ExitCode.USAGE)
    applied = (item for file in report.files for item in file.findings if item.verdict == "applies")
    return int(ExitCode.FINDINGS if any(item.effect != "cosmetic" for item in applied) else ExitCode.CLEAN)
