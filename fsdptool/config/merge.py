"""Merging settings into somebody's accelerate file: only FSDP, precision, process and mesh keys change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fsdptool.config.dialects import accelerate
from fsdptool.config.edits import Editor, apply_edits
from fsdptool.config.json_tree import parse_json
from fsdptool.config.read import read_settings
from fsdptool.config.text import SourceText, UnreadableError, read_source
from fsdptool.config.tree import Entry, Node, ParseError, duplicates, to_python
from fsdptool.config.yaml_tree import parse_yaml
from fsdptool.errors import ConfigError
from fsdptool.records.diagnostic import Edit
from fsdptool.records.settings import FsdpSettings

_LEGACY = (
    "fsdp_sharding_strategy",
    "fsdp_backward_prefetch",
    "fsdp_backward_prefetch_policy",
    "fsdp_forward_prefetch",
    "fsdp_use_orig_params",
    "fsdp_sync_module_states",
    "fsdp_limit_all_gathers",
)
_OWNED = (*accelerate.FSDP_KEYS, *_LEGACY)


@dataclass(frozen=True, slots=True)
class Merged:
    """A file before and after: ``after`` is not written yet."""

    before: SourceText
    after: str


def merge_into(path: str | Path | SourceText, settings: FsdpSettings) -> Merged:
    """Return the file with the settings merged in; comments, order and every other key stay.

    Raises:
        ConfigError: The file cannot be read, is no accelerate file, or its form does not allow the edit.
    """
    try:
        source = path if isinstance(path, SourceText) else read_source(path)
    except UnreadableError as error:
        raise ConfigError(f"{path}: {error.message}", help="give an existing accelerate file") from error
    reading = read_settings(source, consumer="fsdptool")
    if reading.dialect != "accelerate":
        found = reading.dialect or (reading.diagnostics[0].message if reading.diagnostics else "unknown")
        raise ConfigError(
            f"{source.path}: not an accelerate file ({found})", help="merge into an accelerate YAML"
        )
    if reading.settings is not None and settings.wrap_policy == "transformer" and not settings.wrap_classes:
        # A preset knows no model; the classes somebody already wrote are worth keeping.
        settings = replace(settings, wrap_classes=reading.settings.wrap_classes)
    merging = _Merging(source)
    wanted = accelerate.mapping(settings)
    block = wanted.pop("fsdp_config")
    mesh = wanted.pop("parallelism_config", {})
    for key in ("rdzv_backend", "debug"):  # the person's own, and nothing a plan decides
        if merging.has(key):
            wanted.pop(key)
    for key, value in wanted.items():
        merging.put((), key, value)
    merging.block("fsdp_config", block, _OWNED, prefix="fsdp_")
    merging.block(
        "parallelism_config", mesh, tuple(accelerate.PARALLELISM_KEYS), prefix="parallelism_config_"
    )
    if settings.use_cpu:
        merging.note_consumer()
    _verify(merging, settings)
    return Merged(source, merging.source.text)


def _verify(merging: _Merging, settings: FsdpSettings) -> None:
    """Read the result again: it must mean exactly the settings, apart from what only the file knows."""
    reading = read_settings(merging.source, consumer="fsdptool")
    got = reading.settings
    if got is None:
        raise ConfigError(f"{merging.source.path}: merging did not produce a readable file")
    for name in FsdpSettings.__dataclass_fields__:
        kept = name in ("main_process_ip", "main_process_port", "gpu_ids", "rdzv_backend", "debug")
        if getattr(got, name) != getattr(settings, name) and not kept:
            raise ConfigError(
                f"{merging.source.path}: its form does not allow {name} to be merged",
                help="write a new file with emit-config -o",
            )


class _Merging:
    """One text, edited one key at a time and parsed again after each."""

    def __init__(self, source: SourceText) -> None:
        self.source = source
        self._parse()
        self._single_keys()

    def _parse(self) -> None:
        try:
            is_json = (self.source.path or "").lower().endswith(".json")
            self.document = parse_json(self.source.text) if is_json else parse_yaml(self.source.text)
        except ParseError as error:
            raise ConfigError(f"{self.source.path}: {error.message}") from error
        self.editor = Editor(self.source, self.document)

    def _single_keys(self) -> None:
        while True:
            root = self.root
            blocks = [entry.node for entry in root.entries if entry.node.kind == "map"]
            pairs = [(node, loser) for node in (root, *blocks) for loser, _ in duplicates(node)]
            if not pairs:
                return
            self._apply(self.editor.remove(*pairs[0]), str(pairs[0][1].key))

    @property
    def root(self) -> Node:
        root = self.document.root
        assert root is not None
        return root

    def has(self, key: str) -> bool:
        return self.root.get(key) is not None

    def _apply(self, edits: tuple[Edit, ...] | None, what: str) -> None:
        if edits is None:
            raise ConfigError(
                f"{self.source.path}: {what} cannot be changed in the form the file is written in",
                help="write a new file with emit-config -o",
            )
        self.source = self.source.with_text(apply_edits(self.source.text, list(edits)))
        self._parse()

    def note_consumer(self) -> None:
        """Say who reads a CPU file, as fresh ones do: accelerate runs FSDP on CPU unsharded (FSD314)."""
        text = self.source.text
        if "fsdptool: consumer=" in text or (self.source.path or "").lower().endswith(".json"):
            return
        newline = "\r\n" if "\r\n" in text else "\n"
        self.source = self.source.with_text(f"# fsdptool: consumer=fsdptool{newline}{text}")
        self._parse()

    def put(self, where: tuple[str, ...], key: str, value: Any) -> None:
        """Give a key a value, in the root or in a block, adding it when it is missing."""
        parent, holder = self._find(where)
        entry = parent.get(key) if parent is not None and parent.kind == "map" else None
        if entry is not None:
            if to_python(entry.node) == value and type(to_python(entry.node)) is type(value):
                return
            self._apply(self.editor.replace(entry.node, value), key)
        else:
            self._apply(self.editor.add(parent, holder, {key: value}), key)

    def _find(self, where: tuple[str, ...]) -> tuple[Node | None, Entry | None]:
        if not where:
            return self.root, None
        entry = self.root.get(where[0])
        return (entry.node, entry) if entry is not None else (None, None)

    def block(self, name: str, wanted: dict[str, Any], owned: tuple[str, ...], *, prefix: str) -> None:
        """Make a block hold exactly the wanted values among the owned keys; unknown keys stay."""
        if not wanted:
            entry = self.root.get(name)
            if entry is not None:
                self._apply(self.editor.remove(self.root, entry), name)
            return
        if not self.has(name):
            self._apply(self.editor.add(self.root, None, {name: wanted}), name)
            return
        for full in owned:
            bare = full.removeprefix(prefix)
            for spelled in (full, bare):
                parent, _ = self._find((name,))
                entry = parent.get(spelled) if parent is not None and parent.kind == "map" else None
                if entry is not None and parent is not None and (spelled == bare or full not in wanted):
                    self._apply(self.editor.remove(parent, entry), spelled)
        for key, value in wanted.items():
            self.put((name,), key, value)
