"""The machine's table: what no trace can see (context, communicators, efficiencies), and its source.

Shipped values are assumptions with a source; ``fsdptool calibrate`` replaces them by measurements in a
file that is only read when named (``--machine``), so that equal inputs give equal plans everywhere.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fsdptool.errors import PlanError
from fsdptool.records.cluster import Cluster, Gpu, Machine
from fsdptool.records.codec import from_json, to_json

_DATA = Path(__file__).parent / "data" / "machines.json"


def machine_for(gpu: Gpu | None, *, table: Path | None = None) -> Machine:
    """Return the figures for a GPU: the named table's first, then the shipped ones.

    The most specific match wins: catalogue name, then link kind, then ``*``.

    Raises:
        PlanError: ``table`` cannot be used.
    """
    rows = (read_table(table) if table is not None else ()) + _shipped()
    keys = (gpu.name, gpu.link, "*") if gpu is not None else ("cpu", "*")
    for key in keys:
        for row in rows:
            if row.match.lower() == key.lower():
                return row
    raise PlanError("the machine table has no row that matches everything ('*')")  # pragma: no cover


def read_table(path: Path) -> tuple[Machine, ...]:
    """Return the rows of a machine table.

    Raises:
        ConfigError: The file is missing or malformed.
    """
    from fsdptool.files.values import read_object

    data = read_object(path, "machine")
    return tuple(
        from_json(Machine, row, where=f"{path}: machines[{i}]") for i, row in enumerate(data["machines"])
    )


def write_table(rows: tuple[Machine, ...]) -> str:
    """Return the table as text, in the form :func:`read_table` reads."""
    return json.dumps({"version": 1, "machines": [to_json(row) for row in rows]}, indent=1) + "\n"


@cache
def _shipped() -> tuple[Machine, ...]:
    rows = json.loads(_DATA.read_text(encoding="utf-8"))["machines"]
    return tuple(from_json(Machine, row) for row in rows)


@dataclass(frozen=True, slots=True)
class Overhead:
    """Memory the allocator never sees, by name."""

    context: int
    communicators: int
    groups: int


def overhead(machine: Machine, cluster: Cluster, *, groups: int) -> Overhead:
    """Return one rank's memory outside torch's allocator.

    Args:
        machine: The table's row.
        cluster: One GPU needs no communicator.
        groups: Process groups the run communicates over.
    """
    if cluster.gpu is None:
        return Overhead(0, 0, 0)
    groups = groups if cluster.world_size > 1 else 0
    communicators = (
        machine.communicator_bytes + (groups - 1) * machine.further_communicator_bytes if groups else 0
    )
    return Overhead(machine.context_bytes, communicators, groups)


_THREADS = 2
"""Threads that multiply matrices: the one that runs forward and autograd's own for the device."""


def expands(cluster: Cluster) -> bool:
    """Return whether the run's environment switches expandable segments on."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return any("expandable_segments:true" in cluster.environment.get(name, "").lower() for name in names)


def workspaces(cluster: Cluster) -> tuple[int, ...]:
    """Return the bytes of each workspace cuBLAS keeps: one for every thread that has used it.

    torch takes them from its own allocator at the first product and never gives them back (2.13,
    ``CublasHandlePool.cpp``; cuBLASLt shares them). ``CUBLAS_WORKSPACE_CONFIG``, pairs of KiB and
    count, changes their size.
    """
    if cluster.gpu is None:
        return ()
    pairs = re.findall(r":(\d+):(\d+)", cluster.environment.get("CUBLAS_WORKSPACE_CONFIG", ""))
    size = sum(1024 * int(each) * int(count) for each, count in pairs) if pairs else None
    return (cluster.gpu.workspace_bytes if size is None else size,) * _THREADS
