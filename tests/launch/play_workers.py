"""Stands in for torchrun and its workers where torch does not matter: starts ranks that follow a script.

    python play_workers.py RUN_FOLDER ACT_OF_RANK_0 ACT_OF_RANK_1 ...

An act is ``finish``, ``stop`` (until asked, then finish), ``deaf`` (until killed), ``die`` (SIGKILL
itself), ``refuse`` (an error of the person's making) or ``fail`` (a bug). Workers run under the real
guard, with real signals and real event files.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsdptool.errors import ConfigError
from fsdptool.runs.events import EventLog, WorkerPhase
from fsdptool.runs.signals import SignalFlag
from fsdptool.training.worker import run_guarded


def act(name: str, events: EventLog, flag: SignalFlag) -> Mapping[str, Any]:
    """Play one rank."""
    events.emit("phase", name=WorkerPhase.TRAINING)
    if name == "die":
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "refuse":
        raise ConfigError("the recipe asks for the moon", help="ask for less")
    if name == "fail":
        raise RuntimeError("a bug")
    if name == "symptom":
        time.sleep(0.6)
        raise RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]:10478")
    if name == "stop":
        while not flag.requested:
            time.sleep(0.02)
        return {"status": "stopped", "step": 7, "signal": flag.requested}
    while name == "deaf":
        time.sleep(0.1)
    return {"status": "completed", "step": 9, "signal": 0}


def main(arguments: list[str]) -> int:
    """Play one rank if ``RANK`` is set, else start all of them and wait as torchrun does."""
    folder, acts = Path(arguments[0]), arguments[1:]
    if "RANK" in os.environ:
        return run_guarded(folder, lambda events, flag: act(acts[int(os.environ["RANK"])], events, flag))
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, *arguments],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(len(acts))},
        )
        for rank in range(len(acts))
    ]
    return max(abs(rank.wait()) for rank in ranks)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
