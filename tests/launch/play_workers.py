"""Stands in for torchrun and its workers where torch does not matter: starts ranks that follow a script.

    python play_workers.py RUN_FOLDER ACT_OF_RANK_0 ACT_OF_RANK_1 ... [then ACT_OF_RANK_0 ...]

The acts after ``then`` are those of a restart. An act is ``finish``, ``stop`` (until asked, then finish),
``deaf`` (until killed), ``die`` (SIGKILL itself), ``symptom`` (sees a closed connection), ``refuse`` (an
error of the person's making), ``fail`` (a bug), ``freezes`` (SIGSTOP itself), ``sleeps`` (gets stuck outside
a collective), ``gives up`` (gloo's timeout) or ``aborts`` (NCCL's). Workers run under the real guard, with
real signals and real event files.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from fsdptool.errors import ConfigError
from fsdptool.runs import watchdog
from fsdptool.runs.events import EventLog, WorkerPhase, event_path, read_lines
from fsdptool.runs.signals import SignalFlag
from fsdptool.runs.watchdog import is_stopped, read_progress
from fsdptool.training.worker import run_guarded


def act(acts: list[str], events: EventLog, flag: SignalFlag) -> Mapping[str, Any]:
    """Play one rank."""
    name = acts[int(os.environ["RANK"])]
    events.emit("phase", name=WorkerPhase.TRAINING)
    place = f"training-{events.attempt}"
    arrive(events.folder, place)
    if name in ("die", "symptom", "freezes", "sleeps", "gives up", "aborts"):
        meet(events.folder, place)
    if name in ("freezes", "sleeps", "gives up", "aborts"):
        with watchdog.watched(events):
            hang(name, events.folder, acts)
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


def arrive(folder: Path, place: str) -> None:
    """Say that this rank is at a place of the script."""
    (folder / f"{place}-{os.environ['RANK']}").touch()


def meet(folder: Path, place: str) -> None:
    """Wait until every rank has arrived: on a busy machine one starts seconds after another."""
    arrive(folder, place)
    for rank in range(int(os.environ["WORLD_SIZE"])):
        while not (folder / f"{place}-{rank}").exists():
            time.sleep(0.02)


def wait_for_progress(folder: Path, rank: int, since: float) -> None:
    """Wait until a rank's watchdog has written down that it got on after ``since``."""
    # The file's moment is a difference of two clocks.
    since -= 0.1
    while (seen := read_progress(folder, rank)) is None or not seen.interval or seen.progressed < since:
        time.sleep(0.02)


def hang(name: str, folder: Path, acts: list[str]) -> None:
    """Play one rank of a run in which rank 1 may get stuck in step 7 and the others wait for it."""
    own = int(os.environ["RANK"])
    begun = time.time()
    watchdog.enter(WorkerPhase.TRAINING, 7)
    wait_for_progress(folder, own, begun)
    meet(folder, "stuck")
    if name == "sleeps":
        time.sleep(600)
    if name == "freezes":
        os.kill(os.getpid(), signal.SIGSTOP)
    if "freezes" in acts:
        stopped = next(event["pid"] for event in read_lines(event_path(folder, acts.index("freezes"))))
        while not is_stopped(stopped):
            time.sleep(0.02)
    # The others get on clearly later than the rank that is stuck.
    time.sleep(1.5)
    alone = bool({"sleeps", "freezes"} & set(acts))
    if not alone:
        meet(folder, "moving")
    begun = time.time()
    watchdog.beat()
    wait_for_progress(folder, own, begun)
    if not alone:
        meet(folder, "moved")
    if name == "aborts":
        # As a CUDA build of torch 2.13 does (ProcessGroupNCCL.cpp, checkTimeout and the watchdog's end).
        sys.stderr.write(
            "[rank0]:[E ProcessGroupNCCL.cpp:682] [Rank 0] Watchdog caught collective operation timeout:"
            " WorkNCCL(SeqNum=12, OpType=_ALLGATHER_BASE, NumelIn=1024, NumelOut=2048, Timeout(ms)=2000)"
            " ran for 2018 milliseconds before timing out.\n"
        )
        sys.stderr.flush()
        os.abort()
    raise RuntimeError(
        "[gloo/transport/tcp/unbound_buffer.cc:83] Timed out waiting 2000ms for send operation"
    )


def main(arguments: list[str]) -> int:
    """Play one rank if ``RANK`` is set, else start all of them and wait as torchrun does."""
    folder, acts = Path(arguments[0]), arguments[1:]
    attempts = [list(group) for then, group in groupby(acts, lambda act: act == "then") if not then]
    if "RANK" in os.environ:
        own = attempts[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
        return run_guarded(folder, lambda events, flag: act(own, events, flag))
    status = 0
    for number, own in enumerate(attempts):
        attempt = {"WORLD_SIZE": str(len(own)), "TORCHELASTIC_RESTART_COUNT": str(number)}
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, *arguments], env={**os.environ, **attempt, "RANK": str(rank)}
            )
            for rank in range(len(own))
        ]
        status = max(abs(rank.wait(timeout=600)) for rank in ranks)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
