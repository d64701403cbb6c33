"""The ranks that a launcher starts, as far as flags and the variables of a script say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fsdptool.config.dialects.run_reader import Launch
from fsdptool.config.dialects.trainer.run import mesh_of_accelerate
from fsdptool.spelling import integer

_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ASCEND_RT_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")


_DEVICE = r"(?:\d+|(?:GPU|MIG)-[\w/-]+)"
_DEVICES = re.compile(rf"{_DEVICE}(?:\s*,\s*{_DEVICE})*")
_FACTORY = ("llamafactory-cli", "lmf")
_CLI = "llamafactory.cli"
"""The module behind ``llamafactory-cli``: it starts torchrun by itself."""


def visible_devices(environment: Mapping[str, str]) -> int | None:
    """Return how many GPUs variables of a script show to its command; None: they do not say."""
    for name in _VISIBLE:
        listed = environment.get(name, "").strip(" ,")
        if _DEVICES.fullmatch(listed):
            return listed.count(",") + 1
    return None


def counted(value: object) -> int | None:
    """Return a number of processes or of nodes, which is positive, or None."""
    number = integer(value)
    return number if number is not None and number > 0 else None


def ranks_of(environment: Mapping[str, str], each: int | None) -> tuple[int | None, int | None]:
    """Return the ranks and the nodes that NPROC_PER_NODE and NNODES say; None where one is not resolved.

    Args:
        environment: Variables of the command.
        each: Processes of a node without NPROC_PER_NODE.
    """
    each = counted(environment["NPROC_PER_NODE"]) if "NPROC_PER_NODE" in environment else each
    nodes = counted(environment.get("NNODES", 1))
    return (None if nodes is None or each is None else each * nodes), nodes


def on_ranks(launch: Launch, flags: Mapping[str, Any], per_node: str, nodes: str) -> Launch:
    """Return a launch with the processes and the nodes that two flags give."""
    ranks = counted(flags.get(per_node))
    machines = counted(str(flags.get(nodes, "1")).split(":")[-1])
    processes = None if ranks is None or machines is None else ranks * machines
    return replace(launch, processes=processes, nodes=machines)


def with_ranks(
    launch: Launch, flags: Mapping[str, Any], environment: Mapping[str, str], *, open_ended: bool = False
) -> Launch:
    """Return a launch with the ranks that variables of its script say where its flags leave them open.

    accelerate 1.15 ``commands/launch.py``, which ``axolotl train`` runs (its number of processes is that of
    all nodes); LLaMA-Factory 0.9.5 ``launcher.py``; deepspeed 0.18 ``launcher/runner.py``; torchrun's
    ``--nproc-per-node gpu``; ms-swift 4.6 ``cli/main.py``.

    Args:
        launch: The launch, as its flags say it.
        flags: These flags.
        environment: Variables of the command.
        open_ended: Whether a variable may hold further flags.
    """
    visible = visible_devices(environment)
    if launch.program in _FACTORY or (launch.program == "python" and launch.script == _CLI):
        processes, nodes = ranks_of(environment, visible)
        return replace(launch, processes=processes, nodes=None if processes is None else nodes)
    if launch.program in ("swift", "megatron"):
        said = {"NPROC_PER_NODE"} if launch.program == "megatron" else {"NPROC_PER_NODE", "NNODES"}
        if not said & environment.keys():
            return launch
        processes, nodes = ranks_of(environment, 1)
        return replace(launch, processes=processes, nodes=nodes)
    if open_ended or launch.processes is not None or visible is None:
        return launch
    match launch.program:
        case "axolotl":
            return replace(launch, processes=visible, nodes=1)
        case "accelerate":
            if launch.unread is not None or {"config_file", "num_processes", "cpu"} & flags.keys():
                return launch
            return replace(launch, processes=visible, nodes=launch.nodes if "num_machines" in flags else 1)
        case "deepspeed":
            given = {"num_gpus", "include", "i", "exclude", "e", "hostfile", "h", "num_nodes"} & flags.keys()
            return launch if given else replace(launch, processes=visible, nodes=1)
        case "torchrun":
            if flags.get("nproc_per_node") in ("gpu", "auto") and launch.nodes is not None:
                return replace(launch, processes=visible * launch.nodes)
    return launch


def set_by_accelerate(
    launch: Launch, flags: Mapping[str, Any], data: Mapping[str, Any], named: bool = True
) -> Launch:
    """Return what flags of ``accelerate launch``, and the settings of its file under them, set."""
    block = data.get("fsdp_config")
    settings = {**(block if isinstance(block, dict) else {})}
    settings |= {key: value for key, value in flags.items() if key.startswith("fsdp_")}
    kind = str(data.get("distributed_type", "NO")).upper()
    processes = integer(flags.get("num_processes", data.get("num_processes")))
    if processes is None and not named and not flags.keys() & {"multi_gpu", "use_fsdp"}:
        gpus = flags.get("gpu_ids")
        processes = len(str(gpus).split(",")) if gpus not in (None, "all", True) else None
    precision = flags.get("mixed_precision", data.get("mixed_precision"))
    inner = data.get("dynamo_config")
    inner = inner if isinstance(inner, dict) else {"dynamo_backend": data.get("dynamo_backend")}
    dynamo = inner.get("dynamo_backend", inner.get("backend"))  # accelerate's launcher takes both
    launch = replace(
        launch,
        compiles=str(flags.get("dynamo_backend", dynamo)).lower() not in ("none", "no", "false"),
        processes=processes,
        nodes=integer(flags.get("num_machines", data.get("num_machines"))),
        mixed_precision=None if precision is None else str(precision),
        deepspeed=kind == "DEEPSPEED" or "use_deepspeed" in flags,
    )
    if kind != "FSDP" and "use_fsdp" not in flags:
        return launch
    wrapped = settings.get("fsdp_transformer_layer_cls_to_wrap")
    classes = tuple(part.strip() for part in str(wrapped).split(",")) if wrapped else None
    return replace(
        launch,
        mesh=mesh_of_accelerate(data.get("parallelism_config")),
        fsdp=2 if str(settings.get("fsdp_version", 1)) == "2" else 1,
        wrap_classes=classes,
        reshard=str(settings.get("fsdp_reshard_after_forward", True)).lower() not in ("false", "no_shard"),
        cpu_offload=str(settings.get("fsdp_offload_params", False)).lower() == "true",
        checkpointing=str(settings.get("fsdp_activation_checkpointing", False)).lower() == "true",
    )
