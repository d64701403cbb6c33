"""Writing settings out in a dialect; what a dialect cannot express is an error that names it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fsdptool.config.dialects import accelerate, load_registry
from fsdptool.config.dialects.accelerate.keys import FSDP_KEYS, PARALLELISM_KEYS
from fsdptool.config.dialects.protocol import Dialect, parse_source
from fsdptool.config.edits import NotEditableError, Rewriter
from fsdptool.config.reader import read_settings
from fsdptool.errors import ConfigError
from fsdptool.files.text import SourceText, UnreadableError, read_source
from fsdptool.files.tree import duplicates
from fsdptool.formatting import printable
from fsdptool.records.diagnostic import Edit
from fsdptool.records.sharding import FsdpSettings


def schema_comment(schema: str, folder: Path) -> str:
    """Return the line by which editors check a file in ``folder``; empty unless the schema lies there."""
    name = f"{schema}.schema.json"
    return f"# yaml-language-server: $schema={name}\n" if (folder / name).is_file() else ""


def write_settings(
    settings: FsdpSettings, dialect: str | Dialect = "accelerate", *, header: Sequence[str] = ()
) -> str:
    """Return the settings as a file of a dialect, every default that differs between programs written out.

    Args:
        settings: What to write.
        dialect: Name of a dialect (``accelerate``, ``trainer``, ...), or the dialect itself.
        header: Comment lines (without ``#``) to put first, where the dialect has comments.

    Raises:
        ConfigError: The dialect is unknown, or cannot express a setting; the message names it.
    """
    chosen = load_registry().get(dialect) if isinstance(dialect, str) else dialect
    return chosen.write(settings, tuple(map(printable, header)))


def emit_yaml(
    settings: FsdpSettings,
    *,
    layout: str = "native",
    reference: str | None = None,
    plan_digest: str | None = None,
    differences: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> str:
    """Return the accelerate YAML for a run.

    Args:
        settings: What to write; an open ``dp_shard`` next to other mesh sizes is resolved first.
        layout: The layout the settings were planned for (``native`` or ``accelerate``).
        reference: The model, as the person named it.
        plan_digest: Digest of the plan it came from.
        differences: What a plain accelerate script will do differently, one sentence each.
        notes: Further comment lines.
    """
    head = [
        "Written by fsdptool emit-config."
        if reference is None
        else f"Written by fsdptool emit-config for {reference}."
    ]
    head.append(f"fsdptool: layout={layout}" + (f" plan={plan_digest}" if plan_digest else ""))
    if settings.use_cpu:
        head.append("fsdptool: consumer=fsdptool")
        head.append("`fsdptool train` shards on CPU; accelerate 1.15 would run this unsharded.")
    elif settings.mesh.tp > 1:
        head.append("fsdptool: consumer=fsdptool")
        head.append("`fsdptool train` divides layers; which accelerate can: fsdptool rule FSD356.")
    if settings.num_machines > 1:
        head.append("fsdptool: ignore[FSD329]")
        head.append("The launch gives the address of machine 0 (--main_process_ip, --main_process_port).")
    head.extend(notes)
    if differences:
        head.append("")
        head.append("With this file, a plain accelerate script differs from the plan:")
        head.extend(f"- {line}" for line in differences)
    return write_settings(resolved(settings), header=head)


def resolved(settings: FsdpSettings) -> FsdpSettings:
    """Return the settings with an open ``dp_shard`` filled in where accelerate needs it written."""
    mesh = settings.mesh
    others = mesh.other_sizes
    if others == 1 or mesh.dp_shard is not None or settings.num_processes is None:
        return settings
    return replace(settings, mesh=mesh.resolve(settings.num_processes))


_OWNED = (*FSDP_KEYS, "fsdp_backward_prefetch_policy", "fsdp_limit_all_gathers")


@dataclass(frozen=True, slots=True)
class Merged:
    """A file before and after: ``after`` is not written yet."""

    before: SourceText
    after: str


def merge_into(path: str | Path | SourceText, settings: FsdpSettings) -> Merged:
    """Return the file with the settings merged in; comments, order and every other key stay.

    Raises:
        ConfigError: The file cannot be read, is not an accelerate file, or its form does not allow the edit.
    """
    try:
        source = path if isinstance(path, SourceText) else read_source(path)
    except UnreadableError as error:
        raise ConfigError(f"{path}: {error.message}", help="give an existing accelerate file") from error
    reading = read_settings(source, consumer="fsdptool")
    if reading.dialect != "accelerate":
        actual = reading.dialect or (reading.diagnostics[0].message if reading.diagnostics else "unknown")
        raise ConfigError(
            f"{source.path}: not an accelerate file ({actual})", help="merge into an accelerate YAML"
        )
    if reading.settings is not None and settings.wrap_policy == "transformer" and not settings.wrap_classes:
        # A preset knows no model; the classes somebody already wrote are worth keeping.
        settings = replace(settings, wrap_classes=reading.settings.wrap_classes)
    wanted = accelerate.mapping(settings)
    block = wanted.pop("fsdp_config")
    mesh = wanted.pop("parallelism_config", {})
    try:
        steps = Rewriter(source, partial(parse_source, dialect=load_registry().get("accelerate")))
        _single_keys(steps)
        for key, value in wanted.items():
            # The two are the person's own, and nothing a plan decides.
            if key not in ("rdzv_backend", "debug") or steps.root.get(key) is None:
                steps.put(None, key, value)
        _block(steps, "fsdp_config", block, _OWNED, "fsdp_")
        _block(steps, "parallelism_config", mesh, PARALLELISM_KEYS, "parallelism_config_")
        if settings.use_cpu or settings.mesh.tp > 1:
            _note_consumer(steps)
    except NotEditableError as error:
        raise ConfigError(
            f"{source.path}: {error} cannot be changed in the current form of the file",
            help="write a new file with emit-config -o",
        ) from error
    _verify(steps.source, settings)
    return Merged(source, steps.source.text)


def _verify(source: SourceText, settings: FsdpSettings) -> None:
    """Read the result again: it must mean exactly the settings, apart from what only the file knows."""
    reading = read_settings(source, consumer="fsdptool")
    got = reading.settings
    if got is None:
        raise ConfigError(f"{source.path}: merging did not produce a readable file")
    for name in FsdpSettings.__dataclass_fields__:
        kept = name in ("main_process_ip", "main_process_port", "gpu_ids", "rdzv_backend", "debug")
        if getattr(got, name) != getattr(settings, name) and not kept:
            raise ConfigError(
                f"{source.path}: the form of the file does not allow {name} to be merged",
                help="write a new file with emit-config -o",
            )


def _single_keys(steps: Rewriter) -> None:
    while True:
        blocks = [entry.node for entry in steps.root.entries if entry.node.kind == "map"]
        pairs = [(node, loser) for node in (steps.root, *blocks) for loser, _ in duplicates(node)]
        if not pairs:
            return
        steps.apply(steps.editor.remove(*pairs[0]), str(pairs[0][1].key))


def _block(steps: Rewriter, name: str, wanted: dict[str, Any], owned: Iterable[str], prefix: str) -> None:
    """Make a block hold exactly the wanted values among the owned keys; unknown keys stay."""
    if not wanted:
        steps.drop(None, name)
    elif steps.root.get(name) is None:
        steps.apply(steps.editor.add(steps.root, None, {name: wanted}), name)
    else:
        for full in owned:
            steps.drop(name, full.removeprefix(prefix), *(() if full in wanted else (full,)))
        for key, value in wanted.items():
            steps.put(name, key, value)


def _note_consumer(steps: Rewriter) -> None:
    """Say who reads a CPU file, as fresh ones do: accelerate runs FSDP on CPU unsharded (FSD314)."""
    source = steps.source
    if "fsdptool: consumer=" not in source.text and not (source.path or "").lower().endswith(".json"):
        start = Edit(0, 0, f"# fsdptool: consumer=fsdptool{source.newline}")
        steps.apply((start,), "the comment")
