"""The runs of this machine and of given folders, live and ended."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fsdptool.errors import ConfigError
from fsdptool.files.text import is_file, is_folder
from fsdptool.launch.machine import live_claims
from fsdptool.records.run import RunList, RunView
from fsdptool.runs.folder import RUN
from fsdptool.runs.view import ViewReader, find_run_folders, read_view

DEFAULT_ROOT = Path("runs")
"""Where ``fsdptool train`` puts a run by default, below the working directory."""


def list_runs(
    roots: Sequence[Path] = (), *, now: float | None = None, read: ViewReader = read_view
) -> RunList:
    """Return every run below ``roots``, those that are running first, then the latest first.

    Args:
        roots: Folders to look in. Without any: ``runs/`` and the working directory, and every run of this
            user that is live on this machine, wherever its folder is.
        now: Seconds since 1970; None is the present.
        read: Reads a run; a program that looks again and again may keep those that have not changed.

    Raises:
        ConfigError: A root does not exist.
    """
    for root in roots:
        if not is_folder(root):
            raise ConfigError(f"{root} is not a folder", help="give the folder that contains your runs")
    claims = {Path(folder).resolve(): gpus for gpus, folder in live_claims()}
    folders = dict.fromkeys(path.resolve() for path in find_run_folders(roots or (DEFAULT_ROOT,)))
    if not roots:
        folders |= dict.fromkeys(path.resolve() for path in find_run_folders((Path(),), depth=1))
        folders |= dict.fromkeys(path for path in claims if is_file(path / RUN))
    runs: list[RunView] = []
    unreadable: list[str] = []
    for folder in folders:
        try:
            runs.append(read(folder, gpus=sorted(claims.get(folder, ())), now=now))
        except ConfigError as error:
            unreadable.append(f"{folder}: {error}")
        except Exception as error:
            # Whatever one folder holds, the others are listed.
            unreadable.append(f"{folder}: cannot be read: {type(error).__name__}: {error}")
    runs.sort(key=lambda run: (run.state != "running", -run.started))
    return RunList(tuple(runs), tuple(unreadable))


def view_run(folder: Path, *, now: float | None = None) -> RunView:
    """Return one run as it stands, with the GPUs that it claims on this machine.

    Raises:
        ConfigError: The folder is not a run folder, or its ``run.json`` is damaged.
    """
    claims = {Path(path).resolve(): gpus for gpus, path in live_claims()}
    return read_view(folder, gpus=sorted(claims.get(folder.resolve(), ())), now=now)
