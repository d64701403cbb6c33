"""Results that grow row by row, and the pages that show them."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def write_document(path: Path, document: dict[str, Any]) -> None:
    """Replace a result file at once: a stop in the middle leaves the one before."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def write_between(page: Path, begin: str, end: str, table: str) -> None:
    """Replace what a page has between two marks."""
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(begin)
    after = rest.partition(end)[2]
    page.write_text(before + begin + "\n" + table + end + after, encoding="utf-8")


def read_document(path: Path) -> dict[str, Any]:
    """Return the document that was written, or one without rows."""
    document: dict[str, Any] = {"rows": {}}
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else document


def row_options(text: str | None) -> argparse.Namespace:
    """Return which rows are wanted (``only``), and whether they are predicted again (``again``)."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", default="", help="text the row's name must contain")
    parser.add_argument("--again", action="store_true", help="predict every row again")
    return parser.parse_args()
