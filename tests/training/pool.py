"""A pool of ranks that lives as long as the test session: importing torch once, not once per test.

A case is an importable function. ``pool.run(function, world, *args)`` calls it on ``world`` ranks,
each with a fresh gloo process group, and returns what each rank returned. If a rank raises, or
nobody answers in time, the ranks are ended and started anew for the next case.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

SIZE = 4

PRELOAD = [
    *("torch.distributed.fsdp", "torch.distributed.tensor", "torch._dynamo", "peft"),
    *("transformers.modeling_utils", "transformers.models.llama.modeling_llama"),
    *(f"transformers.models.{name}.modeling_{name}" for name in ("bert", "mixtral", "qwen3_moe", "t5")),
    *("diffusers.models.transformers.transformer_sd3", "diffusers.models.unets.unet_2d_condition"),
    *("fsdptool.training.trainer", "fsdptool.inspection.api"),
]
"""Modules that the server of the ranks imports, once for all of them."""


def _serve(connection: Connection, rank: int) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    gc.freeze()  # what the libraries made stays: collecting after each case then costs next to nothing
    while True:
        try:
            case = connection.recv()
        except EOFError:
            return
        if case is None:
            _forget_groups()
            connection.send(None)
            continue
        function, world, store, args = case
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
        try:
            dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
            result = function(*args)
            if dist.is_initialized():  # a whole run leaves its group by itself
                dist.barrier()
            connection.send((True, result))
            del result
        except BaseException:
            connection.send((False, traceback.format_exc()))
            return


def _forget_groups() -> None:
    """Let go of the process groups that a case made, whose sockets the other ranks have closed.

    Until they are collected, gloo's threads poll those sockets (torch 2.13). What the case made refers to
    itself; DTensor's caches keep every mesh by which they first saw a shape, and a mesh its groups.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    if dist.is_initialized():
        dist.destroy_process_group()
    for thing in gc.get_objects():
        if type(thing) is DeviceMesh:
            thing._pg_registry.clear()
    gc.collect()


class Pool:
    """Up to four ranks over gloo."""

    def __init__(self) -> None:
        self._ranks: list[tuple[Any, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="fsdptool-pool-")
        self._cases = 0

    def run(self, function: Callable[..., Any], world: int, *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call ``function(*args)`` on ``world`` ranks and return their results in rank order."""
        self._start()
        self._cases += 1
        store = str(Path(self._folder.name, f"store-{self._cases}"))
        ranks = self._ranks[:world]
        for _, connection in ranks:
            connection.send((function, world, store, args))
        results: list[Any] = [None] * world
        pending = {connection: rank for rank, (_, connection) in enumerate(ranks)}
        deadline = time.monotonic() + timeout
        while pending:
            ready = wait(list(pending), timeout=max(deadline - time.monotonic(), 0.0))
            if not ready:
                self.close()
                raise TimeoutError(f"ranks {sorted(pending.values())} did not answer within {timeout} s")
            for connection in cast("list[Connection]", ready):
                rank = pending.pop(connection)
                try:
                    good, value = connection.recv()
                except EOFError:
                    good, value = False, "the process died"
                if not good:
                    others = self._failures(pending)
                    self.close()
                    raise AssertionError("\n".join([f"rank {rank}: {value}", *others]))
                results[rank] = value
        # One after the other: gloo's thread of a rank crashes now and then if a connection is closed by its
        # peer while the rank itself takes it down.
        for _, connection in ranks:
            connection.send(None)
            connection.recv()
        return results

    def _failures(self, pending: dict[Any, int]) -> list[str]:
        """Give the other ranks a moment to fail, too: theirs may be the cause."""
        found = []
        for connection in cast("list[Connection]", wait(list(pending), timeout=1.0)):
            try:
                good, value = connection.recv()
            except EOFError:
                continue
            if not good:
                found.append(f"rank {pending[connection]}: {value}")
        return found

    def _start(self) -> None:
        if self._ranks:
            return
        # One server imports the heavy libraries; ranks are forked from it, before it has threads.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def close(self) -> None:
        """End the ranks; the next case starts new ones."""
        for process, connection in self._ranks:
            connection.close()
            process.kill()
            process.join()
        self._ranks = []
