"""What a complete checkpoint says of itself, and which checkpoints of a run can be trusted. Torch-free."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fsdptool.errors import ConfigError
from fsdptool.files.safetensors_writer import Written, digest_file
from fsdptool.records.codec import from_json, to_json
from fsdptool.runs.folder import write_json

MANIFEST = "manifest.json"
FORMAT = "fsdptool-checkpoint-1"
SUPERSEDED = "superseded"
"""Folder beside the checkpoints for those of a course of training that was given up."""
_NAME = re.compile(r"step-(\d{8})")

Kind = Literal["sharded", "full"]


@dataclass(frozen=True, slots=True)
class Manifest:
    """``manifest.json``, written last: a folder that has a valid one is complete.

    Attributes:
        format: :data:`FORMAT`.
        kind: ``sharded`` (one file per rank) or ``full`` (one file, gathered).
        step: Optimizer steps done.
        world_size: Ranks that wrote it.
        mesh: Mesh sizes it was written under.
        progress: Plain data of the engine, equal on all ranks.
        files: File name to size and SHA-256.
        own_sha256: Digest of everything above, so that the manifest itself cannot rot unseen.
    """

    format: str
    kind: Kind
    step: int
    world_size: int
    mesh: Mapping[str, int]
    progress: Mapping[str, Any]
    files: Mapping[str, Written]
    own_sha256: str = ""

    def digest(self) -> str:
        """Return the SHA-256 of the canonical JSON of all fields but ``own_sha256``."""
        data = to_json(replace(self, own_sha256=""))
        text = json.dumps(data, sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def folder_name(step: int) -> str:
    """Return the folder name of the checkpoint after ``step`` steps."""
    return f"step-{step:08d}"


def aside_name(step: int) -> str:
    """Return the name a checkpoint has while it is being written."""
    return f".{folder_name(step)}.part"


def step_of(path: Path) -> int | None:
    """Return the step a checkpoint folder is named after, or None for anything else."""
    match = _NAME.fullmatch(path.name)
    return int(match[1]) if match else None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and flush the folder (raises ``OSError``)."""
    write_json(folder / MANIFEST, to_json(replace(manifest, own_sha256=manifest.digest())))
    sync_folder(folder)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest alone.

    Raises:
        ConfigError: It is missing, damaged, of another format or does not match its own digest.
    """
    path = folder / MANIFEST
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{folder} is not a complete checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is damaged: {error}") from error
    manifest = from_json(Manifest, raw, where=str(path))
    if manifest.format != FORMAT:
        raise ConfigError(f"{path} has format {manifest.format!r}; this version reads {FORMAT}")
    if manifest.own_sha256 != manifest.digest():
        raise ConfigError(f"{path} is damaged: it does not match its own digest")
    return manifest


def check_file(folder: Path, name: str, expected: Written, *, deep: bool = True) -> str | None:
    """Return the damage of one checkpoint file, or None.

    Args:
        folder: The checkpoint.
        name: File in it.
        expected: What the manifest says.
        deep: Read the whole file and compare digests, not only sizes.
    """
    path = folder / name
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            return f"{name} has {size} bytes instead of {expected.bytes}"
        if deep and digest_file(path).sha256 != expected.sha256:
            return f"{name} does not match its digest"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error.strerror or error}"
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoint folders in ``folder``, newest first, complete or not (never the ones aside)."""
    if not folder.is_dir():
        return []
    folders = [path for path in folder.iterdir() if path.is_dir() and step_of(path) is not None]
    return sorted(folders, key=lambda path: path.name, reverse=True)


def newest_good(folder: Path, *, deep: bool = True) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint in ``folder`` that is complete and undamaged, or None."""
    for path in list_checkpoints(folder):
        try:
            manifest = read_manifest(path)
        except ConfigError:
            continue
        if all(check_file(path, name, entry, deep=deep) is None for name, entry in manifest.files.items()):
            return path, manifest
    return None


def publish(aside: Path, final: Path) -> None:
    """Give a finished checkpoint its final name; replaces one of the same step (raises ``OSError``)."""
    doomed = final.with_name(f".{final.name}.old")
    shutil.rmtree(doomed, ignore_errors=True)
    if final.exists():
        final.replace(doomed)
    aside.replace(final)
    sync_folder(final.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def prune(folder: Path, *, keep_last: int, keep_every: int | None) -> list[Path]:
    """Remove the checkpoints that the recipe does not keep; return the removed ones.

    Only complete checkpoints count towards ``keep_last``; those that were found damaged are moved out of
    the way by :func:`supersede`. The newest complete checkpoint always stays.
    """
    complete = [path for path in list_checkpoints(folder) if (path / MANIFEST).exists()]
    removed = []
    for path in complete[max(keep_last, 1) :]:
        step = step_of(path)
        if keep_every and step is not None and step % keep_every == 0:
            continue
        # Renamed first: a folder that is half removed must not look like a checkpoint.
        doomed = path.with_name(f".{path.name}.old")
        try:
            path.replace(doomed)
        except OSError:
            continue
        shutil.rmtree(doomed, ignore_errors=True)
        removed.append(path)
    return removed


def supersede(folder: Path, step: int) -> list[Path]:
    """Move checkpoints after ``step`` aside; return their new paths.

    The run goes on from ``step``: what lies after it is damaged or belongs to a course that was given up.
    Left in place, ``auto`` would return to it, and :func:`prune` would count it as newer than what is
    being written.
    """
    moved = []
    for path in list_checkpoints(folder):
        number = step_of(path)
        if number is None or number <= step:
            continue
        target = folder / SUPERSEDED / path.name
        try:
            target.parent.mkdir(exist_ok=True)
            shutil.rmtree(target, ignore_errors=True)
            path.replace(target)
        except OSError:
            continue
        moved.append(target)
    return moved


def sweep(folder: Path) -> None:
    """Remove the partial folders of interrupted saves."""
    if folder.is_dir():
        for path in folder.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries to the disk, so that a rename survives a power cut.

    File systems without support for it (some in user space, some network ones) answer ``EINVAL``.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
