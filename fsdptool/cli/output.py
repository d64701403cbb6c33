"""Write answers: documents to standard output, files whole or not at all."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdptool.errors import StorageError
from fsdptool.formatting import printable, printable_json


def print_document(document: Mapping[str, Any]) -> None:
    """Print a JSON document to standard output, escaped to ASCII if the encoding of the terminal needs it."""
    narrow = not (sys.stdout.encoding or "").lower().startswith("utf")
    sys.stdout.write(printable_json(json.dumps(document, indent=2, ensure_ascii=narrow)) + "\n")


def say(text: str) -> None:
    """Write one line to standard error: what was done, or what to know about the answer."""
    sys.stderr.write(f"{printable(text)}\n")


def answer_line(text: str) -> None:
    """Write one line of an answer to standard output."""
    sys.stdout.write(f"{printable(text)}\n")


def check_free(path: Path, *, force: bool) -> None:
    """Refuse to replace a file without ``force``; called before any work is done.

    Raises:
        StorageError: The file exists and ``force`` is not set.
    """
    if path.is_dir():
        raise StorageError(f"{path} is a folder", help="give the path of a file")
    if path.exists() and not force:
        raise StorageError(f"{path} already exists", help="use --force to replace it, or give another path")


def write_file(path: Path, text: str, *, force: bool = False) -> None:
    """Write ``text`` to ``path`` whole or not at all.

    Raises:
        StorageError: The file exists and ``force`` is not set, or it cannot be written.
    """
    check_free(path, force=force)
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with aside.open("w", encoding="utf-8", newline="") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(path)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise StorageError(
            f"{path} cannot be written: {error.strerror or error}", help="choose another path"
        ) from error
