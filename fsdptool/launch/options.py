"""How a run is started: the options of ``fsdptool train``, :func:`fsdptool.train` and ``fsdptool launch``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, TypedDict

from fsdptool.options import LAUNCH_ID, START_OVER, TRUST, Option


class StartOptions(TypedDict, total=False):
    """Every option of ``train`` but the recipe and the configuration; what is left out has its default."""

    # fmt: off
    output: Annotated[str | Path | None, Option(
        "Run folder; default: runs/RECIPE.", flags=("--output", "-o"))]
    resume: Annotated[str | None, Option("auto (the newest valid checkpoint) or a checkpoint folder.")]
    start_over: Annotated[bool, START_OVER]
    force: Annotated[bool, Option("Replace an existing run in the folder.", default=False)]
    processes: Annotated[int | None, Option(
        "Total number of processes; must agree with the configuration.")]
    cpu: Annotated[bool, Option("Train on the CPU, whatever the configuration says.", default=False)]
    launcher: Annotated[str, Option("Launcher", choices=("torchrun", "accelerate"), default="torchrun")]
    max_restarts: Annotated[int, Option(
        "Restarts from the newest valid checkpoint before giving up.", minimum=0, default=0)]
    timeout: Annotated[float, Option(
        "Timeout of a collective, in seconds.", minimum=1, default=600.0)]
    grace: Annotated[int, Option(
        "Time that workers have to save after a signal, in seconds.", minimum=0, default=600)]
    node_rank: Annotated[int | None, Option("Rank of this node.")]
    rendezvous: Annotated[str | None, Option("HOST:PORT of node 0, for several nodes.")]
    launch_id: Annotated[str | None, LAUNCH_ID]
    predict: Annotated[bool, Option(
        "Predict memory before the run starts.", flags=("--predict/--no-predict",), default=True)]
    trust_remote_code: Annotated[bool, TRUST]
    # fmt: on


class SlurmOptions(TypedDict, total=False):
    """Every option of ``launch`` that says what a batch script asks of Slurm."""

    # fmt: off
    name: Annotated[str | None, Option("Slurm job name; default: RECIPE.", "Slurm")]
    time: Annotated[str | None, Option("Slurm time limit.", "Slurm")]
    partition: Annotated[str | None, Option("Slurm partition.", "Slurm")]
    account: Annotated[str | None, Option("Slurm account.", "Slurm")]
    cpus_per_task: Annotated[int | None, Option("CPU cores per node.", "Slurm")]
    setup: Annotated[Sequence[str], Option(
        "Command to run first, for example 'module load cuda' (repeatable).", "Slurm", default=())]
    # fmt: on
