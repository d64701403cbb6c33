"""What a run in the queue needs on this machine, and what it waits for.

Runs whose needs overlap never run together, and their order is kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from fsdptool.distributed.devices import local_ids, uuids_of
from fsdptool.errors import ConfigError
from fsdptool.launch.machine import gpu_set, requested_gpus
from fsdptool.launch.prepare import choose_device, count_processes
from fsdptool.launch.start import check_loss
from fsdptool.records.queue import Needs, Wait
from fsdptool.runs.folder import LOCK, RUN
from fsdptool.runs.view import is_locked


def find_needs(config: Path, folder: Path, *, cpu: bool = False, visible: str | None = None) -> Needs:
    """Return what a run needs on this machine.

    Args:
        config: The accelerate YAML, or another dialect.
        folder: The run folder.
        cpu: Whether it trains on the CPU whatever the configuration says.
        visible: GPUs as ``CUDA_VISIBLE_DEVICES`` would name them, if the configuration does not.

    Raises:
        ConfigError: The configuration is invalid, is for several machines or for more GPUs than there are.
    """
    from fsdptool.config import read_settings

    settings = read_settings(config, consumer="fsdptool").require()
    if cpu:
        settings = replace(settings, use_cpu=True)
    if settings.num_machines > 1:
        raise ConfigError(
            f"{config} is for {settings.num_machines} machines; the queue starts runs on one",
            help="start it with the lines that `fsdptool launch` prints",
        )
    device = choose_device(settings, config)
    _, processes = count_processes(settings, device, None, config)
    if device == "cpu":
        return Needs(str(folder), slots=processes)
    own = settings.gpu_ids if settings.gpu_ids != "all" else None
    if visible is not None and own is not None and gpu_set(visible) != gpu_set(own):
        raise ConfigError(
            f"{config} sets gpu_ids to {own}, and GPUs {visible} were requested",
            help="remove gpu_ids from the file, or request the same GPUs",
        )
    gpus = gpu_set(visible) if visible is not None else requested_gpus(settings)
    if len(gpus) < processes:
        raise ConfigError(
            f"{config} is for {processes} processes; the requested GPUs are {', '.join(sorted(gpus))}",
            help="request one GPU for each process",
        )
    # By one name each: the runs that occupy GPUs may call them by index or by UUID.
    return Needs(str(folder), gpus=local_ids(uuids_of(gpus)))


def check_run_folder(folder: Path, options: Sequence[str]) -> None:
    """Refuse a folder with a run that the options neither continue nor replace, or cannot continue.

    Raises:
        ConfigError: It has one.
    """
    # A run that goes on may still write its first checkpoint.
    if "--resume" in options and "--start-over" not in options and not is_locked(folder / LOCK):
        check_loss(folder)
    if (folder / RUN).exists() and not {"--resume", "--force"} & set(options):
        raise ConfigError(
            f"{folder} already contains a run",
            help="continue it with --resume auto, replace it with --force, or choose another --output",
        )


def options_of_another_start(options: Sequence[str]) -> tuple[str, ...]:
    """Return the options without those that say how the folder is begun."""
    kept: list[str] = []
    items = iter(options)
    for item in items:
        if item == "--resume":
            next(items, None)
        elif item not in ("--force", "--start-over") and not item.startswith("--resume="):
            kept.append(item)
    return tuple(kept)


def conflict(needs: Needs, other: Needs, *, queued: bool) -> Wait | None:
    """Return why a run cannot start next to another one because of its folder or its GPUs, or None.

    Args:
        needs: What the run needs.
        other: What the other one occupies.
        queued: Whether the other one waits itself.
    """
    if needs.folder == other.folder:
        return Wait("folder", (), other.folder, queued)
    if shared := sorted(needs.gpus & other.gpus):
        return Wait("gpus", tuple(shared), other.folder, queued)
    return None


def find_waits(waiting: Sequence[Needs], occupied: Iterable[Needs], slots: int) -> tuple[Wait | None, ...]:
    """Return for every waiting run why it cannot start now, or None if it can.

    A run also waits for an earlier one that needs the same GPUs, folder or process slots and cannot start.
    Otherwise small runs would overtake a large one for ever. A run on the CPU that needs more slots than
    the machine has starts when no other one uses any.

    Args:
        waiting: The runs in the order in which they should start.
        occupied: What live runs occupy.
        slots: Process slots of the machine.
    """
    taken = list(occupied)
    blocked: list[Needs] = []
    waits: list[Wait | None] = []
    for needs in waiting:
        wait = _find_wait(needs, taken, blocked, slots)
        waits.append(wait)
        (taken if wait is None else blocked).append(needs)
    return tuple(waits)


def _find_wait(needs: Needs, taken: Sequence[Needs], blocked: Sequence[Needs], slots: int) -> Wait | None:
    for others, queued in ((taken, False), (blocked, True)):
        for other in others:
            if wait := conflict(needs, other, queued=queued):
                return wait
    if not needs.slots:
        return None
    users = [other for other in taken if other.slots]
    if users and sum(other.slots for other in users) + needs.slots > slots:
        return Wait("slots", (), users[0].folder, False)
    if earlier := next((other for other in blocked if other.slots), None):
        return Wait("slots", (), earlier.folder, True)
    return None
