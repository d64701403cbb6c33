"""The verdicts on the corpus, held against a second reading of every file made without the tool.

``corpus_review.jsonl`` says of each file, in words of its own, what a reader found who looked at the file
and at the programs that read it, and at neither the rules nor the verdicts. ``review`` says how that was
established: ``consumer`` (the program was run on the file: accelerate's loader, launcher and plugin with
every key changed in turn, transformers' argument processing, axolotl's validation), or ``read`` (the file
and the program's source were read). Where the two readings differed, the program decided. Every finding
must be in the review, and everything in the review must be found.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import corpus

from fsdptool.records.diagnostic import Diagnostic

REVIEW: dict[str, dict[str, Any]] = {
    item["file"]: item
    for item in map(
        json.loads, Path(__file__).with_name("corpus_review.jsonl").read_text(encoding="utf-8").splitlines()
    )
}
# What the review's words stand for. Those of the second table are followed by a key.
ABOUT_THE_FILE = {
    "FSDP never starts": {"FSD330"},
    "FSDP1 runs": {"FSD301"},
    "address missing": {"FSD329"},
    "another program": {"FSD110"},
    "checkpointed twice": {"FSD317"},
    "context parallelism without FSDP2": {"FSD305"},
    "legacy fsdp": {"FSD339"},
    "no block named": {"FSD335"},
    "not parsable": {"FSD104"},
    "nothing wrapped: loading": {"FSD319"},
    "nothing wrapped: no policy": {"FSD315"},
    "old prefix": {"FSD204"},
    "one level too deep": {"FSD355"},
    "one process": {"FSD327"},
    "process count missing": {"FSD326"},
    "tensor parallelism does not start": {"FSD356"},
    "version missing": {"FSD338"},
}
ABOUT_A_KEY = {
    "unread": {"FSD202", "FSD211", "FSD216", "FSD302", "FSD325", "FSD353"},
    "lost": {"FSD202", "FSD210", "FSD211", "FSD216", "FSD303", "FSD334", "FSD353"},
    "refused": {"FSD201", "FSD206", "FSD208", "FSD210", "FSD211", "FSD213", "FSD214"},
    "twice": {"FSD108", "FSD215"},
    "prefix": {"FSD204"},
}


def covers(words: str, code: str, key: str | None = None) -> bool:
    """Whether the review's words are about a finding (and about its key, where one is given)."""
    if words in ABOUT_THE_FILE:
        return code in ABOUT_THE_FILE[words]
    head, _, named = words.partition(" ")
    return code in ABOUT_A_KEY[head] and key in (None, named)


def unmatched(
    says: Iterable[str], found: list[tuple[str, str | None]], notes: Iterable[tuple[str, str | None]] = ()
) -> list[Any]:
    """Return the findings that no words are about, and the words that neither they nor notes are about."""
    words, said = list(says), [*found, *notes]
    alone: list[Any] = [item for item in found if not any(covers(word, *item) for word in words)]
    return alone + [word for word in words if not any(covers(word, *item) for item in said)]


def test_each_verdict_agrees_with_the_review() -> None:
    for name, row in corpus.expected().items():
        review = REVIEW[name]
        assert (row["sha256"], row["status"]) == (review["sha256"], review["status"]), name
        found, notes = (
            [(item.partition(":")[2], None) for item in listed]
            for listed in (row["errors"] + row["warnings"], row["notes"])
        )
        assert not unmatched(review["says"], found, notes), name


def test_every_file_was_reviewed_and_those_with_a_runnable_consumer_were_run() -> None:
    assert REVIEW.keys() == corpus.expected().keys()
    assert {item["review"] for item in REVIEW.values()} == {"consumer", "read"}
    for name, row in corpus.expected().items():
        if row["dialect"] in ("accelerate", "trainer", "axolotl"):
            assert REVIEW[name]["review"] == "consumer", name


if corpus.folder() is not None:

    def test_the_tool_finds_what_the_review_says_at_the_same_keys() -> None:
        for path in corpus.files():
            reading = corpus.reading(path)
            text = path.read_text(encoding="utf-8")
            found, notes = (
                [(item.code, key) for item in reading.diagnostics if kind(item) for key in _keys(text, item)]
                for kind in (lambda item: item.severity != "info", lambda item: item.severity == "info")
            )
            assert not unmatched(REVIEW[path.name]["says"], found, notes), path.name

    def _keys(text: str, item: Diagnostic) -> list[str]:
        """Return the keys that a finding is about: those it lists, or the last one up to its place."""
        if not item.line or not item.column:
            return [""]
        if item.code in ("FSD204", "FSD302") and " keys " in item.message:
            return item.message.partition(": ")[2].split(", ")
        lines = text.splitlines(keepends=True)
        place = sum(map(len, lines[: item.line - 1])) + item.column
        keys = [found for found in re.finditer(r"([A-Za-z_]\w*)\"?[ ]*:", text) if found.start() <= place]
        return [keys[-1].group(1) if keys else ""]
