"""The files that a shell script writes with here-documents, for the command that reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from posixpath import normpath
from typing import NamedTuple

_OPENS = re.compile(r"<<(-?)[ \t]*(['\"\\]?)(\w+)")
_WRITES = re.compile(r"(?<![\d&>])(>{1,2})[ \t]*(\"[^\"]+\"|'[^']+'|[^\s;|&<>\"']+)")
_TEE = re.compile(r"\btee[ \t]+(?:(-a|--append)[ \t]+)?(\"[^\"]+\"|'[^']+'|[^\s;|&<>\"'-][^\s;|&<>\"']*)")
_COPIES = re.compile(r"^\s*(?:[\w{(]+[ \t]+)*(?:cat|tee)\b")
"""Commands that write a here-document as it stands; ``python - <<EOF`` runs it."""


_COPIED = re.compile(
    r"^[^\n#]*\b(?:cat|tee)\b[^\n]*<<-?[ \t]*(?P<mark>\w+)\b[^\n]*\n"
    r"(?P<body>.*?)^[ \t]*(?P=mark)[ \t]*\r?$",
    re.MULTILINE | re.DOTALL,
)
_KEY = re.compile(r"(?:#[^\n]*\n\s*)*(?:[\w.\-\"']+[ \t]*:(?:\s|$)|\{|\[|---)")
"""How a file of YAML, JSON or TOML begins, after its comments."""
_COMMANDS = re.compile(r"^\s*(?:#!|#SBATCH|export\s|source\s|cd\s|set -)", re.MULTILINE)


class _Document(NamedTuple):
    name: str
    appends: bool
    quoted: bool
    text: str


def here_documents(text: str, substituted: str, *, plain_names: bool = False) -> dict[str, str]:
    """Return the files that a script writes, by the names that its command has for them.

    A file that is written twice, or that ``sed -i`` changes, is left out: which text counts is not known.

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
    return {
        name: body
        for name, body in written.items()
        if body is not None and not re.search(rf"\bsed[ \t]+-i[^\n]*{re.escape(name)}", substituted)
    }


def settings_written(text: str) -> Iterator[tuple[int, int]]:
    """Yield where the here-documents are that a script copies to a file and whose variables count.

    Those whose lines look like commands are left out: another shell reads them.
    """
    for found in _COPIED.finditer(text):
        body = found["body"]
        if _KEY.match(body.lstrip()) and not _COMMANDS.search(body):
            yield found.span("body")


def written_name(name: str) -> str:
    """Return one spelling of a path: ``./a.yaml`` is ``a.yaml``."""
    return normpath(name)


def _documents(text: str) -> Iterator[_Document]:
    lines = iter(text.splitlines(keepends=True))
    for line in lines:
        opened = _OPENS.search(line) if _COPIES.match(line) else None
        if opened is None:
            continue
        dash, quote, mark = opened.groups()
        body: list[str] = []
        for inner in lines:
            kept = inner.lstrip("\t") if dash else inner
            if kept.rstrip("\r\n") == mark:
                break
            body.append(kept)
        command = line[: opened.start()] + line[opened.end() :]
        found = _WRITES.search(command) or _TEE.search(command)
        if found is not None:
            how, name = found.groups()
            yield _Document(name.strip("\"'"), how not in (None, ">"), bool(quote), "".join(body))
