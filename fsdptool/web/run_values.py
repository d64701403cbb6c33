"""What the page of a run shows, read from its folder: at the first load and while it lasts."""

from __future__ import annotations

import contextlib
import re
import struct
import threading
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from fsdptool.api.run_lists import view_run
from fsdptool.errors import ConfigError, FsdptoolError
from fsdptool.files.text import UnreadableError, is_folder, read_ends
from fsdptool.formatting import printable_lines
from fsdptool.launch.machine import registry_folders
from fsdptool.launch.queue.entries import Queue
from fsdptool.launch.queue.file import read_log_lines
from fsdptool.records.diagnosis import FailureDiagnosis
from fsdptool.records.run import RunView
from fsdptool.report.console.runs import divergence_lines
from fsdptool.report.console.train import memory_text
from fsdptool.report.page.run import run_parts
from fsdptool.runs.diagnose import checkpoint_note, diagnose
from fsdptool.runs.folder import CHECKPOINTS, EVENTS, EXPORT, LOCK, METRICS, RUN, SUMMARY, read_start
from fsdptool.runs.manifest import is_plain_file, list_checkpoints, read_manifest
from fsdptool.runs.view import History, StepReader, lock_holder, read_history, read_rank_memory, read_view
from fsdptool.web.roots import Roots

SAMPLES = "samples"
"""Folder of a run folder with what the model wrote or drew during the run."""

SAMPLE_NAME = re.compile(r"\d{1,6}\.(?:txt|png)")
SAMPLE_STEP = re.compile(r"step-\d{8}")

_SAMPLE_STEPS = 6
"""Steps whose samples are shown, the latest first."""

_SAMPLE_BYTES = 4000
"""Bytes of a text that are shown."""

_LOG_LINES = 40
"""Lines of the command's output that are shown."""

_RANKS = 64
"""Ranks whose memory has columns of its own."""

_ENDED_BADLY = ("failed", "dead", "interrupted")


class _Steps:
    """A reader of steps that several requests share."""

    def __init__(self, folder: Path) -> None:
        self._reader = StepReader(folder)
        self._lock = threading.Lock()

    def history(self, folder: Path) -> History:
        with self._lock:
            self._reader.read()
            return read_history(folder, self._reader)


@lru_cache(maxsize=32)
def _steps(folder: Path) -> _Steps:
    return _Steps(folder)


def read_run(roots: Roots, folder: Path) -> tuple[RunView, History]:
    """Return a run as it stands, and its course; only new steps are read.

    Raises:
        ConfigError: The folder is not a run folder.
    """
    with roots.confine(*registry_folders()):
        return view_run(folder), _steps(folder).history(folder)


