"""A run on several machines, whoever starts it, and the command line of each node. Torch-free."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fsdptool.errors import ConfigError

FIRST_NODE = "node0"
"""What stands for the first node until somebody names it."""
PORT = 29500


@dataclass(frozen=True, slots=True)
class MultiNodeJob:
    """What a multi-node run needs to know.

    Attributes:
        recipe, config, output: As ``fsdptool train`` takes them; on a file system all nodes see.
        nodes: Machines.
        per_node: Processes (GPUs) on each.
        gpus: Whether the processes need GPUs.
        variables: Exported before the launch (NCCL settings of the cluster description).
        options: Further options of ``fsdptool train``, as they are typed.
    """

    recipe: Path
    config: Path
    output: Path
    nodes: int
    per_node: int
    gpus: bool
    variables: Mapping[str, str]
    options: tuple[str, ...] = ()


def train_line(job: MultiNodeJob, rank: str, endpoint: str, launch_id: str) -> str:
    """Return the command one node runs; the three arguments are shell expressions, already quoted."""
    for what, text in (("recipe", job.recipe), ("configuration", job.config), ("run folder", job.output)):
        check_printable(f"the path of the {what}", str(text))
    fixed = ["fsdptool", "train", str(job.recipe), "--config", str(job.config), "--output", str(job.output)]
    line = shlex.join([*fixed, "--resume", "auto", *job.options])
    if job.nodes == 1:
        return line
    return f"{line} --node-rank {rank} --rendezvous {endpoint} --launch-id {launch_id}"


def check_printable(what: str, text: str) -> None:
    """Refuse what would begin a line of its own in a script.

    Raises:
        ConfigError: ``text`` holds a control character.
    """
    if not text.isprintable():
        raise ConfigError(f"{what} {text!r} contains control characters", help="rename it")


def random_id() -> str:
    """Return a launch ID that cannot be guessed."""
    return secrets.token_hex(8)


def node_lines(job: MultiNodeJob, host: str, launch_id: str) -> list[str]:
    """Return the command line of every node, for a person who starts them by hand.

    Args:
        job: The run.
        host: Name or address of node 0 that the others reach.
        launch_id: Identical on all nodes, unique per launch.
    """
    check_printable("--host", host)
    check_printable("--launch-id", launch_id)
    prefix = [f"{name}={shlex.quote(value)}" for name, value in sorted(job.variables.items())]
    endpoint = shlex.quote(host if ":" in host else f"{host}:{PORT}")
    return [
        " ".join([*prefix, train_line(job, str(rank), endpoint, shlex.quote(launch_id))])
        for rank in range(job.nodes)
    ]
