"""The ranks that a launcher starts, as far as flags and the variables of a script say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsdptool.config.dialects.run_reader import Launch
from fsdptool.spelling import integer

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


def visible_devices(environment: Mapping[str, str]) -> int | None:
    """Return how many GPUs variables of a script show to its command; None: they do not say."""
    for name in _VISIBLE:
        listed = environment.get(name, "").strip(" ,")
        if re.fullmatch(r"[\w.-]+(?:\s*,\s*[\w.-]+)*", listed) and listed != "-1":
            return listed.count(",") + 1
    return None


def _takes_visible(launch: Launch, flags: Mapping[str, Any]) -> bool:
    """Whether a launcher starts a process on each GPU that its environment shows.

    accelerate 1.15 ``commands/launch.py``, which ``axolotl train`` runs; LLaMA-Factory 0.9.5 ``launcher.py``;
    deepspeed 0.18 ``launcher/runner.py``; torchrun's ``--nproc-per-node gpu``.
    """
    match launch.program:
        case "accelerate":
            return launch.unread is None and not {"config_file", "num_processes"} & flags.keys()
        case "deepspeed":
            return not {"num_gpus", "include", "exclude", "hostfile", "h"} & flags.keys()
        case "torchrun":
            return flags.get("nproc_per_node") in ("gpu", "auto")
        case "axolotl" | "llamafactory-cli" | "lmf":
            return True
        case "python":
            return launch.script == _CLI
    return False


_CLI = "llamafactory.cli"
"""The module behind ``llamafactory-cli``: it starts torchrun by itself."""


def ranks_of(environment: Mapping[str, str], each: int, nodes: int | None) -> tuple[int | None, int | None]:
    """Return the ranks and the nodes of so many processes a node; None where NNODES is not resolved.

    Args:
        environment: Variables of the script.
        each: Processes of a node.
        nodes: Nodes without that variable.
    """
    written = environment.get("NNODES")
    found = (nodes or 1) if written is None else integer(written)
    return None if found is None else each * found, found


def with_ranks(launch: Launch, flags: Mapping[str, Any], environment: Mapping[str, str]) -> Launch:
    """Return a launch with the ranks that variables of its script say where its flags leave them open."""
    if launch.script == _CLI and launch.program == "python":
        launch = replace(launch, processes=None, nodes=None)
    each = integer(environment.get("NPROC_PER_NODE"))
    if each is None and launch.processes is None and _takes_visible(launch, flags):
        each = visible_devices(environment)
    if launch.processes not in (None, 1) or each is None:
        return launch
    processes, nodes = ranks_of(environment, each, launch.nodes)
    return replace(launch, processes=processes, nodes=nodes)
