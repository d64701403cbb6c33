"""Nothing listens beyond loopback on a single machine, and starts at the same moment do not collide."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from attacks import PATIENCE, Watched
from sockets import LOOPBACK

from fsdptool.launch.command import build_command
from fsdptool.records.sharding import FsdpSettings

pytestmark = pytest.mark.slow

MEETING = """\
import torch
import torch.distributed as dist
from fsdptool.distributed.session import open_session, close_session
from fsdptool.records.sharding import FsdpSettings

session = open_session(FsdpSettings(use_cpu=True))
assert session.sum(torch.ones(1)).item() == session.world_size
close_session()
"""


def test_a_run_on_one_machine_listens_on_loopback_alone(watched_run: Watched) -> None:
    """torchrun's; tests/runs/test_documents.py looks at accelerate's launcher."""
    assert watched_run.listened, "gloo's ranks listen for one another"
    assert not [place for place in watched_run.listened if not place[0].startswith(LOOPBACK)]


def test_doctor_s_probe_listens_on_loopback_alone(watched_doctor: Watched) -> None:
    assert watched_doctor.code == 0
    assert not [place for place in watched_doctor.listened if not place[0].startswith(LOOPBACK)]


def test_runs_that_start_at_once_all_start_whatever_their_port(tmp_path: Path) -> None:
    """Six runs, of which two have the same fixed port."""
    (tmp_path / "meeting.py").write_text(MEETING)
    runs = []
    for number in range(6):
        settings = FsdpSettings(main_process_port=29777) if number < 2 else FsdpSettings()
        command = build_command(tmp_path / str(number), settings, processes=1, device="cpu")
        argv = list(command.argv)
        # The same launcher and rendezvous, a smaller worker.
        argv[argv.index("--module") :] = [str(tmp_path / "meeting.py")]
        environment = {**os.environ, **command.environment}
        runs.append(subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT))
    said = [run.communicate(timeout=PATIENCE)[0].decode() for run in runs]
    assert [run.returncode for run in runs] == [0] * len(runs), said
