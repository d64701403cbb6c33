"""What a complete checkpoint says of itself, and which checkpoints of a run can be trusted. Torch-free."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal

from fsdptool.errors import ConfigError
from fsdptool.files.safetensors_writer import Stored, Written, digest_file, read_header
from fsdptool.files.text import UnreadableError
from fsdptool.files.values import load_json, read_json
from fsdptool.records.codec import from_json, to_json
from fsdptool.runs.events import read_lines
from fsdptool.runs.folder import CHECKPOINTS, MAX_WORLD, METRICS, write_json

MANIFEST = "manifest.json"
FORMAT = "fsdptool-checkpoint-1"
SUPERSEDED = "superseded"
"""Folder beside the checkpoints for those of a course of training that was given up."""
FULL_NAME = "full.safetensors"
SHARDING_KEY = "DCP_SHARDING_INFO"
"""Where torch's reader looks for each chunk's place (2.13, checkpoint/_hf_utils.py)."""

_CHUNK_MARK = "#"
"""Between a tensor's name and the number of a further chunk of it: a safetensors file names each once."""

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


def shard_name(rank: int) -> str:
    """Return the file name of a rank's share."""
    return f"shard-{rank:05d}.safetensors"


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


def read_manifest(folder: Path, *, otherwise: str | None = None) -> Manifest:
    """Read and check the manifest alone.

    Args:
        folder: The checkpoint.
        otherwise: What to do where it is not complete; the error's help.

    Raises:
        ConfigError: It is missing, damaged, of another format or does not match its own digest.
    """
    path = folder / MANIFEST
    if not path.exists():
        why = "is not a folder" if folder.exists() else "does not exist"
        why = f"is not a complete checkpoint: it has no {MANIFEST}" if folder.is_dir() else why
        raise ConfigError(f"{folder} {why}", help=otherwise)
    try:
        raw = read_json(path)
    except UnreadableError as error:
        raise ConfigError(f"{path} is damaged: {error.message}") from error
    manifest = from_json(Manifest, raw, where=str(path))
    if manifest.format != FORMAT:
        raise ConfigError(f"{path} has format {manifest.format!r}; this version reads {FORMAT}")
    if manifest.own_sha256 != manifest.digest():
        raise ConfigError(f"{path} is damaged: it does not match its own digest")
    # The digest guards against accidents, not against people: anybody can compute it.
    if wrong := _implausible(folder, manifest):
        raise ConfigError(f"{path} is damaged: {wrong}")
    return manifest


def _implausible(folder: Path, manifest: Manifest) -> str | None:
    """Return what no writer of ours would have said, or None."""
    if manifest.step < 0 or step_of(folder) not in (None, manifest.step):
        return f"step {manifest.step} is not the folder's"
    if manifest.progress.get("step", manifest.step) != manifest.step:
        return f"step {manifest.step} is not the step of its progress"
    if not 1 <= manifest.world_size <= MAX_WORLD:
        return f"{manifest.world_size} ranks cannot have written it"
    names = set(manifest.files)
    full = {FULL_NAME} if manifest.kind == "full" else set()
    # Counted first: names are made for as many ranks as there are files.
    if len(names) != manifest.world_size + len(full):
        return f"it lists {len(names)} files for {manifest.world_size} ranks"
    if names != full | {shard_name(rank) for rank in range(manifest.world_size)}:
        return "it lists files that a checkpoint does not have"
    return None


def stored_name(name: str, number: int) -> str:
    """Return the name of chunk ``number`` of a tensor in one rank's file."""
    return name if number == 0 else f"{name}{_CHUNK_MARK}{number}"


def tensor_name(stored: str) -> str:
    """Return the name of the tensor that a chunk in a file belongs to."""
    name, mark, number = stored.rpartition(_CHUNK_MARK)
    return name if mark and number.isdigit() else stored


