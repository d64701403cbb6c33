"""How accelerate reads truth: the text of the YAML value, exported, and parsed again."""

from __future__ import annotations

from typing import Any

from fsdptool import spelling
from fsdptool.config.draft import Draft
from fsdptool.config.edits import block_list_to_scalar
from fsdptool.files.tree import Entry, to_python
from fsdptool.records.diagnostic import Edit

TRUE_WORDS = frozenset({"y", "yes", "t", "true", "on", "1"})
FALSE_WORDS = frozenset({"n", "no", "f", "false", "off", "0"})


def word_of_truth(value: Any) -> bool | None:
    """Return what accelerate's ``str_to_bool(str(value).lower())`` makes of a value; None: it raises."""
    word = str(value).lower()
    return True if word in TRUE_WORDS else False if word in FALSE_WORDS else None


def read_boolean(draft: Draft, key: str, name: str, entry: Entry) -> None:
    """Read a boolean that travels as text: ``y yes t true on 1`` and their opposites, any case."""
    value = to_python(entry.node)
    truth = word_of_truth(value)
    if truth is None:
        meant = spelling.boolean(value)
        draft.set(name, meant if meant is not None else False, entry=entry)
        draft.report_value("FSD206", f"{key} must be true or false, not {value!r}", entry, meant)
        return
    accept_truth(draft, key, name, entry, value, truth)


def accept_truth(draft: Draft, key: str, name: str, entry: Entry, value: Any, truth: bool) -> None:
    """Record what a value is read as; that it is no boolean itself is a note."""
    draft.set(name, truth, entry=entry)
    if not isinstance(value, bool):
        draft.report_value(
            "FSD207", f"{key} is {type(value).__name__} {value!r}, read as {str(truth).lower()}", entry, truth
        )


def replace_any(draft: Draft, entry: Entry, value: Any) -> tuple[Edit, ...] | None:
    """Replace a value that may be a block list by one scalar."""
    node = entry.node
    if node.kind == "list" and not node.flow and not node.alias:
        return block_list_to_scalar(draft.editor, entry, value)
    return draft.editor.replace(node, value)
