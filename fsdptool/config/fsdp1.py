"""FSDP1 to FSDP2 within a dialect, by edits that keep the file's own form."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fsdptool.config.canonical import LEGACY, MESH, RESHARD_OF_STRATEGY, hybrid_mesh
from fsdptool.config.checks.meaning import wraps_nothing
from fsdptool.config.context import LintContext
from fsdptool.config.dialects import parse_source
from fsdptool.config.dialects.protocol import Dialect
from fsdptool.config.edits import Editor, apply_edits
from fsdptool.files.text import SourceText
from fsdptool.files.tree import Entry, Node, ParseError
from fsdptool.records.diagnostic import Edit


@dataclass(frozen=True, slots=True)
class Migration:
    """What migrating a file takes: edits and the settings they change, or why it is refused."""

    edits: tuple[Edit, ...] | None
    changes: Mapping[str, Any] = field(default_factory=dict)
    refusal: str | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """What the FSDP2 form of a file must say.

    Attributes:
        reshard: ``reshard_after_forward``.
        state_dict: ``sharded`` or ``full``: what FSDP1 did.
        mesh: ``dp_replicate`` and ``dp_shard`` of hybrid sharding, or empty.
    """

    reshard: bool
    state_dict: str
    mesh: Mapping[str, int]


def migration(lint: LintContext) -> Migration:
    """Return how an FSDP1 file becomes FSDP2, in its own dialect."""
    refusal = _refusal(lint)
    if refusal is not None:
        return Migration(None, refusal=refusal)
    strategy = lint.get("sharding_strategy") or "full_shard"
    mesh = {}
    if strategy.startswith("hybrid"):
        mesh = hybrid_mesh(lint.get("num_processes"), lint.get("num_machines"))
    target = Target(RESHARD_OF_STRATEGY[strategy], lint.get("state_dict_type") or "full", mesh)
    if not lint.dialect.in_place:
        return Migration(None, refusal=f"rewrite the file: fsdptool migrate --to {lint.dialect.name} FILE")
    try:
        steps = Rewriter(lint.source, lint.dialect)
        further = lint.dialect.migrate(steps, lint, target)
    except NotEditableError as error:
        return Migration(None, refusal=f"the form of the file does not allow it: {error}")
    changes: dict[str, Any] = {"fsdp_version": 2, "reshard_after_forward": target.reshard, **mesh, **further}
    changes.update(dict.fromkeys(LEGACY))
    if mesh:
        changes |= {name: 1 for name in MESH if name not in mesh}
    return Migration(edits_between(lint.source.text, steps.source.text), changes)


def _refusal(lint: LintContext) -> str | None:
    strategy = lint.get("sharding_strategy")
    if strategy == "no_shard":
        return "NO_SHARD is plain data parallelism: use distributed_type MULTI_GPU (DDP) instead of FSDP"
    if lint.get("state_dict_type") == "local":
        return "LOCAL_STATE_DICT is not supported by FSDP2: use SHARDED_STATE_DICT"
    if lint.migration_refusal:
        return lint.migration_refusal
    if lint.get("activation_checkpointing") and wraps_nothing(lint) and lint.consumer.name != "fsdptool":
        return "activation checkpointing crashes under FSDP2 where nothing is wrapped: wrap the blocks first"
    if lint.has("FSD336", severity="error"):
        return "decide which strategy you want: the one in the file has never run (FULL_SHARD has)"
    if strategy is not None and strategy.startswith("hybrid"):
        machines, processes = lint.get("num_machines"), lint.get("num_processes")
        if "dp_replicate" in lint.dialect.cannot:
            return (
                f"hybrid sharding is a mesh under FSDP2, which {lint.dialect.name} files cannot express: "
                "fsdptool migrate --to accelerate"
            )
        if isinstance(machines, int) and machines > 1 and not hybrid_mesh(processes, machines):
            return "hybrid sharding requires num_processes, a multiple of num_machines, for its mesh"
    return None


class NotEditableError(Exception):
    """The text's form does not allow an edit."""


class Rewriter:
    """A text that is edited one step at a time and parsed again after each."""

    def __init__(self, source: SourceText, dialect: Dialect) -> None:
        self.source = source
        self.dialect = dialect
        self._parse()

    def _parse(self) -> None:
        try:
            self.document = parse_source(self.source, self.dialect)
        except ParseError as error:
            raise NotEditableError(error.message) from error
        self.editor = Editor(self.source, self.document)

    @property
    def root(self) -> Node:
        """The root mapping of the text as it is now."""
        root = self.document.root
        if root is None or root.kind != "map":
            raise NotEditableError("nothing is left")
        return root

    def block(self, name: str | None) -> tuple[Node, Entry | None]:
        """Return a block (or the root for None) and the entry that holds it."""
        if name is None:
            return self.root, None
        entry = self.root.get(name)
        if entry is None:
            raise NotEditableError(f"there is no {name}")
        return entry.node, entry

    def apply(self, edits: tuple[Edit, ...] | None, what: str) -> None:
        """Apply edits and parse again.

        Raises:
            NotEditableError: There are none to apply, or the result does not parse.
        """
        if edits is None:
            raise NotEditableError(what)
        self.source = self.source.with_text(apply_edits(self.source.text, list(edits)))
        self._parse()

    def put(self, name: str | None, key: str, value: Any, *, synonyms: tuple[str, ...] = ()) -> None:
        """Give ``key`` a value, renaming one of its synonyms or adding it when it is missing."""
        parent, holder = self.block(name)
        for spelled in (key, *synonyms):
            entry = parent.get(spelled) if parent.kind == "map" else None
            if entry is None:
                continue
            if entry.node.value != value or type(entry.node.value) is not type(value):
                self.apply(self.editor.replace(entry.node, value), key)
            if spelled != key:
                parent, _ = self.block(name)
                entry = parent.get(spelled)
                if entry is None:
                    raise NotEditableError(f"{spelled} is not the same key after an edit")
                self.apply(self.editor.rename(entry, key), key)
            return
        self.apply(self.editor.add(parent, holder, {key: value}), key)

    def drop(self, name: str | None, *keys: str) -> None:
        """Remove keys that exist."""
        for key in keys:
            while True:
                parent, _ = self.block(name)
                entry = parent.get(key) if parent.kind == "map" else None
                if entry is None:
                    break
                self.apply(self.editor.remove(parent, entry), key)

    def rename(self, name: str | None, key: str, new: str) -> None:
        """Rename a key that exists, unless the new one exists already."""
        parent, _ = self.block(name)
        entry = parent.get(key) if parent.kind == "map" else None
        if entry is not None and parent.get(new) is None:
            self.apply(self.editor.rename(entry, new), key)


def edits_between(before: str, after: str) -> tuple[Edit, ...]:
    """Return the edits, whole lines each, that turn one text into another."""
    old, new = before.splitlines(keepends=True), after.splitlines(keepends=True)
    starts = [0]
    for line in old:
        starts.append(starts[-1] + len(line))
    edits = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, first, last, new_first, new_last in matcher.get_opcodes():
        if tag != "equal":
            edits.append(Edit(starts[first], starts[last], "".join(new[new_first:new_last])))
    return tuple(edits)
