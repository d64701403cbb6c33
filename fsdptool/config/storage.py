"""Replacing a file whole or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path

from fsdptool.errors import StorageError


def replace_file(path: Path, data: bytes) -> None:
    """Replace ``path`` by ``data`` in one step, keeping its mode; a link's target is replaced, not the link.

    Raises:
        StorageError: It cannot be written; the old content is untouched.
    """
    target = path.resolve()
    aside: str | None = None
    try:
        handle, aside = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        if target.exists():
            shutil.copymode(target, aside)
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
