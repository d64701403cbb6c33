"""Slurm batch scripts. Torch-free."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from typing import Unpack

from fsdptool.errors import ConfigError
from fsdptool.launch.job import PORT, MultiNodeJob, random_id, train_line
from fsdptool.launch.options import SlurmOptions
from fsdptool.options import with_defaults

SIGNAL_LEAD_SECONDS = 300
"""How long before its time limit Slurm asks the run to save."""

_LIMIT = re.compile(r"(?P<days>\d+)-(?P<rest>\d+(:\d+){0,2})|(?P<plain>\d+(:\d+){0,2})")
"""Time limits as sbatch(1) of Slurm 22.05 takes them; 0 is none."""


def slurm_script(job: MultiNodeJob, **options: Unpack[SlurmOptions]) -> str:
    """Return a batch script: one task per node, NCCL settings, stop before the limit, requeue on 75.

    Slurm sends SIGUSR1 to the job's steps ahead of the time limit (``--signal`` without ``B:``);
    every node's fsdptool asks its ranks to save, they agree on a step, and the exit status 75 puts
    the job back into the queue, where ``--resume auto`` continues it. A job that Slurm starts again after
    a node failed has nobody to ask: without a checkpoint it starts over.

    Args:
        job: The run.
        **options: The options of ``fsdptool launch`` on Slurm.

    Raises:
        ConfigError: A value could not be a ``#SBATCH`` value, or the time limit leaves no time to train.
    """
    asked = with_defaults(SlurmOptions, options)
    time, cpus_per_task = asked["time"], asked["cpus_per_task"]
    if time is not None:
        _check_limit(time)
    values = {
        "job-name": asked["name"] or job.recipe.stem,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        "gpus-per-node": str(job.per_node) if job.gpus else None,
        "cpus-per-task": str(cpus_per_task) if cpus_per_task else None,
        "time": time,
        "partition": asked["partition"],
        "account": asked["account"],
        # Job name and ID: a job that is put back into the queue keeps both and appends to its file.
        "output": "%x-%j.out",
        "signal": f"USR1@{SIGNAL_LEAD_SECONDS}",
        "open-mode": "append",
    }
    head = [f"#SBATCH --{key}={_value(key, value)}" for key, value in values.items() if value]
    exports = [f"export {key}={shlex.quote(value)}" for key, value in sorted(job.variables.items())]
    # exec: Slurm signals every process of a step, and a shell in between would be killed.
    unattended = replace(job, options=("--start-over", *job.options))
    line = "exec " + train_line(unattended, '"$SLURM_NODEID"', '"$head_node:$port"', '"$launch_id"')
    # Since Slurm 22.05 srun does not take it from sbatch: a cluster that binds tasks may leave it one core.
    cores = f"--cpus-per-task={cpus_per_task} " if cpus_per_task else ""
    body = [
        "set -u",
        *asked["setup"],
        *exports,
        'head_node="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"',
        "# A requeued job keeps its ID; the restart count makes the launch ID unique.",
        f'launch_id="$SLURM_JOB_ID.${{SLURM_RESTART_COUNT:-0}}.{random_id()}"',
        "# Jobs that share a node use different ports.",
        f"port=$(({PORT} + SLURM_JOB_ID % 1000))",
        "export head_node launch_id port",
        f"srun --kill-on-bad-exit=0 {cores}bash -c {shlex.quote(line)}",
        "status=$?",
        'if [ "$status" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi',
        'exit "$status"',
    ]
    return "\n".join(["#!/bin/bash", *head, "#SBATCH --requeue", "", *body]) + "\n"


def _check_limit(time: str) -> None:
    """Refuse what sbatch refuses, and a limit so short that the run would have to save at its start."""
    match = _LIMIT.fullmatch(time)
    if match is None:
        raise ConfigError(
            f"--time {time!r} is not a valid time limit", help="write minutes, H:M:S or DAYS-H:M:S"
        )
    if match["days"] is not None:
        days, parts = int(match["days"]), [int(part) for part in match["rest"].split(":")]
        hours, minutes, seconds = (*parts, 0, 0)[:3]
    else:
        days, parts = 0, [int(part) for part in match["plain"].split(":")]
        # One number is minutes, two are minutes and seconds.
        hours, minutes, seconds = parts if len(parts) == 3 else (0, *parts, 0)[:3]
    limit = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if 0 < limit <= SIGNAL_LEAD_SECONDS:
        raise ConfigError(
            f"--time {time} is too short: the run saves its state {SIGNAL_LEAD_SECONDS} s before the limit",
            help=f"use more than {SIGNAL_LEAD_SECONDS // 60} minutes",
        )


def _value(key: str, value: str) -> str:
    if not value.strip() or any(character in value for character in "\n\r \t"):
        raise ConfigError(f"--{key} {value!r} is not allowed in an #SBATCH line", help="use a single word")
    return value
