"""Clusters: from command-line figures or from a file (``schemas/cluster.schema.json``)."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdptool.errors import PlanError
from fsdptool.files.values import read_object
from fsdptool.planning.hardware import find_gpu, gpu_from_data
from fsdptool.records.cluster import Cluster, Gpu
from fsdptool.records.diagnostic import Diagnostic

_PREFIX = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_STEERS = re.compile(
    r"(LD|DYLD|PYTHON|BASH|SHELL|GIT|HF|FSDPTOOL)_?\w*|\w*PATH|\w*PLUGIN\w*|\w*_PROXY"
    r"|ENV|IFS|PS4|PROMPT_COMMAND",
    re.IGNORECASE,
)
"""Variables that tell a loader, a shell, Python, git or the Hub's client what to run or fetch."""
MAX_WORLD = 1 << 20
"""More ranks than any machine has: a typing error rather than a plan."""


@dataclass(frozen=True, slots=True)
class Offer:
    """One cluster and what was assumed to read it."""

    cluster: Cluster
    diagnostics: tuple[Diagnostic, ...] = ()


def make_cluster(
    gpu: Gpu | None,
    gpus_per_node: int,
    nodes: int = 1,
    *,
    inter_node_bandwidth: float | None = None,
    host_memory_bytes: int | None = None,
    price_per_gpu_hour: float | None = None,
    name: str | None = None,
    environment: dict[str, str] | None = None,
) -> Cluster:
    """Return a cluster after checking its figures.

    Args:
        gpu: What it is made of; None for CPU processes.
        gpus_per_node: GPUs (or CPU processes) in each node.
        nodes: Machines.
        inter_node_bandwidth: Bytes per second per GPU and direction between nodes.
        host_memory_bytes: Host memory of one node.
        price_per_gpu_hour: Price, in whatever currency offers are compared by.
        name: What the offer is called.
        environment: Exported on launch.

    Raises:
        PlanError: A count is not positive or beyond reason.
    """
    what = "GPUs" if gpu is not None else "processes"
    if gpus_per_node < 1:
        raise PlanError(
            f"{gpus_per_node} {what} per node: at least 1 is required", help="give --gpus 1 or more"
        )
    if nodes < 1:
        raise PlanError(f"{nodes} nodes: at least 1 is required", help="give --nodes 1 or more")
    if gpus_per_node * nodes > MAX_WORLD:
        raise PlanError(
            f"{gpus_per_node} x {nodes} = {gpus_per_node * nodes:,} ranks are more than is supported"
        )
    check_host_memory(host_memory_bytes)
    if price_per_gpu_hour is not None and not 0 <= price_per_gpu_hour < math.inf:
        raise PlanError(f"the price per GPU hour must be 0 or more, not {price_per_gpu_hour}")
    if inter_node_bandwidth is not None and not 0 < inter_node_bandwidth < math.inf:
        raise PlanError(
            f"the bandwidth between nodes must be positive, not {inter_node_bandwidth}",
            help="give --network '400 Gbit/s' (per GPU), or leave it out",
        )
    for variable, value in (environment or {}).items():
        _check_variable(variable)
        if not value.isprintable():
            raise PlanError(f"environment: the value of {variable} contains control characters")
    return Cluster(
        gpu=gpu,
        gpus_per_node=gpus_per_node,
        nodes=nodes,
        inter_node_bandwidth=inter_node_bandwidth,
        host_memory_bytes=host_memory_bytes,
        price_per_gpu_hour=price_per_gpu_hour,
        environment=environment or {},
        name=name,
    )


def read_cluster(path: Path, *, gpus_file: Path | None = None) -> Offer:
    """Return the cluster a YAML or JSON file describes; unnamed ones are called after the file.

    Raises:
        ConfigError: The file cannot be read or breaks the schema.
        PlanError: It names an unknown GPU.
    """
    return cluster_from_data(read_object(path, "cluster"), name=path.stem, gpus_file=gpus_file)


