"""Two machines, played by two agents on this one: the printed lines and the Slurm script are really run.

Each line gets its own parent, torchrun agent and rank; nothing but the host name says that they are not
two machines. A rank dies, a whole machine dies, Slurm stops the job before its time limit and puts it back
into the queue; the end is the undisturbed run's, bit for bit.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import psutil
import pytest
from real_runs import CONFIG, STEPS, Run, Work, blocked, digests, losses, release

from fsdptool.cli.app import run as fsdptool
from fsdptool.runs.events import event_path, read_lines

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SRUN = """\
#!/bin/bash
# Two tasks, one per node; ends with the highest status, as srun does.
while [[ "$1" == --* ]]; do shift; done
SLURM_NODEID=0 "$@" & first=$!
SLURM_NODEID=1 "$@" & second=$!
echo "$first $second" > "$TASKS"
wait "$first"; one=$?
wait "$second"; two=$?
exit $((one > two ? one : two))
"""

SCONTROL = """\
#!/bin/bash
if [ "$1" = show ]; then printf '127.0.0.1\\n127.0.0.1\\n'; else echo "$@" >> "$REQUEUED"; fi
"""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def environment(**more: str) -> dict[str, str]:
    """The command is found as after an installation."""
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", **more}


def start(line: str, log: Path, variables: Mapping[str, str]) -> subprocess.Popen[str]:
    with log.open("w") as stream:
        return subprocess.Popen(
            ["bash", "-c", line],
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=dict(variables),
            text=True,
            start_new_session=True,
        )


def steps(folder: Path) -> int:
    lines = list(read_lines(folder / "metrics.jsonl"))
    return int(lines[-1]["step"]) if lines else 0


def wait_until(met: object, *processes: subprocess.Popen[str], seconds: float = 240.0) -> None:
    deadline = time.monotonic() + seconds
    while not met():  # type: ignore[operator]
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)


def under(process: int) -> list[psutil.Process]:
    """A process and everything it started."""
    root = psutil.Process(process)
    return [root, *root.children(recursive=True)]


def pid_of(folder: Path, rank: int, attempt: int) -> int | None:
    events = read_lines(event_path(folder, rank))
    found = [e for e in events if e["kind"] == "started" and e["attempt"] == attempt]
    return int(found[-1]["pid"]) if found else None


def goes_on(folder: Path, attempt: int) -> bool:
    events = read_lines(event_path(folder, 0))
    return any(e["kind"] == "resumed" and e["attempt"] == attempt for e in events)


@pytest.fixture(scope="module")
def config(work: Work) -> Path:
    path = work.folder / "two_machines.yaml"
    path.write_text(CONFIG.replace("num_machines: 1", "num_machines: 2"))
    return path


def test_a_rank_and_a_machine_die(
    work: Work, config: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = work.folder / "machines"
    arguments = ["launch", str(work.folder / "recipe.yaml"), "--config", str(config), "-o", str(folder)]
    host = f"127.0.0.1:{free_port()}"
    assert fsdptool([*arguments, "--host", host, "--launch-id", "first", "--max-restarts", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    logs = [tmp_path / "0.log", tmp_path / "1.log"]
    nodes = [start(line, log, environment()) for line, log in zip(lines, logs, strict=True)]
    try:
        wait_until(lambda: steps(folder) >= 5, *nodes)
        # torchrun's rendezvous numbers the machines as it likes.
        second = {process.pid for process in under(nodes[1].pid)}
        there = next(rank for rank in (0, 1) if pid_of(folder, rank, 0) in second)
        os.kill(pid_of(folder, there, 0) or 0, signal.SIGKILL)
        wait_until(lambda: goes_on(folder, attempt=1), *nodes)
        ranks = {process.pid for process in under(nodes[1].pid)}
        there = next(rank for rank in (0, 1) if pid_of(folder, rank, 1) in ranks)
        for process in under(nodes[1].pid):
            process.kill()
        assert nodes[0].wait(timeout=120.0) == 4, logs[0].read_text()
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
    said = logs[0].read_text()
    assert "restart 1: rank" in said
    assert f"error: rank {there} on {os.uname().nodename} ended without reporting an error" in said
    assert "new --launch-id" in said
    assert "main_process_ip" not in said, "where they meet was said on the command line"
    assert steps(folder) < STEPS


def test_slurm_stops_the_job_in_time_and_requeues_it(
    work: Work, undisturbed: Run, config: Path, tmp_path: Path
) -> None:
    """Goes on where the machine died; the job is stopped once more, and ends when it is run again."""
    folder = work.folder / "machines"
    script = tmp_path / "job.sh"
    arguments = ["launch", str(work.folder / "recipe.yaml"), "--config", str(config), "-o", str(folder)]
    assert fsdptool([*arguments, "--slurm", "--script", str(script), "--time", "01:00:00"]) == 0
    subprocess.run(["bash", "-n", str(script)], check=True, timeout=60)
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    requeued, tasks = tmp_path / "requeued", tmp_path / "tasks"
    # The job's number chooses the port.
    slurm = environment(
        SLURM_JOB_ID=str(4000 + os.getpid() % 1000),
        SLURM_JOB_NODELIST="node[0-1]",
        TASKS=str(tasks),
        REQUEUED=str(requeued),
    )
    slurm["PATH"] = f"{tools}:{slurm['PATH']}"
    before = steps(folder)
    block = blocked(tmp_path / "block", ranks="0", step=3)
    job = start(str(script), tmp_path / "job.log", {**slurm, **block})
    wait_until(lambda: steps(folder) > before, job)
    for task in tasks.read_text().split():
        for process in under(int(task)):
            process.send_signal(signal.SIGUSR1)
    release(job, block)
    status = job.wait(timeout=200.0)
    assert status == 75, (tmp_path / "job.log").read_text()
    assert requeued.read_text().split() == ["requeue", slurm["SLURM_JOB_ID"]]
    stopped = steps(folder)
    assert stopped < STEPS
    again = start(str(script), tmp_path / "again.log", {**slurm, "SLURM_RESTART_COUNT": "1"})
    assert again.wait(timeout=240.0) == 0, (tmp_path / "again.log").read_text()
    assert f"continuing from step {stopped}" in (tmp_path / "again.log").read_text()
    assert len(requeued.read_text().splitlines()) == 1
    assert losses(folder) == losses(undisturbed.folder)
    assert digests(folder) == digests(undisturbed.folder)
    shutil.rmtree(folder)
