"""What the pool's ranks say about their process groups."""

from __future__ import annotations

import os
import resource
import time
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import checkpoint_cases
import torch
import torch.distributed as dist

from fsdptool.distributed.rendezvous import _allow_connections
from fsdptool.distributed.session import LongWait, open_session
from fsdptool.errors import WorkerError
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.sharding import FsdpSettings
from fsdptool.runs.watchdog import TIMEOUT


def mesh_facts(dims: dict[str, int]) -> dict[str, Any]:
    """Open a session whose collectives may take seven seconds; return its dimensions and their timeouts."""
    with mock.patch.dict(os.environ, {TIMEOUT: "7"}):
        session = open_session(FsdpSettings(use_cpu=True, mesh=ParallelDims(**dims)))
    groups = [*session.mesh.get_all_groups(), *session.shard_mesh.get_all_groups()]
    groups += [session.data_group] if session.data_group is not None else []
    cpu = torch.device("cpu")
    return {
        "names": session.mesh.mesh_dim_names,
        "timeouts": {group._get_backend(cpu).options._timeout.total_seconds() for group in groups},
    }


def open_files(folder: str) -> dict[str, int]:
    """Return how many files a group and a checkpointer add, and the limits afterwards."""
    counts = [_open_files()]
    group = dist.new_group(backend="gloo")
    counts.append(_open_files())
    saver = checkpoint_cases.checkpointer(folder)
    counts.append(_open_files())
    saver.close()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    _allow_connections(dist.get_world_size())
    return {
        "group": counts[1] - counts[0],
        "checkpointer": counts[2] - counts[1],
        "ranks": dist.get_world_size(group),
        "soft": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "hard": hard,
    }


def _open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def wait_long(reports: bool) -> str | None:
    """Let rank 1 work for longer than a collective may take, with or without reports; return the error."""
    # Only work that is reported must outlast a collective; on a busy machine a meeting may take a second.
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1 if reports else 60))
    # Without reports the ranks differ in patience, as the clocks of two machines do by a little.
    pace = LongWait(group, patience=1.0 if reports or dist.get_rank() == 0 else 30.0)
    pace.begin()
    if dist.get_rank() == 1:
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            time.sleep(0.1)
            if reports:
                pace.report()
    try:
        pace.wait()
    except WorkerError as error:
        return error.message
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return None
