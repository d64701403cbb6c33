"""The corpus of training files of other programs: read from a folder that an environment variable names.

``python tests/config/training_corpus.py [PROGRAM]`` prints the differences and a score per program.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fsdptool.config.described import describe_path
from fsdptool.errors import ConfigError
from fsdptool.records.codec import to_json

WORDS = frozenset(
    {"wrap_classes", "lora_targets", "quantisation", "base_dtype", "attention", "optimizer", "model"}
)
"""Facts that the index may hold as a sentence: compared only where it holds the word itself."""


def folder() -> Path | None:
    """Return the folder ``FSDPTOOL_TRAINING_CORPUS`` names, or None where there is none."""
    named = os.environ.get("FSDPTOOL_TRAINING_CORPUS")
    return Path(named) if named else None


def entries() -> list[dict[str, Any]]:
    """Return the lines of both indices that are about a file."""
    place = folder()
    if place is None:
        return []
    lines = [line for name in ("index_a.jsonl", "index_b.jsonl") for line in (place / name).open()]
    return [entry for entry in map(json.loads, lines) if entry["file"] is not None]


def differences(entry: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield each fact of an entry that the reading of its file differs in: its name, the index's, ours."""
    place = folder()
    assert place is not None
    try:
        run = describe_path(place / entry["file"])
    except ConfigError as error:
        if entry["facts"].get("not_readable") is None:
            yield "file", "readable", error.message
        return
    if run is None:
        yield "program", entry["program"], None
        return
    ours = to_json(run)
    unsure = " ".join(entry.get("unsure") or ())
    for name, wanted in entry["facts"].items():
        key = "family" if name == "model_family_size" else name
        if key not in ours or key in unsure or name in unsure:
            continue
        got = ours[key]
        if key == "mesh":
            for size, value in (wanted or {}).items():
                if got[size] != value and not (value is None and got[size] in (1, -1)):
                    yield f"mesh.{size}", value, got[size]
            continue
        wanted = wanted.get("value") if isinstance(wanted, dict) else wanted
        if _same(key, wanted, got):
            continue
        yield key, wanted, got


def _same(key: str, wanted: Any, got: Any) -> bool:
    if wanted == got:
        return True
    if key == "family" and wanted is None:
        return True  # sizes of local folders are left out of the index
    if key in ("gradient_checkpointing", "activation_offloading") and wanted is None:
        return True  # not settled
    sentence = isinstance(wanted, str) and (" " in wanted or "," in wanted)
    if key in WORDS and (sentence or wanted is None):
        return sentence or got in (None, [], "checkpoint")
    if key == "wrap_classes":
        return (wanted in ([], None) and got in ([], None)) or any(
            " " in item or "*" in item for item in wanted or ()
        )
    if key == "lora_targets" and isinstance(wanted, list):
        return any(" " in item for item in wanted)
    return key == "reshard" and wanted is None


def main(program: str | None = None) -> None:
    """Print the differences and the scores."""
    right: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for entry in entries():
        kind = entry["file"].partition("/")[0]
        if program not in (None, kind):
            continue
        files[kind] += 1
        found = list(differences(entry))
        right[kind] += not found
        for name, wanted, got in found:
            print(f"{entry['file']}: {name}: {wanted!r} in the index, {got!r} read")
    for kind, count in files.items():
        print(f"{kind}: {right[kind]} of {count} files as the index has them")


if __name__ == "__main__":
    main(*sys.argv[1:])
