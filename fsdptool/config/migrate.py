"""Migrating a file: safe fixes, FSDP1 to FSDP2 by edits, or a new file in another dialect."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fsdptool.config.canonical import LAUNCH
from fsdptool.config.dialects import load_registry
from fsdptool.config.fixes import repair
from fsdptool.config.reader import read_settings
from fsdptool.config.result import Reading
from fsdptool.config.writer import write_settings
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText
from fsdptool.records.diagnostic import envelope
from fsdptool.records.sharding import FsdpSettings

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
        version: FSDP version that its program ran before, or None.
    """

    path: Path
    dialect: str | None
    before: str = field(repr=False)
    after: str | None = field(repr=False)
    refusal: str | None = None
    help: str | None = None
    notes: tuple[str, ...] = ()
    encoded: bytes = field(default=b"", repr=False)
    version: int | None = None

    @property
    def original(self) -> bytes:
        """The bytes that were read: the new ones keep the old ones' byte-order mark."""
        mark = b"\xef\xbb\xbf" if self.encoded.startswith(b"\xef\xbb\xbf") else b""
        return mark + self.before.encode()

    @property
    def changed(self) -> bool:
        """Whether the text is another one now."""
        return self.after is not None and self.after != self.before


def migrate_file(
    path: Path, *, to: str | None = None, dialect: str | None = None, source: SourceText | None = None
) -> Migrated:
    """Migrate one file; writes nothing.

    Args:
        path: The file.
        to: Dialect to write, or None for FSDP2 in the file's own. One that is not known is a refusal.
        dialect: Its dialect, or None to detect it.
        source: The text, when it does not come from the file.

    Raises:
        ConfigError: ``dialect`` is not known.
    """
    reading = read_settings(source if source is not None else path, dialect=dialect)
    before = reading.source.text if reading.source is not None else ""
    if reading.dialect is None or reading.source is None:
        first = reading.diagnostics[0]
        return Migrated(path, None, before, None, first.message, first.help)
    if not any(item.code != "FSD113" for item in reading.diagnostics) and reading.settings is None:
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


def _refusal(reading: Reading) -> tuple[str, str | None] | None:
    for item in reading.diagnostics:
        if item.code in ("FSD114", "FSD332", "FSD333") or (item.code == "FSD301" and item.fix is None):
            if item.code == "FSD301" and reading.written_in is not None and not reading.written_in.in_place:
                continue
            return item.message if item.code != "FSD301" else "cannot be migrated", item.help
    return None


def _in_place(path: Path, reading: Reading) -> Migrated:
    assert reading.source is not None and reading.written_in is not None
    if reading.version == 1 and not reading.written_in.in_place:
        return _across(path, reading, reading.written_in.name)
    result_of = partial(Migrated, path, reading.dialect, reading.source.text, version=reading.version)
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
    result_of = partial(Migrated, path, reading.dialect, reading.source.text, version=reading.version)
    blocking = [item for item in reading.errors if item.fix is None or not item.fix.safe]
    if blocking or reading.settings is None:
        first = blocking[0] if blocking else None
        why = first.message if first else "the file does not configure FSDP"
        return result_of(None, why, first.help if first else None)
    try:
        text, notes = write_across(reading.settings, to)
    except ConfigError as error:
        return result_of(None, error.message, error.help)
    return result_of(text, notes=(*notes, *_lost(reading)), encoded=text.encode())


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
        )
        for item in results
    )
    return envelope("migrate", [file.path for file in files], Migration(files))
