"""What every page is made of: one file without scripts or requests; keyboard, print, light and dark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from fsdptool.records.diagnostic import Diagnostic, library_versions, tool_version
from fsdptool.report.summaries import verdict_lines

if TYPE_CHECKING:
    from fsdptool.config.result import Reading


_FOLDER = Path(__file__).parent
CHARTS = (_FOLDER / "charts.css").read_text(encoding="utf-8")
"""What charts need, on a page and in a picture of their own."""

STYLE = CHARTS + (_FOLDER / "page.css").read_text(encoding="utf-8")
"""The style sheet of pages."""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
"""Nothing may be fetched and nothing may run, whatever a model's name contains."""


def page(title: str, body: str) -> str:
    """Return a page as HTML text.

    Args:
        title: Plain text.
        body: The page's sections, as HTML.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>"
        f'<a class="skip" href="#main">Skip to the results</a><main id="main">{body}</main></body></html>\n'
    )


def frame(title: str, html: str, *, height: int = 720) -> str:
    """Return what a notebook shows: a page in a frame of its own, so that styles stay apart.

    Args:
        title: Plain text.
        html: The page.
        height: Of the frame, in CSS pixels.
    """
    source = escape(html, quote=True)
    style = f"width:100%;height:{height}px;border:0"
    return f'<iframe title="{escape(title)}" style="{style}" srcdoc="{source}"></iframe>'


def html_table(
    caption: str,
    heads: Sequence[str],
    rows: Iterable[str],
    *,
    numbers: Sequence[int] = (),
    tall: bool = False,
    cards: bool = False,
) -> str:
    """Return a table in a box that also scrolls by keyboard.

    Args:
        caption: What it shows.
        heads: Names of its columns.
        rows: HTML.
        numbers: Indices of columns of figures.
        tall: Whether the box scrolls vertically, too.
        cards: Whether rows are cards on a narrow screen.
    """
    head = "".join(
        f'<th scope="col"{" class=n" if index in numbers else ""}>{escape(text)}</th>'
        for index, text in enumerate(heads)
    )
    body = "".join(_labelled(row, heads) if cards else row for row in rows)
    box = "scroll tall" if tall else "scroll"
    kind = "cards" if cards else "plain"
    return (
        f'<div class="{box}" tabindex="0" role="region" aria-label="{escape(caption)}">'
        f'<table class="{kind}">'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
        "</table></div>"
    )


def _labelled(row: str, heads: Sequence[str]) -> str:
    """Return a row whose cells carry the names of their columns, for screens where each row is a card."""
    names = iter(heads)
    return _CELLS.sub(lambda cell: f'{cell[0]} data-head="{escape(next(names, ""))}"', row)


_CELLS = re.compile("<t[hd](?=[ >])")


def foot(inputs_digest: str) -> str:
    """Return what an answer was made with, and the digest of its inputs, as the end of its page."""
    libraries = ", ".join(f"{name} {version}" for name, version in library_versions().items())
    return (
        f"<footer><p>fsdptool {escape(tool_version())}; {escape(libraries)}.<br>"
        f"{escape(inputs_digest)}</p></footer>"
    )


def section(title: str, body: str, *, raw: bool = False) -> str:
    """Return a section with its heading, or nothing where it would be empty; a raw title is HTML."""
    return f"<section><h2>{title if raw else escape(title)}</h2>{body}</section>" if body else ""


def cards(figures: Iterable[tuple[str, str, str]]) -> str:
    """Return figures as cards: name, value and a note each, as text."""
    items = "".join(
        f"<div{_size(value)}><dt>{escape(name)}</dt><dd>{breaking(value)}<small>{breaking(note)}</small></dd></div>"
        for name, value, note in figures
    )
    return f"<dl>{items}</dl>"


def _size(value: str) -> str:
    """Return the class of a card that keeps a long word of its value, such as a model's class, whole."""
    longest = max(map(len, value.split()), default=0)
    return "" if longest <= _PLAIN else " class=small" if longest <= _SMALL else ' class="small twice"'


_PLAIN, _SMALL = 13, 18
"""Characters of a word that fits into a card, and of one that fits in smaller letters."""


def notes(texts: Iterable[str]) -> str:
    """Return texts as a list; empty where there are none."""
    lines = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="notes">{lines}</ul>' if lines else ""


def finding_lines(diagnostics: Iterable[Diagnostic]) -> list[str]:
    """Return findings as items of a list."""
    lines = []
    for item in diagnostics:
        more = f"<br><small>{escape(item.help)}</small>" if item.help else ""
        lines.append(f"<li><b>{item.severity}</b> {escape(item.code)}: {escape(item.message)}{more}</li>")
    return lines


def findings(diagnostics: Iterable[Diagnostic]) -> str:
    """Return the section of findings, or nothing where there are none."""
    lines = "".join(finding_lines(diagnostics))
    return section("Findings", f'<ul class="notes">{lines}</ul>' if lines else "")


def breaking(text: str) -> str:
    """Return a name as HTML that may break after its dots, slashes and underscores.

    The name of a class breaks between its words only where no narrow screen has room for all of it.
    """
    return _BREAKS.sub("<wbr>", _LONG.sub(lambda name: _WORDS.sub("\u200b", name[0]), escape(text)))


_BREAKS = re.compile(r"(?<=[._/])(?![\s\d])|\u200b")
_LONG = re.compile(r"\w{25,}")
_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z][a-z])")


def verdict_page(readings: Sequence[Reading]) -> str:
    """Return the findings in files as a page, file by file."""
    lines = verdict_lines(readings)
    sections = [
        section(breaking(reading.path or "text"), _finding_table(reading), raw=True) for reading in readings
    ]
    body = f"<header><h1>{escape(lines[0])}</h1></header>" + "\n".join(sections)
    return page(lines[0], body)


def _finding_table(reading: Reading) -> str:
    rows = [
        f'<tr><td class="n">{item.line or ""}</td><th scope="row" class="{_CLASSES[item.severity]}">'
        f'{item.severity}</th><td class="word">{escape(item.code)}</td>'
        f'<td class="wide">{escape(item.message)}<br><small>{escape(item.help or "")}</small></td></tr>'
        for item in reading.diagnostics
    ]
    if not rows:
        return "<p>No findings.</p>"
    heads = ("line", "severity", "code", "finding")
    return html_table(f"Findings in {reading.path or 'text'}", heads, rows, numbers=(0,), cards=True)


_CLASSES = {"error": "does_not_fit", "warning": "unknown", "info": "soft"}
