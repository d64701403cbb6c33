"""What a cluster's environment variables change in a rank's memory. Read from the offer, never from here."""

from __future__ import annotations

import re

from fsdptool.records.cluster import Cluster

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
