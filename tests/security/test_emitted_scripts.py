"""What a cluster file says never becomes shell: names are checked, values and paths are quoted."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from attacks import Cli, write_job

NASTY = "n0'$(touch owned)`touch owned`;touch owned #\""


def cluster(folder: Path, environment: dict[str, str]) -> Path:
    path = folder / "cluster.json"
    data = {"gpus_per_node": 1, "nodes": 2, "environment": environment}
    path.write_text(json.dumps(data))
    return path


@pytest.fixture
def machines(tmp_path: Path) -> tuple[Path, Path]:
    """A job for two machines."""
    recipe, config = write_job(tmp_path)
    config.write_text(config.read_text().replace("num_machines: 1", "num_machines: 2"))
    return recipe, config


@pytest.mark.parametrize(
    "name",
    [
        "A$(touch x)",
        "A`touch x`",
        "A;touch x;B",
        "A B",
        "A\ntouch x\nB",
        "1A",
        "",
        "A-B",
        "Ä",
        "LD_PRELOAD",
        "LD_LIBRARY_PATH",
        "PATH",
        "PYTHONPATH",
        "PYTHONSTARTUP",
        "BASH_ENV",
        "ENV",
        "IFS",
    ],
)
def test_a_name_that_is_no_name_or_steers_programs_is_refused(
    here: Cli, machines: tuple[Path, Path], tmp_path: Path, name: str
) -> None:
    recipe, config = machines
    path = cluster(tmp_path, {name: "1"})
    for options in ((), ("--slurm",)):
        answer = here("launch", recipe, "--config", config, "--cluster", path, *options)
        assert answer.code == 2, answer.out
        assert "environment" in answer.err
        assert "touch" not in answer.out
    answer = here("plan", "albert:base-v2", "--cluster", path, "--seq-len", "8")
    assert answer.code == 2
    assert "environment" in answer.err


def test_values_hosts_and_paths_reach_the_command_unchanged(
    here: Cli, machines: tuple[Path, Path], tmp_path: Path
) -> None:
    recipe, config = machines
    path = cluster(tmp_path, {"NCCL_IB_HCA": NASTY})
    output = tmp_path / f"out {NASTY}".replace("/", "_")
    options = ("--cluster", path, "--host", NASTY, "--launch-id", NASTY, "-o", output)
    answer = here("launch", recipe, "--config", config, *options)
    assert answer.code == 0, answer.err
    seen = tmp_path / "seen"
    tools_folder = tmp_path / "bin"
    tools_folder.mkdir()
    stand_in = tools_folder / "fsdptool"
    stand_in.write_text(f'#!/bin/bash\nprintf "%s\\0" "$NCCL_IB_HCA" "$@" > {seen}\n')
    stand_in.chmod(0o755)
    for line in answer.out.splitlines():
        environment = {**os.environ, "PATH": f"{tools_folder}:{os.environ['PATH']}"}
        subprocess.run(["bash", "-c", line], check=True, cwd=tmp_path, env=environment, timeout=60)
        variable, *arguments = seen.read_text().split("\0")[:-1]
        assert variable == NASTY
        assert arguments[arguments.index("--rendezvous") + 1] == f"{NASTY}:29500"
        assert arguments[arguments.index("--launch-id") + 1] == NASTY
        assert arguments[arguments.index("--output") + 1] == str(output)
    assert not (tmp_path / "owned").exists()


def test_the_script_runs_nothing_of_a_node_s_name(
    here: Cli, machines: tuple[Path, Path], tmp_path: Path
) -> None:
    recipe, config = machines
    path = cluster(tmp_path, {"NCCL_IB_HCA": NASTY})
    output = tmp_path / f"out {NASTY}".replace("/", "_")
    answer = here("launch", recipe, "--config", config, "--cluster", path, "-o", output, "--slurm")
    assert answer.code == 0, answer.err
    tools_folder = tmp_path / "bin"
    tools_folder.mkdir()
    seen = tmp_path / "seen"
    tools = {
        "srun": '#!/bin/bash\nwhile [[ "$1" == --* ]]; do shift; done\nexec "$@"\n',
        "scontrol": '#!/bin/bash\nif [ "$1" = show ]; then printf "%s\\n" "$NASTY"; fi\n',
        "fsdptool": f'#!/bin/bash\nprintf "%s\\0" "$NCCL_IB_HCA" "$@" > {seen}\n',
    }
    for name, text in tools.items():
        (tools_folder / name).write_text(text)
        (tools_folder / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools_folder}:{os.environ['PATH']}",
        "NASTY": NASTY,
        "SLURM_JOB_NODELIST": "n[0-1]",
        "SLURM_JOB_ID": "7",
        "SLURM_NODEID": "0",
    }
    script = tmp_path / "job.sh"
    script.write_text(answer.out)
    subprocess.run(["bash", str(script)], check=True, cwd=tmp_path, env=environment, timeout=60)
    variable, *arguments = seen.read_text().split("\0")[:-1]
    assert variable == NASTY
    assert arguments[arguments.index("--rendezvous") + 1].startswith(f"{NASTY}:")
    assert arguments[arguments.index("--output") + 1] == str(output)
    assert not (tmp_path / "owned").exists()


def test_a_launch_id_cannot_be_guessed(here: Cli, machines: tuple[Path, Path]) -> None:
    recipe, config = machines

    def identity(*options: str) -> str:
        out = here("launch", recipe, "--config", config, *options).out
        return next(line for line in out.splitlines() if "launch-id" in line or "launch_id=" in line)

    assert identity() != identity()
    assert identity("--slurm") != identity("--slurm")
