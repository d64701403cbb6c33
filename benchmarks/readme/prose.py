"""Measure the pages of the documentation: words, sentences and paragraphs.

    python benchmarks/readme/prose.py [PAGE ...]        default: every page in docs/

Words are those a reader reads: code blocks, captured output, generated tables and comments are left out. A
paragraph is a block of text, or one item of a list. Rows of tables are not paragraphs and do not form
sentences. A test holds every page to the limits below.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
GENERATED = ("rules.md",)
"""Pages that are written from the program, as a whole."""
TOTAL_WORDS = 45_000
HOW_TO_WORDS = 600
SENTENCE_WORDS = 25
"""Most words of an average sentence on a page."""
PARAGRAPH_WORDS = 100

_CUT = (
    re.compile(r"<!-- (capture: [a-z-]+|measured|published) -->.*?<!-- end -->", re.DOTALL),
    re.compile(r"<!-- (?P<name>[a-z]+): begin.*?<!-- (?P=name): end -->", re.DOTALL),
    re.compile(r"^( *)```.*?^\1```$", re.DOTALL | re.MULTILINE),
    re.compile(r"<!--.*?-->", re.DOTALL),
)
_BLOCK = re.compile(r"\n[ \t]*\n|\n(?=[ \t]*(?:[-*]|\d+\.) )")
_SENTENCE = re.compile(r"(?<=[.!?])[)\"']?\s+(?=[\"'(`*\[]*[A-Z0-9`])")


@dataclass(frozen=True)
class Prose:
    """What was measured of one page.

    Attributes:
        words: Words of text and tables.
        sentence: Mean number of words of a sentence.
        paragraph: Words of the longest paragraph.
        longest: The beginning of that paragraph.
    """

    words: int
    sentence: float
    paragraph: int
    longest: str


def measure(text: str) -> Prose:
    """Measure the text of a page."""
    for pattern in _CUT:
        text = pattern.sub("", text)
    body = re.sub(r"\]\([^)]*\)", "]", text)
    prose = "\n".join(line for line in body.splitlines() if not re.match(r"\s*\||#+ |!\[", line))
    blocks = [block for block in _BLOCK.split(prose) if block.strip()]
    sentences = [_words(part) for block in blocks for part in _SENTENCE.split(block.strip())]
    sentences = [count for count in sentences if count > 1]
    longest = max(blocks, key=_words, default="")
    mean = sum(sentences) / max(len(sentences), 1)
    return Prose(_words(body), mean, _words(longest), " ".join(longest.split()[:8]))


def pages() -> dict[str, Prose]:
    """Measure every page that people write, by its path in ``docs``."""
    found = {path.relative_to(DOCS).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
    return {
        name: measure(path.read_text(encoding="utf-8"))
        for name, path in found.items()
        if name not in GENERATED
    }


def _words(text: str) -> int:
    return len([word for word in text.split() if any(letter.isalnum() for letter in word)])


def main(names: list[str]) -> None:
    """Print a row per page, and the total."""
    measured = {name: prose for name, prose in pages().items() if not names or name in names}
    for name, prose in measured.items():
        print(f"{prose.words:6} {prose.sentence:5.1f} {prose.paragraph:4}  {name}  ({prose.longest})")
    print(f"{sum(prose.words for prose in measured.values()):6} words on {len(measured)} pages")


if __name__ == "__main__":
    main(sys.argv[1:])
