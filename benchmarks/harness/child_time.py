"""The processor time of child processes, as every benchmark of a command takes it."""

from __future__ import annotations

import random
import resource
import statistics
import subprocess
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TypeVar

Key = TypeVar("Key")


def cpu_seconds(
    command: list[str],
    folder: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    answers: Collection[int] = (0,),
) -> float:
    """Run a command; return the user and system seconds it took.

    Args:
        command: The command.
        folder: Where it runs.
        environment: Its environment; None: that of this process.
        answers: Exit statuses of an answer; another one raises SystemExit.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in answers:
        raise SystemExit(f"{command} failed: {done.stdout[-500:]}{done.stderr[-500:]}")
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def alternate(commands: Mapping[Key, list[str]], folder: Path, repeat: int) -> dict[Key, float]:
    """Return the median of ``repeat`` runs of each command, which take turns in random order.

    A first run of each, which fills caches, does not count.
    """
    taken: dict[Key, list[float]] = {name: [] for name in commands}
    for turn in range(repeat + 1):
        for name in random.sample(list(commands), len(commands)):
            seconds = cpu_seconds(commands[name], folder)
            if turn:
                taken[name].append(seconds)
    return {name: statistics.median(values) for name, values in taken.items()}
