"""Stands in for ``fsdptool train`` where torch does not matter: a run folder with real locks and events.

    python play_run.py train RECIPE --config FILE --output FOLDER --launch-id ID [options]

The recipe holds one word: ``finish`` (once ``go`` is in the folder of the recipe), ``refuse`` (an error
before the run begins), ``die`` (SIGKILL itself), ``orphan`` (die and leave a worker behind) or ``deaf``
(end by SIGKILL alone). A stop signal makes ``finish`` end as stopped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from fsdptool.launch.machine import register_claim
from fsdptool.launch.outcome import write_summary
from fsdptool.launch.start import lock_run
from fsdptool.records.run import RunStatus, Start, Summary
from fsdptool.runs.events import EventLog
from fsdptool.runs.folder import write_start

EXIT = {"completed": 0, "stopped": 75, "interrupted": 130}

taken: list[int] = []


def main(arguments: list[str]) -> int:
    """Play one start of a run."""
    recipe = Path(arguments[1])
    given = dict(zip(arguments[2::2], arguments[3::2], strict=False))
    folder, act = Path(given["--output"]), recipe.read_text().strip()
    if act == "refuse":
        print("error: the recipe asks for the moon\nhelp: ask for less", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: taken.append(number))
    gpus = frozenset(filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")))
    with lock_run(folder), register_claim(gpus, folder):
        for name in ("events", "logs", "checkpoints"):
            (folder / name).mkdir(exist_ok=True)
        write_start(folder, Start(1, "cpu", given.get("--resume"), 0, (), given["--launch-id"]), None)
        events = EventLog(folder, 0, 0)
        if act == "orphan":
            worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
            record = {"kind": "started", "time": time.time(), "rank": 0, "attempt": 0, "pid": worker.pid}
            events._file.append({**record, "node": os.uname().nodename})
        else:
            events.emit("started", node=os.uname().nodename)
        if act in ("die", "orphan"):
            os.kill(os.getpid(), signal.SIGKILL)
        status = play(act, recipe.parent / "go")
        events.emit("finished", status=status)
        summarise(folder, status)
    return EXIT[status]


def play(act: str, go: Path) -> RunStatus:
    """Wait until the run may finish, or is told to stop; a run that its test has left ends by itself."""
    deadline = time.monotonic() + 900
    while act == "deaf" or not go.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{go} did not appear")
        if taken and act != "deaf":
            return "stopped" if len(taken) == 1 else "interrupted"
        time.sleep(0.02)
    return "completed"


def summarise(folder: Path, status: RunStatus) -> None:
    """Write the closing summary of a run without steps."""
    summary = Summary(
        status=status,
        exit_code=EXIT[status],
        resumable=status == "stopped",
        steps=0,
        world_size=1,
        mesh={"dp_replicate": 1, "dp_shard": 1},
        units=1,
        sharding_proof={},
        predicted_peak_bytes=None,
        measured_peak_bytes=(None,),
        instrument="none",
        error_percent=None,
        throughput={},
        last_checkpoint=None,
        last_good_step=None,
        export=None,
        restarts=0,
        failure=None,
        memory_report=None,
    )
    write_summary(folder, summary)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
