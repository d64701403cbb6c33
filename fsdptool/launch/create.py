"""Creates, continues or replaces a run folder, and keeps two runs from sharing one."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fsdptool.errors import ConfigError, StorageError
from fsdptool.files.text import private_folder
from fsdptool.launch.prepare import Prepared
from fsdptool.records.codec import to_json
from fsdptool.records.run import Start
from fsdptool.runs.folder import (
    CHECKPOINTS,
    ENVIRONMENT,
    EVENTS,
    EXPORT,
    LOCK,
    LOGS,
    METRICS,
    PREDICTION,
    RUN,
    SUMMARY,
    RunInputs,
    environment,
    read_start,
    write_inputs,
    write_json,
    write_start,
    write_text,
)
from fsdptool.runs.manifest import lost_steps, read_manifest

_OURS = (CHECKPOINTS, EVENTS, LOGS, EXPORT, METRICS, SUMMARY, RUN)


def check_folder(folder: Path, *, resume: str | None, force: bool, start_over: bool = False) -> int:
    """Check that ``folder`` may be written; return how often the run was started before.

    Raises:
        ConfigError: There is a run already and neither ``resume`` nor ``force`` says what to do with it,
            ``resume`` is not a checkpoint that can be resumed, or ``resume`` is ``auto``, the run has no
            checkpoint, and ``start_over`` does not accept that its steps are lost.
    """
    if resume and force:
        raise ConfigError("--resume and --force cannot be combined", help="use only one of them")
    if start_over and resume != "auto":
        raise ConfigError("--start-over says what --resume auto may do", help="add --resume auto")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file", help="choose another folder with --output")
    if resume and resume != "auto":
        read_manifest(Path(resume))
    if (folder / RUN).exists():
        if resume:
            if resume == "auto" and not start_over:
                check_loss(folder)
            return read_start(folder).number + 1
        if not force:
            raise ConfigError(
                f"{folder} already contains a run",
                help="continue it with --resume auto, replace it with --force, or choose another --output",
            )
        return 0
    # With our lock in it, it is left from a start that ended before the folder was complete.
    if folder.is_dir() and any(folder.iterdir()) and not (folder / LOCK).exists():
        raise ConfigError(
            f"{folder} is not empty and does not contain a run",
            help="choose an empty or new folder with --output",
        )
    return 0


def check_loss(folder: Path) -> None:
    """Refuse to continue a run without a checkpoint: somebody has to decide that its steps are lost.

    Raises:
        ConfigError: The folder has a run that has made steps and has no checkpoint.
    """
    if (folder / RUN).exists() and (lost := lost_steps(folder)):
        origin = read_start(folder).resume
        again = f"continue from {origin} again with --resume, " if origin not in (None, "auto") else ""
        raise ConfigError(
            f"no checkpoint exists in {folder}: {lost} step{'s are' if lost > 1 else ' is'} lost",
            help=f"{again}start over with --resume auto --start-over, or choose another folder with --output",
        )


def wait_for_run(folder: Path, launch_id: str | None, *, seconds: float = 600.0) -> None:
    """Wait on the other nodes until the first has written the folder for this launch.

    Raises:
        ConfigError: It did not, or the file system is not shared.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        with contextlib.suppress(ConfigError):
            if read_start(folder).launch_id == launch_id:
                return
        time.sleep(0.5)
    raise ConfigError(
        f"{folder} was not written for launch {launch_id!r} within {seconds:.0f} s",
        help="start the same command with --node-rank 0, on a file system that all machines share",
    )


def write_run(
    folder: Path,
    prepared: Prepared,
    *,
    resume: str | None,
    number: int,
    argv: Sequence[str],
    force: bool,
    launch_id: str | None = None,
) -> None:
    """Write everything the workers read; ``run.json`` last.

    Raises:
        StorageError: The folder cannot be written; nothing that was there is lost unless ``force``.
    """
    start = Start(prepared.world_size, prepared.device, resume, number, tuple(argv), launch_id, time.time())
    inputs = RunInputs(
        folder,
        prepared.recipe,
        prepared.settings,
        prepared.spec,
        prepared.units,
        prepared.teacher_spec,
        prepared.teacher_units,
    )
    try:
        if force:
            _clear(folder)
        for name in (CHECKPOINTS, EVENTS, LOGS):
            (folder / name).mkdir(parents=True, exist_ok=True)
        for name, text in prepared.files.items():
            write_text(folder / name, text)
        write_inputs(inputs)
        write_json(folder / PREDICTION, to_json(prepared.prediction))
        write_json(folder / ENVIRONMENT, environment())
        write_start(folder, start, [inputs.recipe, inputs.settings, inputs.spec, inputs.units])
    except OSError as error:
        raise StorageError(
            f"the run folder {folder} cannot be written: {error.strerror or error}",
            help="free disk space, or choose another folder with --output",
        ) from error


def _clear(folder: Path) -> None:
    for name in _OURS:
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def check_unlocked(folder: Path) -> None:
    """Refuse a folder in which a run is live, before anything is prepared.

    Raises:
        ConfigError: Another process trains in this folder.
    """
    if (folder / LOCK).exists():
        with lock_run(folder):
            pass


@contextmanager
def lock_run(folder: Path) -> Iterator[None]:
    """Lock the run for this process; the lock file stays in the folder and marks it as fsdptool's.

    Raises:
        ConfigError: Another process trains in this folder.
        StorageError: The folder cannot be made.
    """
    from filelock import FileLock, Timeout

    try:
        private_folder(folder)
    except OSError as error:
        raise StorageError(
            f"the run folder {folder} cannot be made: {error.strerror or error}",
            help="choose another folder with --output",
        ) from error
    lock = FileLock(folder / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"another process trains in {folder}", help="wait for it, or choose another --output"
        ) from None
    except OSError as error:
        raise StorageError(f"{folder} cannot be written: {error.strerror or error}") from error
    try:
        yield
    finally:
        # Never unlinked: a process that has it open would hold a lock that the next one does not see.
        lock.release()