def check_contents(folder: Path, manifest: Manifest) -> str | None:
    """Return what is wrong with the files as a whole, or None: strangers among them, tensors not whole.

    Every tensor must be covered by its chunks exactly once. Reads the headers of all files, not their data.
    """
    try:
        listed = {MANIFEST, *manifest.files}
        if unlisted := sorted(path.name for path in folder.iterdir() if path.name not in listed):
            return f"{unlisted[0]} is not in its manifest"
        chunks: dict[str, list[_Chunk]] = {}
        for name in sorted(manifest.files):
            if not is_plain_file(folder / name):
                return f"{name} is not a regular file"
            tensors, metadata = read_header(folder / name)
            offsets = load_json(metadata.get(SHARDING_KEY, "{}"))
            for tensor, stored in tensors.items():
                chunk = _chunk(stored, offsets.get(tensor) if isinstance(offsets, dict) else None)
                chunks.setdefault(tensor_name(tensor), []).append(chunk)
    except (OSError, ValueError) as error:
        return f"it cannot be read: {getattr(error, 'strerror', None) or error}"
    gap = next((name for name, parts in chunks.items() if not _whole(parts)), None)
    return None if gap is None else f"{gap} is not covered exactly once"


@dataclass(frozen=True, slots=True)
class _Chunk:
    dtype: str
    start: tuple[int, ...]
    shape: tuple[int, ...]


def _chunk(stored: Stored, entry: Any) -> _Chunk:
    place = {"saved_offsets": [0] * len(stored.shape)} if entry is None else entry
    start = place.get("saved_offsets") if isinstance(place, dict) else None
    if not isinstance(start, list) or len(start) != len(stored.shape):
        raise ValueError("a chunk has no place in its tensor")
    if not all(type(n) is int and 0 <= n < 1 << 48 for n in start):
        raise ValueError("a chunk's offsets are not a place in its tensor")
    return _Chunk(stored.dtype, tuple(start), stored.shape)


def _whole(parts: list[_Chunk]) -> bool:
    """Say whether chunks of one tensor fill a box from its origin, without gap or overlap."""
    if len({(part.dtype, len(part.shape)) for part in parts}) != 1:
        return False
    solid = [part for part in parts if 0 not in part.shape]
    if not solid:
        return True
    if not solid[0].shape:
        return len(solid) == 1
    box = [max(part.start[d] + part.shape[d] for part in solid) for d in range(len(solid[0].shape))]
    if math.prod(box) != sum(math.prod(part.shape) for part in solid):
        return False
    by_rows = all(not any(part.start[1:]) and list(part.shape[1:]) == box[1:] for part in solid)
    if by_rows:
        ordered = sorted(solid, key=lambda part: part.start)
        return all(a.start[0] + a.shape[0] == b.start[0] for a, b in pairwise(ordered))
    return not any(_overlap(a, b) for a, b in combinations(solid, 2))


def _overlap(a: _Chunk, b: _Chunk) -> bool:
    pairs = zip(a.start, a.shape, b.start, b.shape, strict=True)
    return all(i < j + m and j < i + n for i, n, j, m in pairs)


def is_plain_file(path: Path) -> bool:
    """Say whether a path is a regular file itself: not a link, a pipe or a device."""
    try:
        return S_ISREG(path.lstat().st_mode)
    except OSError:
        return False


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
        if path.exists() and not is_plain_file(path):
            return f"{name} is not a regular file"
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


def newest_step(folder: Path) -> int | None:
    """Return the step of the newest checkpoint in ``folder`` with a valid manifest, or None."""
    for path in list_checkpoints(folder):
        with contextlib.suppress(ConfigError):
            return read_manifest(path).step
    return None


def lost_steps(folder: Path) -> int:
    """Return how many steps of a run are made again if it starts again: all of them without a checkpoint.

    Where there are only damaged ones, the start that reads them says so.
    """
    if list_checkpoints(folder / CHECKPOINTS):
        return 0
    return sum("step" in line for line in read_lines(folder / METRICS))


def newest_good(folder: Path) -> tuple[Path, Manifest] | None:
    """Return the newest checkpoint in ``folder`` that is complete and undamaged, or None."""
    for path in list_checkpoints(folder):
        try:
            manifest = read_manifest(path)
        except ConfigError:
            continue
        if check_checkpoint(path, manifest) is None:
            return path, manifest
    return None


def check_checkpoint(folder: Path, manifest: Manifest, *, deep: bool = True) -> str | None:
    """Return what is wrong with a checkpoint whose manifest was read, or None; ``deep`` reads everything."""
    wrong = (check_file(folder, name, entry, deep=deep) for name, entry in manifest.files.items())
    return next((text for text in wrong if text), None) or check_contents(folder, manifest)


def publish(aside: Path, final: Path) -> None:
    """Give a finished checkpoint its final name; replaces one of the same step (raises ``OSError``)."""
    # A name of nobody else's: beside an export lie a person's own files.
    doomed = final.with_name(f".{final.name}.{secrets.token_hex(4)}.old")
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
