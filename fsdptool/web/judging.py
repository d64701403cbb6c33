"""Configuration files below the roots, judged as ``validate`` judges them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from fsdptool.api.validate import Linter, as_found
from fsdptool.config.command_lines import NamedFiles
from fsdptool.config.lint_settings import LintSettings
from fsdptool.config.reader import judged_or_failed
from fsdptool.config.result import Conditions, Reading
from fsdptool.config.shell import sniff
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText, UnreadableError, decode, is_folder, read_bytes
from fsdptool.web.roots import Roots

MOST_FILES = 1000
"""The most files of a folder that are judged for one page."""


@dataclass(frozen=True, slots=True)
class JudgedFile:
    """One file and what was found in it.

    Attributes:
        name: ``ROOT/below/it``, as pages name it.
        path: The file, resolved.
        data: Its bytes; None if it cannot be read.
        whole: Everything that was found.
        reading: What the project's settings and baseline leave of it.
    """

    name: str
    path: Path
    data: bytes | None
    whole: Reading
    reading: Reading


class RootedLinter(Linter):
    """A linter that reads project settings and baselines below the roots only."""

    # No __slots__ of its own would give it a __dict__, which dataclasses' fields do not need.
    __slots__ = ("_roots",)

    def __init__(self, roots: Roots) -> None:
        super().__init__()
        self._roots = roots
        for root in roots.folders.values():
            # The search for settings goes upwards; it ends above a root as if there were none.
            if not roots.contains(root.parent):
                self._found[root.parent] = LintSettings()

    def baseline_file(self, settings: LintSettings) -> Path | None:
        """Return the baseline that counts, or None if it is outside of the roots."""
        path = super().baseline_file(settings)
        return path if path is not None and self._roots.contains(path) else None

    def files_of(self, path: Path) -> NamedFiles:
        """Return where the files that a command line names are looked for: its root, then its folder."""
        roots = tuple(root for root in self._roots.folders.values() if path.is_relative_to(root))
        return NamedFiles(tuple(dict.fromkeys((*roots, path.parent))), self._roots.contains)


def judge_file(
    roots: Roots, name: str, judged: Mapping[str, str], linter: Linter | None = None
) -> JudgedFile:
    """Return one file that was named.

    Args:
        roots: The folders that may be read.
        name: From a page.
        judged: How to judge it: ``consumer``, ``target`` and ``dialect``, as far as they are given.
        linter: Shared by several files.

    Raises:
        ConfigError: It is outside of the folders or does not exist, or an argument is unknown.
    """
    path = roots.resolve(name)
    if is_folder(path):
        raise ConfigError(f"{name} is a folder", help="open it under Configs")
    return _judged(linter or RootedLinter(roots), path, roots.name_of(path), named=True, judged=judged)


def judge_folder(roots: Roots, name: str) -> Iterator[JudgedFile]:
    """Yield the configurations of a folder, at most ``MOST_FILES`` of them.

    Links that lead outside of the roots are left out.

    Raises:
        ConfigError: It is outside of the folders, does not exist, or holds no YAML, JSON or TOML file.
    """
    folder = roots.resolve(name)
    linter = RootedLinter(roots)
    base = roots.name_of(folder)
    count = 0
    for path, named in linter.expand([folder]).items():
        # The walk enters no links to folders, so only the file itself can be one.
        if path.is_symlink() and not roots.contains(path):
            continue
        # A link keeps its own name.
        found = "/".join((base, *path.relative_to(folder).parts))
        yield _judged(linter, path, found, named=named, judged={})
        count += 1
        if count == MOST_FILES:
            return


def judge_text(text: str) -> Reading:
    """Return the reading of a text that is not a file."""
    return _read_once(SourceText(text, "the pasted text"), ())


def _judged(linter: Linter, path: Path, name: str, *, named: bool, judged: Mapping[str, str]) -> JudgedFile:
    given = tuple(sorted(judged.items()))
    try:
        data = read_bytes(path)
        source = decode(data, name)
        if "flags" in (judged.get("dialect"), sniff(source.text)):
            # What a command line names may change while its own text stays.
            whole = _read(source, given, linter.files_of(path) if isinstance(linter, RootedLinter) else None)
        else:
            whole = _read_once(source, given)
    except UnreadableError:
        # Read again by the linter, which makes a finding of it.
        data, whole = None, _read(path, given)
    found = whole if named else as_found(whole)
    return JudgedFile(name, path, data, found, linter.sift(found, path))


@lru_cache(maxsize=2 * MOST_FILES)
def _read_once(source: SourceText, given: tuple[tuple[str, str], ...]) -> Reading:
    """Return the reading of a text. The text itself is the key, so an answer cannot be stale."""
    return _read(source, given)


def _read(
    source: SourceText | Path, given: tuple[tuple[str, str], ...], files: NamedFiles | None = None
) -> Reading:
    judged = dict(given)
    dialect, consumer, target = (judged.get(key) for key in ("dialect", "consumer", "target"))
    return judged_or_failed(source, Conditions(dialect, consumer, target, files=files))
