"""A copy of the checkout in which faults are planted, and tests that run there."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
TIMEOUT = 900


def copy_checkout(folder: Path) -> None:
    """Put the last commit into a folder, so that faults are never planted in the checkout itself."""
    archive = folder / "checkout.tar"
    subprocess.run(["git", "-C", ROOT, "archive", "-o", archive, "HEAD"], check=True)
    with tarfile.open(archive) as stream:
        stream.extractall(folder, filter="data")
    archive.unlink()


@contextmanager
def replaced(path: Path, content: bytes) -> Iterator[None]:
    """Let a file have another content while entered."""
    whole = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(whole)


def failing_test(folder: Path, arguments: Sequence[str]) -> str:
    """Run tests in a copy of the checkout.

    Args:
        folder: The copy.
        arguments: Of pytest.

    Returns:
        The first test that failed, ``timeout``, or an empty text if none failed. A run without any test is
        one that failed unless ``-m`` left none.
    """
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{folder / 'plugins'}"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *arguments]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    if done.returncode == 0 or (done.returncode == 5 and "-m" in arguments):
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+(?: \S+)*?)(?: - .*)?$", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"exit status {done.returncode}"
