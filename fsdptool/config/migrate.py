"""Changing a file: safe fixes, FSDP1 to FSDP2 by edits, or a new file in another dialect.

A fix is edits to spans. It is offered, and applied, only where the program accepts the result: a copy of the
text is edited and judged like the original. The finding must be gone, no other error may be new, and the
settings may change only as announced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdptool.config.canonical import LAUNCH
from fsdptool.config.dialects import load_registry, run_writers, script_versions
from fsdptool.config.lint_settings import FindingSelector, selector_of
from fsdptool.config.reader import disjoint, key_of, read_settings, try_fixes, withhold_refused
from fsdptool.config.result import WRITE_IT, Reading
from fsdptool.config.writer import write_settings
from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.files.text import SourceText, UnreadableError, read_source
from fsdptool.formatting import printable
from fsdptool.records.config_documents import Loss
from fsdptool.records.diagnostic import Diagnostic, envelope
from fsdptool.records.sharding import FsdpSettings
from fsdptool.scripts import SCRIPTS

if TYPE_CHECKING:
    from fsdptool.config.command_lines import NamedFiles
    from fsdptool.config.dialects.run_reader import Launch


_PASSES = 8


@dataclass(frozen=True, slots=True)
class Applied:
    """One fix that was applied, in words, and the settings it changed (none for a safe one)."""

    code: str
    line: int | None
    description: str
    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Repaired:
    """A file after fixing. ``after`` equals ``before`` when nothing was or could be applied."""

    before: SourceText
    after: SourceText
    reading: Reading
    applied: tuple[Applied, ...] = ()


def repair(reading: Reading, *, unsafe: bool = False, only: frozenset[str] | None = None) -> Repaired:
    """Apply the fixes of a reading until none is left.

    Every fix is checked by reading the result: what it changes must be what it said, and it must not
    bring new errors. A fix that fails the check is not applied.

    Args:
        reading: What :func:`read_settings` returned.
        unsafe: Also apply fixes that change the run.
        only: Codes to fix, or None for all.
    """
    assert reading.source is not None
    before = reading.source
    refused: set[tuple[str, str]] = set()
    applied: list[Applied] = []
    # Safe fixes first: an unsafe one (a migration) rewrites lines that they repair. And once more
    # afterwards, for what an unsafe one brought to light.
    for safe in (True, False, True) if unsafe else (True,):
        for _ in range(_PASSES):
            step = _step(reading, safe, only, refused)
            if step is None:
                break
            reading, done = step
            applied.extend(done)
    if applied:
        reading = withhold_refused(reading)
    assert reading.source is not None
    return Repaired(before, reading.source, reading, tuple(applied))


def repair_selected(
    reading: Reading, selectors: Iterable[FindingSelector], *, unsafe: bool = False
) -> Repaired:
    """Apply the fixes of selected findings and no others, each checked as :func:`repair` checks it.

    Places are those of the reading that is given. Findings that a fix brings to light stay.

    Args:
        reading: What :func:`read_settings` returned.
        selectors: Which findings.
        unsafe: Also apply fixes that change the run.
    """
    assert reading.source is not None
    before = reading.source
    wanted = [
        item
        for item in selected(reading, selectors)
        if item.fix is not None and item.fix.edits and (unsafe or item.fix.safe)
    ]
    # Safe fixes first, as in repair; from the end, so that those before keep their places.
    wanted.sort(key=lambda item: (item.fix is None or item.fix.safe, item.line or 0, item.column or 0))
    keys = Counter(map(key_of, reading.diagnostics))
    applied = []
    for item in reversed(wanted):
        index = _index(reading, item, unique=keys[key_of(item)] == 1)
        result = try_fixes(reading, [index]) if index is not None else None
        if index is not None and result is not None:
            applied.append(_applied(reading, index))
            reading = result
    if applied:
        reading = withhold_refused(reading)
    assert reading.source is not None
    return Repaired(before, reading.source, reading, tuple(applied))


def selected(reading: Reading, selectors: Iterable[FindingSelector]) -> list[Diagnostic]:
    """Return the findings of a reading that any selector matches."""
    every = tuple(selectors)
    return [item for item in reading.diagnostics if any(one.matches(item) for one in every)]


def _index(reading: Reading, wanted: Diagnostic, *, unique: bool) -> int | None:
    """Return where a finding stands after other fixes: at its place, or moved if it was ``unique``."""
    alike = [index for index, item in enumerate(reading.diagnostics) if key_of(item) == key_of(wanted)]
    if not unique:
        place = selector_of(wanted)
        alike = [index for index in alike if selector_of(reading.diagnostics[index]) == place]
    return alike[0] if alike else None


def _step(
    reading: Reading,
    safe: bool,
    only: frozenset[str] | None,
    refused: set[tuple[str, str]],
) -> tuple[Reading, list[Applied]] | None:
    """Apply all fixes of one kind at once, or one by one where that fails; None when nothing is left."""
    candidates = [
        index
        for index, item in enumerate(reading.diagnostics)
        if item.fix is not None
        and item.fix.safe is safe
        and item.fix.edits
        and (only is None or item.code in only)
        and key_of(item) not in refused
    ]
    if not safe:
        # A migration writes out what runs, so what is to begin to count must count by then.
        first = [index for index in candidates if reading.diagnostics[index].code != "FSD301"]
        candidates = first or candidates
    if not candidates:
        return None
    chosen = disjoint(reading, candidates)
    result = try_fixes(reading, chosen)
    if result is not None:
        return result, [_applied(reading, index) for index in chosen]
    # One by one, from the end: what uses an anchor stands behind it, and has to go first.
    done: list[Applied] = []
    for key in [key_of(reading.diagnostics[index]) for index in reversed(candidates)]:
        index = next((i for i, item in enumerate(reading.diagnostics) if key_of(item) == key), None)
        fix = reading.diagnostics[index].fix if index is not None else None
        if index is None or fix is None or fix.safe is not safe:
            continue
        result = try_fixes(reading, [index])
        if result is None:
            refused.add(key)
        else:
            done.append(_applied(reading, index))
            reading = result
    return (reading, done) if done else None


def _applied(reading: Reading, index: int) -> Applied:
    item = reading.diagnostics[index]
    assert item.fix is not None
    return Applied(item.code, item.line, item.fix.description, reading.changes[index])


_LAUNCH = tuple(name for name in LAUNCH if name != "use_cpu")
"""Settings that a dialect which cannot express them leaves to the launch."""

_CODES = frozenset({"FSD301"})


@dataclass(frozen=True, slots=True)
class Migrated:
    """What migrating one file gave.

    Attributes:
        after: The new text, or None when it was refused.
        refusal: Why nothing was done, or None.
        notes: What the person should know (settings that must be given at launch now).
        encoded: The bytes of the new text; a file of the same dialect keeps its byte-order mark.
        original: The bytes that were read.
        version: FSDP version that its program ran before, or None.
        losses: Of a whole run: what has no counterpart in the program that it was written for.
        beside: Texts of files that belong beside the new one, by what follows the stem of its name.
    """

    path: Path
    dialect: str | None
    before: str = field(repr=False)
    after: str | None = field(repr=False)
    refusal: str | None = None
    help: str | None = None
    notes: tuple[str, ...] = ()
    encoded: bytes = field(default=b"", repr=False)
    original: bytes = field(default=b"", repr=False)
    version: int | None = None
    losses: tuple[Loss, ...] = ()
    beside: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def changed(self) -> bool:
        """Whether the text is another one now."""
        return self.after is not None and self.after != self.before


def migrate_file(
    path: Path,
    *,
    to: str | None = None,
    dialect: str | None = None,
    source: SourceText | None = None,
    files: NamedFiles | None = None,
) -> Migrated:
    """Migrate one file; writes nothing.

    Args:
        path: The file.
        to: Dialect or program to write, or None for FSDP2 in the file's own. One that is not known is a
            refusal. The whole run is written where the file describes one and the program's runs are written.
        dialect: Its dialect, or None to detect it.
        source: The text, when it does not come from the file.
        files: Where the files that a command line names are looked for, as for ``read_settings``.

    Raises:
        ConfigError: ``dialect`` is not known.
    """
    name = source.path if source is not None else str(path)
    if dialect is None and name is not None and name.endswith(SCRIPTS):
        return _script(path, to, source)
    whole = to is not None and to in run_writers()
    translated = _translated(path, to, dialect, source, files) if whole else None
    if translated is not None:
        return translated
    reading = read_settings(source if source is not None else path, dialect=dialect, files=files)
    before = reading.source.text if reading.source is not None else ""
    if reading.dialect is None or reading.source is None:
        first = reading.diagnostics[0]
        return Migrated(path, None, before, None, first.message, first.help)
    silent = not reading.open and not any(item.code != "FSD113" for item in reading.diagnostics)
    if silent and reading.settings is None:
        if to is not None and to != reading.dialect:
            nothing = f"there are no settings to write for {to}"
            return Migrated(path, reading.dialect, before, None, "the file does not configure FSDP", nothing)
        return Migrated(path, reading.dialect, before, before, notes=("the file does not configure FSDP",))
    if to is None and any(item.code == "FSD301" for item in reading.suppressed):
        return Migrated(path, reading.dialect, before, before, notes=("a comment in the file keeps FSDP1",))
    refusal = _refusal(reading)
    if refusal is not None:
        return Migrated(path, reading.dialect, before, None, *refusal)
    if to is None or to == reading.dialect:
        return _in_place(path, reading)
    return _across(path, reading, to)


def _script(path: Path, to: str | None, source: SourceText | None) -> Migrated:
    """Migrate a training script from FSDP1 to FSDP2; everything in it, or nothing."""
    from fsdptool.scripts.migrate import migrate_script

    try:
        source = source if source is not None else read_source(path)
    except UnreadableError as error:
        return Migrated(path, None, "", None, error.message)
    refused = partial(Migrated, path, "python", source.text, None)
    if to is not None:
        return refused(f"a script is not written for {to}", "leave out --to")
    if path.suffix == ".ipynb":
        return refused("notebooks are judged and not migrated", "export the notebook as a script")
    made = migrate_script(source, script_versions(None))
    told = Migrated(
        path,
        "python",
        source.text,
        made.text,
        original=source.encode(),
        version=1 if made.uses_fsdp1 else None,
    )
    if made.text is None:
        why = f"cannot be migrated as it is: {'; '.join(made.blocked)}"
        return replace(
            told, refusal=why, help="change these lines by hand, and migrate again", notes=made.notes
        )
    notes = made.notes if made.uses_fsdp1 else ("the script does not use FSDP1",)
    return replace(told, notes=notes, encoded=source.encode(made.text))


def check_target(to: str) -> None:
    """Check that a dialect or a program can be written.

    Raises:
        ConfigError: It is not known; the help names those that are.
    """
    if to not in run_writers():
        try:
            load_registry().get(to)
        except ConfigError as error:
            names = sorted({*load_registry().names, *run_writers()})
            raise ConfigError(error.message, help=f"choose one of: {', '.join(names)}") from error


def _translated(
    path: Path, to: str | None, dialect: str | None, source: SourceText | None, files: NamedFiles | None
) -> Migrated | None:
    """Return a whole run in the file of a program; None: only settings of FSDP are to be written."""
    from fsdptool.config.described import describe_written
    from fsdptool.config.translation import keeps_flags, translate

    assert to is not None
    alone = to not in load_registry().names
    before = ""
    try:
        source = source if source is not None else read_source(path)
        before = source.text
        found = describe_written(source, program=dialect, files=files)
    except (UnreadableError, ConfigError) as error:
        advice = error.help if isinstance(error, ConfigError) else None
        return Migrated(path, None, before, None, error.message, advice) if alone else None
    run, launch = found.run, found.launch
    if run is None or run.model is None:
        why = "the file describes no run of a program that is known here, with a model"
        if run is not None and launch is not None and launch.fsdp is None and run.program == to:
            why = "; ".join(run.unresolved) or "the command line names no model"
            return Migrated(
                path,
                "flags",
                before,
                None,
                why,
                "write the name of the model, or run the command where its file is",
            )
        return Migrated(path, None, before, None, why) if alone else None
    flags = launch is not None and run.program == to and keeps_flags(to)
    if run.program == to and not flags:
        return Migrated(path, to, before, before, notes=("it is for that program",)) if alone else None
    # A command line is not replaced by the file that says the same.
    name = "flags" if flags else run.program
    notes = run.problems
    if found.further:
        notes = (*notes, f"the text starts {found.further + 1} trainings: the first that is read is written")
    told = Migrated(path, name, before, None, notes=notes, original=source.encode())
    if flags and launch is not None and (launch.deepspeed or launch.unread is not None):
        return _of_another_launch(told, launch)
    header = (f"Written by fsdptool migrate from a {'command line' if flags else 'file'} for {run.program}.",)
    try:
        made = translate(run, to, header=header, given=found.keys if flags else None, launch=launch)
    except ConfigError as error:
        return replace(told, refusal=error.message, help=error.help)
    return replace(told, after=made.text, encoded=made.text.encode(), losses=made.losses, beside=made.beside)


def _of_another_launch(told: Migrated, launch: Launch) -> Migrated:
    """Refuse a command line whose launch says what no file of the program would."""
    if launch.deepspeed:
        why = "the launch starts DeepSpeed, which the file of the program would not"
        return replace(told, refusal=why, help="launch it with accelerate launch --use_fsdp --fsdp_version 2")
    why = f"accelerate's file {printable(launch.unread or '')} is not read: what it sets is not known"
    return replace(told, refusal=why, help="run the command where the file is found", notes=())


def migrated_or_refused(path: Path, **arguments: Any) -> Migrated:
    """Migrate a file as :func:`migrate_file`; whatever it holds, the other files of a call are migrated too.

    A failure of our own is a refusal of the file.

    Raises:
        ConfigError: As :func:`migrate_file`.
    """
    try:
        return migrate_file(path, **arguments)
    except FsdptoolError:
        raise
    except Exception as error:
        why = f"internal error: {type(error).__name__}: {error}"
        return Migrated(path, None, "", None, why, "report it, with the file")


def _refusal(reading: Reading) -> tuple[str, str | None] | None:
    if "fsdp_version" in reading.open:
        return f"fsdp_version is {reading.open['fsdp_version']}: its value is not known here", WRITE_IT
    for item in reading.diagnostics:
        if item.code in ("FSD114", "FSD332", "FSD333") or (item.code == "FSD301" and item.fix is None):
            if item.code == "FSD301" and reading.written_in is not None and not reading.written_in.in_place:
                continue
            return item.message if item.code != "FSD301" else "cannot be migrated", item.help
    return None


def _result_of(path: Path, reading: Reading) -> partial[Migrated]:
    """Return what makes the result for a file that was read."""
    assert reading.source is not None
    source = reading.source
    return partial(
        Migrated, path, reading.dialect, source.text, original=source.encode(), version=reading.version
    )


def _in_place(path: Path, reading: Reading) -> Migrated:
    assert reading.source is not None and reading.written_in is not None
    if reading.version == 1 and reading.named:
        files = " and ".join(reading.named)
        advice = f"fsdptool migrate {reading.named[0]}, or --to accelerate for one file with everything"
        return Migrated(
            path, reading.dialect, reading.source.text, None, f"the settings are in {files}", advice
        )
    if reading.version == 1 and not reading.written_in.in_place:
        return _across(path, reading, reading.written_in.name)
    result_of = _result_of(path, reading)
    if reading.version == 2 and _states_version(reading):
        # What else could be written better is for `validate --fix`: --check is to find FSDP1 alone.
        return result_of(reading.source.text, notes=tuple(_leftovers(reading)))
    final = repair(repair(repair(reading).reading, unsafe=True, only=_CODES).reading)
    if final.reading.version == 1:
        why = "cannot be migrated: the form of the file does not allow the edits"
        return result_of(None, why, "write a new file with --to accelerate -o FILE")
    return result_of(
        final.after.text,
        encoded=final.after.encode(),
        notes=(
            *_lost(reading),
            *_removed(reading, final.reading),
            *_switched(reading, final.reading),
            *_remaining(final.reading),
        ),
    )


def _states_version(reading: Reading) -> bool:
    """Return whether the file itself says which version it is for, instead of what reads it today."""
    return any(item.key == "fsdp_version" and item.line is not None for item in reading.effective)


def _remaining(reading: Reading) -> Iterable[str]:
    for item in reading.errors:
        yield f"{item.code} remains on line {item.line or 0}: {item.message}"


def _leftovers(reading: Reading) -> Iterable[str]:
    """What the file says in FSDP1's words although its version is 2: nobody converts that."""
    for item in reading.diagnostics:
        if item.code in ("FSD302", "FSD303", "FSD334") and item.severity != "info":
            yield (
                f"the file already states version 2, so nothing is migrated: {item.message}. If it was "
                "written for FSDP1, change the version to 1 and migrate again"
            )
            return


