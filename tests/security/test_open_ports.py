"""Nothing listens beyond loopback on a single machine, and starts at the same moment do not collide."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from attacks import PATIENCE, RECIPE, write_job

from fsdptool.launch.command import build_command
from fsdptool.records.sharding import FsdpSettings
from fsdptool.runs.events import read_lines

LOOPBACK = ("127.", "::1")
MEETING = """\
import torch
import torch.distributed as dist
from fsdptool.distributed.session import open_session, close_session
from fsdptool.records.sharding import FsdpSettings

session = open_session(FsdpSettings(use_cpu=True))
assert session.sum(torch.ones(1)).item() == session.world_size
close_session()
"""


def listening(process: psutil.Process) -> set[tuple[str, int]]:
    """Return the addresses a process and its descendants listen on."""
    found = set()
    for one in (process, *process.children(recursive=True)):
        try:
            for connection in one.net_connections(kind="inet"):
                if connection.status == psutil.CONN_LISTEN:
                    found.add((connection.laddr.ip, connection.laddr.port))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


@pytest.mark.parametrize("launcher", ["torchrun", "accelerate"])
def test_a_run_on_one_machine_listens_on_loopback_alone(tmp_path: Path, launcher: str) -> None:
    recipe, config = write_job(tmp_path, RECIPE.replace("steps: 4", "steps: 100000"))
    argv = [sys.executable, "-P", "-m", "fsdptool", "train", str(recipe), "--config", str(config)]
    argv += ["-o", str(tmp_path / "run"), "--no-predict", "--launcher", launcher]
    seen: set[tuple[str, int]] = set()
    with subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as run:
        try:
            watched = psutil.Process(run.pid)
            steps = 0
            while steps < 3:
                assert run.poll() is None
                seen |= listening(watched)
                steps = len(list(read_lines(tmp_path / "run" / "metrics.jsonl")))
                time.sleep(0.15)
            seen |= listening(watched)
        finally:
            run.send_signal(signal.SIGTERM)
            assert run.wait(PATIENCE) == 75
    assert seen, "gloo's ranks listen for one another"
    assert not [place for place in seen if not place[0].startswith(LOOPBACK)]


def test_doctor_s_probe_listens_on_loopback_alone(tmp_path: Path) -> None:
    argv = [sys.executable, "-P", "-m", "fsdptool", "doctor"]
    seen: set[tuple[str, int]] = set()
    with subprocess.Popen(argv, cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as run:
        while run.poll() is None:
            seen |= listening(psutil.Process(run.pid))
            time.sleep(0.15)
        assert run.returncode == 0
    assert not [place for place in seen if not place[0].startswith(LOOPBACK)]


def test_ten_runs_that_start_at_once_all_start(tmp_path: Path) -> None:
    (tmp_path / "meeting.py").write_text(MEETING)
    runs = []
    for number in range(10):
        command = build_command(tmp_path / str(number), FsdpSettings(), processes=1, device="cpu")
        argv = list(command.argv)
        # The same launcher and rendezvous, a smaller worker.
        argv[argv.index("--module") :] = [str(tmp_path / "meeting.py")]
        runs.append(
            subprocess.Popen(
                argv,
                env={**os.environ, **command.environment},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        )
    said = [run.communicate(timeout=PATIENCE)[0].decode() for run in runs]
    assert [run.returncode for run in runs] == [0] * 10, said


def test_one_fixed_port_does_not_stop_a_second_run(tmp_path: Path) -> None:
    (tmp_path / "meeting.py").write_text(MEETING)
    runs = []
    for _ in range(2):
        command = build_command(tmp_path, FsdpSettings(main_process_port=29777), processes=1, device="cpu")
        argv = list(command.argv)
        argv[argv.index("--module") :] = [str(tmp_path / "meeting.py")]
        environment = {**os.environ, **command.environment}
        runs.append(subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    said = [run.communicate(timeout=PATIENCE)[0].decode() for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
