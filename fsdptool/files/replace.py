"""Replacing a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from fsdptool.errors import StorageError


def replace_file(path: Path, data: bytes, *, before: bytes | None = None) -> None:
    """Replace ``path`` by ``data`` in one step; a link's target is replaced, not the link.

    The mode stays, and the owner where that may be set (a container's root must not take the files of
    the person whose folder it works in).

    Args:
        path: The file.
        data: Its new content.
        before: What was read from it; other content by now means that somebody else is writing.

    Raises:
        StorageError: It is read-only, was changed meanwhile, or cannot be written; the content is untouched.
    """
    target = path.resolve()
    aside: str | None = None
    try:
        if target.exists():
            # Root may write whatever the mode says, so the mode itself is asked.
            if not target.stat().st_mode & 0o222:
                raise StorageError(
                    f"{path} is read-only", help="make it writable (chmod u+w) to have it changed"
                )
            if before is not None and target.read_bytes() != before:
                raise StorageError(f"{path} was changed by somebody else meanwhile", help="run it again")
        handle, aside = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        if target.exists():
            shutil.copymode(target, aside)
            with contextlib.suppress(OSError):
                os.chown(aside, target.stat().st_uid, target.stat().st_gid)
        Path(aside).replace(target)
        aside = None
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}", help="the file is as it was"
        ) from error
    finally:
        if aside is not None:
            with contextlib.suppress(OSError):
                Path(aside).unlink()
