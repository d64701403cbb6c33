"""Files of a git repository as they were at a revision.

Only commands of git that read its objects are run: nothing is checked out, and no hook, filter, pager or
external diff of the repository is started.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

from fsdptool.errors import ConfigError
from fsdptool.files.text import SIZE_LIMIT, SourceText, UnreadableError, decode, is_file, read_bytes

_SECONDS = 60
_BLOBS = ("100644", "100755")
"""Modes of regular files: links and submodules are not read."""


@dataclass(frozen=True, slots=True)
class Revision:
    """The files of a commit.

    Attributes:
        root: Top folder of the working tree.
        name: As it was named.
        blobs: Object of each regular file, by its path from ``root`` with slashes.
    """

    root: Path
    name: str
    blobs: dict[str, str]

    def read(self, path: Path) -> SourceText | None:
        """Return the text of a file at this revision, or None where there was none.

        Args:
            path: Where the file is in the working tree.

        Raises:
            UnreadableError: It is too large, or is not UTF-8.
        """
        blob = self.blobs.get(self._inside(path))
        if blob is None:
            return None
        size = int(_git(self.root, "cat-file", "-s", blob))
        if size > SIZE_LIMIT:
            message = f"the file has {size:,} bytes; more than {SIZE_LIMIT:,} are not read"
            raise UnreadableError("FSD102", message)
        return decode(_git(self.root, "cat-file", "blob", blob), str(path))

    def changed(self, path: Path) -> bool:
        """Whether a file of the working tree is new or differs, line endings apart."""
        blob = self.blobs.get(self._inside(path))
        if blob is None:
            return True
        try:
            data = read_bytes(path)
        except UnreadableError:
            return True
        endings = (data, data.replace(b"\r\n", b"\n"), data.replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
        return not any(_object(item, len(blob)) == blob for item in endings)

    def removed(self) -> list[Path]:
        """Return the files that are no longer in the working tree."""
        return [self.root / name for name in self.blobs if not is_file(self.root / name)]

    def changed_lines(self, source: SourceText) -> tuple[int, ...]:
        """Return the lines of a text (1-based) that this revision does not have; for a new file none."""
        before = self.read(Path(source.path or ""))
        if before is None:
            return ()
        old, new = before.text.splitlines(), source.text.splitlines()
        blocks = SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
        return tuple(
            line + 1
            for kind, _, _, start, end in blocks
            if kind != "equal"
            for line in (range(start, end) if end > start else (min(start, max(len(new) - 1, 0)),))
        )

    def _inside(self, path: Path) -> str:
        place = Path(os.path.normpath(path.absolute()))
        for root in (self.root, Path(os.path.realpath(self.root))):
            if place.is_relative_to(root):
                return place.relative_to(root).as_posix()
        return place.as_posix()


def read_revision(name: str) -> Revision:
    """Return the commit from which the working tree departed: where it and a revision last agreed.

    Without a common commit (a clone that is not deep enough), the revision itself is taken.

    Args:
        name: A branch, tag or commit, as ``origin/main``.

    Raises:
        ConfigError: git is not installed, this is not a repository, or it does not have the revision.
    """
    here = Path()
    top = _text(here, "rev-parse", "--show-toplevel")
    if top is None:
        raise ConfigError(
            "--base: the working directory is not in a git repository",
            help="run the command in the repository",
        )
    commit = None if name.startswith("-") else _text(here, "rev-parse", "--verify", f"{name}^{{commit}}")
    if commit is None:
        raise ConfigError(
            f"--base: the repository has no revision {name!r}",
            help="fetch it first (git fetch origin main; actions/checkout: fetch-depth: 0)",
        )
    commit = _text(here, "merge-base", commit, "HEAD") or commit
    root = Path(top)
    blobs = {}
    for entry in _git(root, "ls-tree", "-r", "-z", "--full-tree", commit).split(b"\0"):
        meta, _, path = entry.partition(b"\t")
        if meta.split(b" ")[0].decode() in _BLOBS:
            blobs[os.fsdecode(path)] = meta.split(b" ")[2].decode()
    return Revision(root, name, blobs)


def _object(data: bytes, digits: int) -> str:
    """Return the name that git gives a file's content, in as many hexadecimal digits as the repository's."""
    whole = b"blob %d\0" % len(data) + data
    return (hashlib.sha1(whole, usedforsecurity=False) if digits == 40 else hashlib.sha256(whole)).hexdigest()


def _text(folder: Path, *arguments: str) -> str | None:
    try:
        return os.fsdecode(_git(folder, *arguments)).strip() or None
    except ConfigError as error:
        if isinstance(error.__cause__, OSError):
            raise
        return None


def _git(folder: Path, *arguments: str) -> bytes:
    environment = {**os.environ, "GIT_NO_LAZY_FETCH": "1", "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    command = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            check=True,
            timeout=_SECONDS,
            env=environment,
            stdin=subprocess.DEVNULL,
        )
    except OSError as error:
        raise ConfigError("--base needs git, which cannot be started", help="install git") from error
    except subprocess.SubprocessError as error:
        said = os.fsdecode(getattr(error, "stderr", b"") or b"").strip().splitlines()
        raise ConfigError(f"git {arguments[0]}: {said[-1] if said else 'no answer'}") from error
    return done.stdout
