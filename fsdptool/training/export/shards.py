"""Writes a state dict as Hugging Face libraries expect it: files up to a size, and an index."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdptool.files.safetensors_writer import Entry, write_stream
from fsdptool.runs.folder import write_json

SHARD_BYTES = 5 * 10**9
"""transformers' and diffusers' own default is near this (5 GB and 10 GB in 5.23 and 0.42)."""


def write_shards(folder: Path, stem: str, entries: Sequence[Entry], *, limit: int = SHARD_BYTES) -> list[str]:
    """Write ``entries`` as ``stem.safetensors``, or as numbered files and ``stem.safetensors.index.json``.

    Args:
        folder: Existing folder.
        stem: ``model`` or ``diffusion_pytorch_model``.
        entries: What to write; each value is asked for once, in order.
        limit: Bytes a file may have (a single larger tensor has a file of its own).

    Returns:
        The names of the files.

    Raises:
        OSError: The folder cannot be written.
    """
    groups = _split(entries, limit)
    names = [
        f"{stem}.safetensors" if len(groups) == 1 else f"{stem}-{i + 1:05d}-of-{len(groups):05d}.safetensors"
        for i in range(len(groups))
    ]
    for name, group in zip(names, groups, strict=True):
        write_stream(folder / name, group, {"format": "pt"})
    if len(groups) > 1:
        where = {entry.name: name for name, group in zip(names, groups, strict=True) for entry in group}
        total = sum(entry.bytes for entry in entries)
        write_json(
            folder / f"{stem}.safetensors.index.json",
            {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))},
        )
    return names


def _split(entries: Sequence[Entry], limit: int) -> list[list[Entry]]:
    groups: list[list[Entry]] = [[]]
    size = 0
    for entry in entries:
        if groups[-1] and size + entry.bytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(entry)
        size += entry.bytes
    return groups
