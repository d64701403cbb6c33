"""Checks what the model's class says about its blocks against the live model. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence

from fsdptool.inspection.census import Census
from fsdptool.records.anatomy import NoSplitEntry, WrapChoice


def judge_no_split(names: Sequence[str], census: Census, choice: WrapChoice) -> tuple[NoSplitEntry, ...]:
    """Judge every entry of ``_no_split_modules``: right, unsuitable or absent."""
    return tuple(_judge(name, census, choice) for name in names)


def _judge(name: str, census: Census, choice: WrapChoice) -> NoSplitEntry:
    paths = census.by_class.get(name)
    if not paths:
        return NoSplitEntry(
            name, "absent", "no module of this class in the model: accelerate 1.15 stops at it"
        )
    if name in choice.classes:
        return NoSplitEntry(name, "right", f"{len(paths)} instances, chosen")
    embeddings = [path for path in paths if holds_embedding(census, path)]
    if embeddings:
        return NoSplitEntry(name, "unsuitable", f"holds an embedding ({embeddings[0]})")
    for candidate in choice.candidates:
        if candidate.name == name:
            return NoSplitEntry(name, "unsuitable", candidate.reason)
    if not any(census.size(path) for path in paths):
        return NoSplitEntry(name, "unsuitable", "has no parameters")
    return NoSplitEntry(name, "unsuitable", "a leaf: it has no inner modules with parameters")


def holds_embedding(census: Census, path: str) -> bool:
    """Whether an ``nn.Embedding`` lies below ``path`` or is the module itself."""
    if census.modules[path].embedding:
        return True
    return any(holds_embedding(census, child) for child in census.children[path])
