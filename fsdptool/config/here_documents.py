"""The files that a shell script writes with here-documents, for the command that reads them."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate
from posixpath import normpath
from typing import NamedTuple

_OPENS = re.compile(r"<<(-?)[ \t]*(['\"\\]?)(\w+)")
_MARK = re.compile(r"\w+")
_WRITES = re.compile(r"(?<![\d&>])(>{1,2})[ \t]*(\"[^\"]+\"|'[^']+'|[^\s;|&<>\"']+)")
_TEE = re.compile(r"\btee[ \t]+(?:(-a|--append)[ \t]+)?(\"[^\"]+\"|'[^']+'|[^\s;|&<>\"'-][^\s;|&<>\"']*)")
_COPIES = re.compile(r"^\s*(?:[\w{(]+[ \t]+)*(?:cat|tee)\b")
"""Commands that write a here-document as it stands; ``python - <<EOF`` runs it."""
_COPIED = re.compile(r"[^\n#]*\b(?:cat|tee)\b")
"""How a line begins that may copy a here-document."""
_EDITED = re.compile(r"\bsed\b[^\n]*[ \t]-i[^\n]*")
_KEY = re.compile(r"(?:#[^\n]*\n\s*)*(?:[\w.\-\"']+[ \t]*:(?:\s|$)|\{|\[|---)")
"""How a file of YAML, JSON or TOML begins, after its comments."""
_COMMANDS = re.compile(r"^\s*(?:#!|#SBATCH|export\s|source\s|cd\s|set -)", re.MULTILINE)


class _Document(NamedTuple):
    name: str
    appends: bool
    quoted: bool
    text: str


def here_documents(text: str, substituted: str, *, plain_names: bool = False) -> dict[str, str | None]:
    """Return the files that a script writes, by the names that its command has for them.

    A file that is written twice, or that ``sed -i`` changes, has None: which text counts is not known.

    Args:
        text: The script. What stands under a quoted mark (``<<'EOF'``) keeps its variables.
        substituted: The script with the values of its variables.
        plain_names: Whether the command is read without these values, so that names keep their variables.
    """
    documents = list(_documents(substituted))
    plain = list(_documents(text)) if text != substituted else documents
    written: dict[str, str | None] = {}
    for at, document in enumerate(documents):
        aligned = len(plain) == len(documents)
        body = plain[at].text if document.quoted and aligned else document.text
        name = written_name(plain[at].name if plain_names and aligned else document.name)
        before = written.get(name)
        if name not in written and not document.appends:
            written[name] = body
        else:
            written[name] = before + body if document.appends and before is not None else None
    edited = {
        written_name(word) for line in _EDITED.findall(substituted) for word in re.split(r"[\s\"';|&]+", line)
    }
    return {name: None if name in edited else body for name, body in written.items()}


def settings_written(text: str) -> Iterator[tuple[int, int]]:
    """Yield where the here-documents are that a script copies to a file and whose variables count.

    Those whose lines look like commands are left out: another shell reads them.
    """
    for line, opened, start, end in _bodies(text):
        if end is None:
            continue
        body = text[start:end]
        copies = not opened[2] and _COPIED.match(line, 0, opened.start()) is not None
        if copies and _KEY.match(body.lstrip()) and not _COMMANDS.search(body):
            yield start, end


def written_name(name: str) -> str:
    """Return one spelling of a path: ``./a.yaml`` is ``a.yaml``."""
    return normpath(name)


def _bodies(text: str) -> Iterator[tuple[str, re.Match[str], int, int | None]]:
    """Yield the lines that open a here-document, where they open it, and where its text begins and ends.

    One line opens one. The end is None where no later line closes it: a shell reads to the end of the script.
    """
    lines = text.splitlines(keepends=True)
    starts = [0, *accumulate(map(len, lines))]
    closing: dict[tuple[str, bool], list[int]] = {}
    for number, line in enumerate(lines):
        word = line.rstrip("\r\n")
        if _MARK.fullmatch(word):
            closing.setdefault((word, False), []).append(number)
        if _MARK.fullmatch(word.lstrip("\t")):
            closing.setdefault((word.lstrip("\t"), True), []).append(number)
    number = 0
    while number < len(lines):
        line = lines[number]
        opened = _OPENS.search(line) if _COPIED.match(line) else None
        number += 1
        if opened is None:
            continue
        ends = closing.get((opened[3], opened[1] == "-"), [])
        at = bisect_left(ends, number)
        if at == len(ends):
            yield line, opened, starts[number], None
            continue
        yield line, opened, starts[number], starts[ends[at]]
        number = ends[at] + 1


def _documents(text: str) -> Iterator[_Document]:
    for line, opened, start, end in _bodies(text):
        if not _COPIES.match(line):
            continue
        dash, quote, _ = opened.groups()
        body = text[start:end]
        if dash:
            body = re.sub(r"^\t+", "", body, flags=re.MULTILINE)
        command = line[: opened.start()] + line[opened.end() :]
        found = _WRITES.search(command) or _TEE.search(command)
        if found is not None:
            how, name = found.groups()
            yield _Document(name.strip("\"'"), how not in (None, ">"), bool(quote), body)
        if end is None:
            return
