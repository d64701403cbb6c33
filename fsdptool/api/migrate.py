"""``fsdptool.migrate``: files as FSDP2, or in another dialect."""

from __future__ import annotations

from collections.abc import Iterable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from fsdptool.api.options import MigrationOptions
from fsdptool.api.validate import expand
from fsdptool.errors import StorageError
from fsdptool.options import takes, with_defaults
from fsdptool.spelling import suggest_keywords

if TYPE_CHECKING:
    from fsdptool.config.migrate import Migrated


@suggest_keywords(check="write", diff="write", output="write")
@takes(MigrationOptions)
def migrate(
    files: str | PathLike[str] | Iterable[str | PathLike[str]],
    *,
    write: bool = False,
    **options: Unpack[MigrationOptions],
) -> tuple[Migrated, ...]:
    """Convert FSDP1 files to FSDP2, or to another dialect; nothing is written unless asked for.

    Args:
        files: A file or a folder, or several. Of a folder, files that are not configurations are left out.
        write: Replace the files that changed, comments kept. Not with another dialect.
        **options: The options of ``fsdptool migrate`` on what a file becomes; without ``to`` FSDP2 in the
            file's own dialect.

    Returns:
        Per file, the text ``before`` and ``after``, whether it ``changed``, notes, the ``losses`` of a whole
        run (what has no counterpart in the other program), texts that belong ``beside`` the file by the end
        of their name (a recipe's ``.accelerate.yaml``), and why one was refused.

    Raises:
        ConfigError: A dialect is not known, or a folder holds no configuration.
        StorageError: A file cannot be written, or changed meanwhile.
    """
    from fsdptool.config.migrate import check_target, migrated_or_refused
    from fsdptool.files.text import replace_file

    asked = with_defaults(MigrationOptions, options)
    to, dialect = asked["to"], asked["dialect"]
    if to is not None:
        check_target(to)
    paths = [files] if isinstance(files, str | PathLike) else list(files)
    results = []
    for path, named in expand(map(Path, paths)).items():
        result = migrated_or_refused(path, to=to, dialect=dialect)
        if named or result.dialect is not None:
            results.append(result)
    if not write:
        return tuple(results)
    changed = [result for result in results if result.changed]
    # Before the first file is written: a call that is refused changes nothing.
    for result in changed:
        if to is not None and to != result.dialect:
            raise StorageError(
                f"{result.path} is not replaced by another dialect", help="write its text `after` elsewhere"
            )
    failed = []
    for result in changed:
        try:
            replace_file(result.path, result.encoded, before=result.original)
        except StorageError as error:
            failed.append(error)
    if failed:
        # The other files were written all the same.
        raise StorageError(failed[0].message, help=failed[0].help, others=tuple(failed[1:]))
    return tuple(results)
