"""``# fsdptool:`` comments of a file: what they silence, and for whom it says it is written."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from fsdptool.config.rules import RULES
from fsdptool.files.text import SourceText
from fsdptool.records.diagnostic import Diagnostic

_COMMENT = re.compile(r"#\s*fsdptool:\s*(.*)")
_WORD = re.compile(
    r"(?:(ignore)(?:\[([^\[\]]*)\])?|consumer\s*=\s*([A-Za-z]+)|(?:layout|plan)=[^\s,;#]+)(?=[\s,;#]|$)[\s,;]*",
    re.I,
)
"""``layout`` and ``plan`` say where an emitted file comes from."""


@dataclass(slots=True)
class Notes:
    """What the comments of one file say.

    Attributes:
        consumer: The name after ``consumer=``, in lower case, or None.
        consumer_at: Index of that comment.
        unknown: What was not understood, with the index of its comment: it silences nothing.
    """

    consumer: str | None = None
    consumer_at: int | None = None
    unknown: list[tuple[int, str]] = field(default_factory=list)
    _file: set[str] = field(default_factory=set)
    _lines: dict[int, set[str]] = field(default_factory=dict)

    def silences(self, diagnostic: Diagnostic) -> bool:
        """Whether a comment on the finding's line, or one for the whole file, names its code."""
        codes = self._file | self._lines.get(diagnostic.line or -1, set())
        return "*" in codes or diagnostic.code in codes

    def take(self, source: SourceText, number: int, match: re.Match[str]) -> None:
        """Take in the comment on a line: words one after another, up to the first that is none of ours."""
        at, text = source.line_start(number) + match.start(), match.group(1).rstrip()
        own_line = not source.line(number)[: match.start()].strip()
        while text:
            word = _WORD.match(text)
            if word is None:
                self.unknown.append(
                    (at, f"{text.split()[0]!r} is not understood (ignore[CODE], consumer=NAME)")
                )
                return
            if word.group(3):
                self.consumer, self.consumer_at = word.group(3).lower(), at
            elif word.group(1):
                self._silence(number, own_line, at, word.group(2))
            text = text[word.end() :]
            if text.startswith("#"):  # another comment
                return

    def _silence(self, number: int, own_line: bool, at: int, named: str | None) -> None:
        codes = {"*"} if named is None else {code.strip().upper() for code in named.split(",")} - {""}
        if not codes:
            self.unknown.append((at, "ignore[] names no rule"))
        self.unknown.extend((at, f"{code} is no rule") for code in sorted(codes - {"*"}) if code not in RULES)
        (self._file if own_line else self._lines.setdefault(number, set())).update(codes)


def read_notes(source: SourceText) -> Notes:
    """Return what the comments say; on a line of its own one is about the whole file, else about its line."""
    notes = Notes()
    if "fsdptool:" in source.text:
        for number in range(1, source.line_count + 1):
            match = _COMMENT.search(source.line(number))
            if match is not None:
                notes.take(source, number, match)
    return notes