def cluster_from_data(data: Mapping[str, Any], *, name: str | None, gpus_file: Path | None = None) -> Offer:
    """Return the cluster that the checked data of a cluster file describes.

    Args:
        data: In the form of :class:`~fsdptool.records.cluster.ClusterFile`.
        name: What an offer is called that does not name itself.
        gpus_file: File with extra GPU definitions.

    Raises:
        PlanError: It names an unknown GPU, or a figure is not positive.
    """
    gpu, diagnostics = _gpu(data.get("gpu"), gpus_file)
    bandwidth = parse_rate(data.get("inter_node_bandwidth"))
    cluster = make_cluster(
        gpu,
        # 8.0 is an integer to JSON Schema.
        int(data["gpus_per_node"]),
        int(data.get("nodes", 1)),
        inter_node_bandwidth=bandwidth,
        host_memory_bytes=parse_size(data.get("host_memory")),
        price_per_gpu_hour=data.get("price_per_gpu_hour"),
        name=data.get("name", name),
        environment={key: _env(value) for key, value in data.get("environment", {}).items()},
    )
    return Offer(cluster, diagnostics)


def check_host_memory(size: int | None) -> None:
    """Check the host memory of one node, in bytes.

    Raises:
        PlanError: It is not positive.
    """
    if size is not None and size < 1:
        raise PlanError(
            f"the host memory must be positive, not {size}",
            help="give --host-memory '512 GiB' (per node), or leave it out",
        )


def describe(cluster: Cluster) -> str:
    """Return one cluster in words: ``2 x 8 H100-80GB-SXM`` or ``2 CPU processes``."""
    what = cluster.gpu.name if cluster.gpu is not None else "CPU processes"
    count = f"{cluster.nodes} x {cluster.gpus_per_node}" if cluster.nodes > 1 else str(cluster.gpus_per_node)
    return f"{count} {what}"


def parse_size(value: float | str | None) -> int | None:
    """Return bytes from ``2 TiB``, ``512GB`` or a number; None stays None.

    Raises:
        PlanError: The text is not a size.
    """
    if value is None:
        return None
    size: float | None = None
    if not isinstance(value, str):
        size = value
    elif match := re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]i?)?B?\s*", value):
        size = _number(match[1], value) * _factor(match[2])
    try:
        is_size = size is not None and math.isfinite(size)
    except OverflowError:  # A whole number that no float holds.
        is_size = False
    if size is None or not is_size:
        raise PlanError(f"{value!r} is not a size", help="write bytes, or text such as 512 GiB")
    # A whole number written as 2e12 is an integer to JSON Schema.
    return int(size)


def parse_rate(value: float | str | None) -> float | None:
    """Return bytes per second from ``50 GB/s``, ``400 Gbit/s`` or a number; None stays None.

    Raises:
        PlanError: The text is not a rate.
    """
    if value is None or isinstance(value, int | float):
        return float(value) if value is not None else None
    match = re.fullmatch(r"\s*([0-9.]+)\s*([KMGT]i?)?(B|bit|b)?(?:/s|ps)?\s*", value)
    if match is None:
        raise PlanError(
            f"{value!r} is not a rate", help="write bytes per second, or text such as 50 GB/s or 400 Gbit/s"
        )
    rate = _number(match[1], value) * _factor(match[2])
    return rate / 8 if match[3] in ("bit", "b") else rate


def _number(text: str, whole: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise PlanError(f"{whole!r} is not a number") from None


def _factor(prefix: str | None) -> int:
    return _BINARY.get(prefix or "", _PREFIX.get((prefix or ""), 1))


def _gpu(value: Any, gpus_file: Path | None) -> tuple[Gpu | None, tuple[Diagnostic, ...]]:
    if value is None:
        return None, ()
    if isinstance(value, str):
        match = find_gpu(value, gpus_file=gpus_file)
        return match.gpu, (match.diagnostic,) if match.diagnostic else ()
    return gpu_from_data(value), ()


def _check_variable(name: str) -> None:
    """Refuse what is not a variable of a shell, and what decides which programs and libraries run.

    Raises:
        PlanError: The name is one of them.
    """
    if re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name) is None:
        raise PlanError(
            f"environment: {name!r} is not a variable name", help="use letters, digits and underscores"
        )
    if _STEERS.fullmatch(name):
        raise PlanError(
            f"environment: {name} decides which code runs and is not taken from a cluster file",
            help="remove it from the file; export it yourself if you need it",
        )


def _env(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    return str(value)
