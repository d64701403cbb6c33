"""One name for one thing: classes have names of their own, and the glossary names what exists."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
MODULES = sorted([*(ROOT / "fsdptool").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")])

SHARED = {
    "Objective": "a section of the recipe, and what the section chooses",
    "Trainer": "transformers' program, whose configuration a dialect reads, and our own",
}
"""Names that two classes have, and why. The table may only become shorter."""


def twice(sources: Mapping[str, str]) -> set[str]:
    """Return the public names of classes that several modules define."""
    names = Counter(
        node.name
        for source in sources.values()
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return {name for name, count in names.items() if count > 1}


def test_no_two_classes_have_one_name() -> None:
    sources = {str(path): path.read_text(encoding="utf-8") for path in MODULES}
    assert len(sources) > 200
    assert twice(sources) == set(SHARED)


def test_a_planted_second_class_is_found() -> None:
    assert twice({"a.py": "class Share: ...", "b.py": "class Share: ...\nclass _Own: ..."}) == {"Share"}


def test_the_glossary_names_classes_that_exist_in_order() -> None:
    text = (ROOT / "docs" / "reference" / "glossary.md").read_text(encoding="utf-8")
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    words = [row[0].casefold() for row in rows]
    assert len(words) > 40
    assert words == sorted(words)
    classes = {
        node.name
        for path in MODULES
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    }
    named = {name for row in rows for name in re.findall(r"`([A-Z]\w*[a-z]\w*)`", row[1])}
    assert len(named) > 25
    assert named <= classes