def signature(folder: Path) -> tuple[object, ...]:
    """Return what changes whenever something in a run folder does that the page shows."""
    paths = [folder / name for name in (RUN, SUMMARY, METRICS, CHECKPOINTS, SAMPLES, EXPORT)]
    paths += sorted((folder / EVENTS).glob("rank-*"))
    seen: list[object] = [lock_holder(folder / LOCK)]
    for path in paths:
        with contextlib.suppress(OSError):
            stat = path.stat()
            seen.append((path.name, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(seen)


_known: dict[Path, tuple[tuple[object, ...], RunView]] = {}
"""Views of runs that have ended, each with the signature of its folder."""


def read_known_view(folder: Path, *, gpus: Sequence[str] = (), now: float | None = None) -> RunView:
    """Return a run as it stands; one that has ended is read again only after a change in its folder.

    Arguments and errors are those of :func:`fsdptool.runs.view.read_view`.
    """
    signed = signature(folder)
    kept = _known.get(folder)
    if kept is not None and kept[0] == signed:
        return kept[1]
    view = read_view(folder, gpus=gpus, now=now)
    if view.state != "running":
        _known[folder] = (signed, view)
    return view


def points(history: History, view: RunView) -> dict[str, Any]:
    """Return the curves of a run as columns, for a script that draws them."""
    shown = history.points
    return {
        "step": [point.step for point in shown],
        "loss": [point.loss for point in shown],
        "lowest": [point.lowest for point in shown],
        "highest": [point.highest for point in shown],
        "rate": [point.rate for point in shown],
        "memory": [point.memory_bytes for point in shown],
        "evaluations": [list(pair) for pair in history.evaluations],
        "unit": history.unit,
        "planned": view.predicted_peak_bytes,
        "steps_per_point": history.steps_per_point,
    }


def run_values(roots: Roots, folder: Path, queue: Queue, view: RunView, history: History) -> dict[str, Any]:
    """Return the values of the page's template.

    Args:
        roots: The folders that may be read.
        folder: The run folder.
        queue: The queue, which may have started the run.
        view: The run as it stands.
        history: Its course.
    """
    entry, problem = None, None
    try:
        entry = queue.latest(folder)
    except FsdptoolError as error:
        problem = error
    values = {
        "run": view,
        "parts": run_parts(view, history),
        "entry": entry,
        "problem_of_queue": problem,
        "log": printed(queue, entry.id) if entry is not None else "",
        "running": view.state == "running",
        "exported": is_folder(folder / EXPORT),
    }
    with roots.confine():
        return values | {
            **_failure(folder, view),
            "rank_memory": _rank_memory(folder, view),
            "checkpoints": _checkpoints(folder),
            "samples": _samples(folder),
        }


def printed(queue: Queue, entry: int) -> str:
    """Return the end of what the command of an entry of the queue printed."""
    return printable_lines("\n".join(read_log_lines(queue.log_path(entry))[-_LOG_LINES:]))


def _failure(folder: Path, view: RunView) -> dict[str, Any]:
    """Return why a run failed, as far as its logs and events tell; ``diagnosis`` is None for other runs."""
    diagnosis: FailureDiagnosis | None = None
    if view.state in _ENDED_BADLY:
        with contextlib.suppress(FsdptoolError, OSError):
            diagnosis = diagnose(folder)
    divergence = diagnosis.divergence if diagnosis is not None else None
    account = diagnosis.memory if diagnosis is not None else None
    return {
        "diagnosis": diagnosis,
        # The page has a button that goes on, which says from where.
        "notes": [note for note in diagnosis.notes if note != checkpoint_note(view)] if diagnosis else [],
        "divergence_lines": divergence_lines(divergence) if divergence is not None else [],
        "memory_text": printable_lines(memory_text(account)) if account else "",
    }


def _rank_memory(folder: Path, view: RunView) -> list[dict[str, Any]]:
    """Return planned and measured bytes of each phase, the latter for every rank."""
    ranks = range(min(view.world_size, _RANKS))
    measured = read_rank_memory(folder, ranks)
    return [
        {
            "phase": phase.name,
            "planned": phase.predicted_bytes,
            "ranks": [measured.get(phase.name, {}).get(rank) for rank in ranks],
        }
        for phase in view.memory
        if phase.name in measured
    ]


def _checkpoints(folder: Path) -> list[dict[str, Any]]:
    """Return the checkpoints, newest first: step, size in bytes, and whether the manifest is whole."""
    found: list[dict[str, Any]] = []
    for path in list_checkpoints(folder / CHECKPOINTS):
        try:
            manifest = read_manifest(path)
        except (ConfigError, OSError):
            found.append({"name": path.name, "step": None, "bytes": None, "ranks": None})
            continue
        size = sum(written.bytes for written in manifest.files.values())
        found.append({"name": path.name, "step": manifest.step, "bytes": size, "ranks": manifest.world_size})
    return found


def _samples(folder: Path) -> list[dict[str, Any]]:
    """Return the latest samples by step: texts, and names of pictures."""
    try:
        steps = sorted(
            (path for path in (folder / SAMPLES).iterdir() if SAMPLE_STEP.fullmatch(path.name)), reverse=True
        )
    except OSError:
        return []
    return [
        {"step": int(path.name.partition("-")[2]), "folder": path.name, "items": _sample_items(path)}
        for path in steps[:_SAMPLE_STEPS]
        if is_folder(path) and not path.is_symlink()
    ]


def _sample_items(folder: Path) -> list[Mapping[str, Any]]:
    items: list[Mapping[str, Any]] = []
    for path in sorted(folder.iterdir(), key=lambda path: (len(path.name), path.name)):
        if not SAMPLE_NAME.fullmatch(path.name) or not is_plain_file(path):
            continue
        try:
            data, _, _ = read_ends(path, head=_SAMPLE_BYTES, tail=0)
        except UnreadableError:
            continue
        text = data.decode("utf-8", errors="replace") if path.suffix == ".txt" else ""
        items.append({"name": path.name, "text": printable_lines(text), "size": _png_size(data)})
    return items


def _png_size(data: bytes) -> tuple[int, int] | None:
    """Return width and height in pixels, so that a page keeps the place of a picture that is not loaded yet.

    The header stands first (PNG, third edition, 11.2.1); None where it does not.
    """
    if not data.startswith(b"\x89PNG\r\n\x1a\n") or data[12:16] != b"IHDR" or len(data) < 24:
        return None
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def inputs_of(folder: Path) -> Sequence[str]:
    """Return recipe and configuration that ``run.json`` names, as absolute paths; empty if it does not."""
    try:
        words = read_start(folder).argv
        recipe, config = words[words.index("train") + 1], words[words.index("--config") + 1]
    except (ConfigError, ValueError, IndexError):
        return ()
    paths = (str(recipe), str(config))
    return paths if all(Path(path).is_absolute() for path in paths) else ()