def _removed(before: Reading, after: Reading) -> Iterable[str]:
    """Name what was removed because the program does not read it: one key may be a misspelling."""
    left = {(item.code, item.message) for item in after.diagnostics}
    for item in before.diagnostics:
        gone = item.fix is not None and item.fix.safe and (item.code, item.message) not in left
        if item.code in ("FSD202", "FSD211") and item.severity != "info" and gone:
            yield f"removed: {item.message}"


def _lost(reading: Reading) -> Iterable[str]:
    if reading.version == 1 and reading.facts.get("forward_prefetch"):
        yield "forward prefetch is dropped: accelerate has no equivalent (fsdptool train: sharding.prefetch)"
    if reading.version == 1 and reading.facts.get("wrap_policy") == "size":
        yield "size-based wrapping is kept, but FSDP2 refuses layer lists above the threshold (see FSD324)"


def _switched(before: Reading, after: Reading) -> Iterable[str]:
    if before.facts.get("cpu_ram_efficient_loading") and not after.facts.get("cpu_ram_efficient_loading"):
        yield "RAM-efficient loading is disabled: axolotl refuses it with load_in_4bit under FSDP2"


def _across(path: Path, reading: Reading, to: str) -> Migrated:
    assert reading.source is not None and reading.dialect is not None
    result_of = _result_of(path, reading)
    blocking = [item for item in reading.errors if item.fix is None or not item.fix.safe]
    if reading.open and not blocking:
        return result_of(None, reading.unknown(), WRITE_IT)
    if blocking or reading.settings is None:
        first = blocking[0] if blocking else None
        why = first.message if first else "the file does not configure FSDP"
        return result_of(None, why, first.help if first else None)
    try:
        text, notes = write_across(reading.settings, to)
    except ConfigError as error:
        return result_of(None, error.message, error.help)
    encoded = reading.source.encode(text) if to == reading.dialect else text.encode()
    return result_of(text, notes=(*notes, *_lost(reading)), encoded=encoded)


def write_across(
    settings: FsdpSettings, to: str, *, header: Sequence[str] = ()
) -> tuple[str, tuple[str, ...]]:
    """Write settings in another dialect; launch settings that it cannot express become notes.

    Raises:
        ConfigError: A setting that shapes the run cannot be expressed; the message names it.
    """
    cannot = load_registry().get(to).cannot
    default = FsdpSettings()
    lost = [name for name in _LAUNCH if name in cannot and getattr(settings, name) != getattr(default, name)]
    notes = tuple(
        f"give {name} = {getattr(settings, name)} at launch: {to} cannot express it" for name in lost
    )
    if "wrap_classes" in cannot and settings.wrap_policy == "transformer" and settings.wrap_classes:
        # torchtitan and torchtune wrap the blocks of models of their own, under names of their own.
        lost.append("wrap_classes")
        names = ", ".join(settings.wrap_classes)
        notes = (*notes, f"wrap_classes ({names}) is left out: {to} wraps every block of its own models")
    rest = replace(settings, **{name: getattr(default, name) for name in lost})
    return write_settings(rest, to, header=header), notes


def migration_document(results: Iterable[Migrated]) -> dict[str, Any]:
    """Return the document of schema ``migrate``."""
    from fsdptool.records.config_documents import MigratedFile, Migration

    files = tuple(
        MigratedFile(
            path=str(item.path),
            dialect=item.dialect,
            changed=item.changed,
            refusal=item.refusal,
            help=item.help,
            notes=item.notes,
            text=item.after,
            losses=item.losses,
            beside=item.beside,
        )
        for item in results
    )
    return envelope("migrate", [file.path for file in files], Migration(files))
