"""FSDP's collectives over gloo: each rank sends its part straight to every other.

torch 2.13's gloo gathers into a flat buffer of the output's size and copies it out, makes a
reduce-scatter of an all-reduce on a clone of the input (``ProcessGroupGloo.cpp``), and FSDP2 waits
for each gather before it goes on, since a CPU has no streams. Sent directly, a gather needs no
buffer and travels while the unit before it computes, and a reduction moves half the bytes. What they
hold is said in ``memory/simulation/collectives.py``, which the memory plan reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from fsdptool.memory.simulation.collectives import received as received_size

_GATHER_TAG, _REDUCE_TAG = 1, 2
"""Messages between two ranks arrive in the order they were sent, tag by tag."""


class Transfers(dist.Work):
    """Sends and receives in flight, waited for together; they keep their tensors alive."""

    def __init__(self, works: Sequence[dist.Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait for all; a rank that has gone raises the backend's error."""
        for work in self._works:
            work.wait(timeout)
        return True


class _Direct:
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for an input or an output."""
        return torch.empty(*size, dtype=dtype, device=device)


class DirectAllGather(_Direct):
    """Fills each rank's part of the output from the rank that owns it, without waiting."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work:
        """Start gathering ``input_tensor`` of every rank of ``group``; FSDP waits before it copies out.

        Args:
            output_tensor: ``ranks x n`` elements, in the order of ranks.
            input_tensor: ``n`` elements; usually this rank's part of the output already.
            group: The ranks.
            async_op: Not asked: what is returned is always still under way.
        """
        parts = output_tensor.view(group.size(), -1)
        mine = parts[group.rank()]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor.view_as(mine))
        return Transfers(
            _exchange({peer: (mine, parts[peer]) for peer in _others(group)}, group, _GATHER_TAG)
        )


class DirectReduceScatter(_Direct):
    """Sends every rank its rows of the input and sums what the others sent, in the order of ranks."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write the sum over ``group`` of this rank's part of ``input_tensor``.

        Args:
            output_tensor: ``n`` elements.
            input_tensor: ``ranks x n`` elements, in the order of ranks.
            group: The ranks.
            op: Must be a sum: :func:`fsdptool.distributed.shard.shard` asks FSDP for sums only.
            async_op: Not asked: FSDP reads the output at once.

        Raises:
            ValueError: Something else than a sum is asked for.
        """
        if op != dist.ReduceOp.SUM:
            raise ValueError(f"gradients are summed here, not reduced by {op}")
        parts = input_tensor.view(group.size(), -1)
        rank, others = group.rank(), _others(group)
        received = parts.new_empty(received_size(parts.numel(), group.size())).view(len(others), -1)
        came = dict(zip(others, received, strict=True))
        Transfers(_exchange({peer: (parts[peer], came[peer]) for peer in others}, group, _REDUCE_TAG)).wait()
        came[rank] = parts[rank]
        # Every rank adds in the same order, so that a run repeats itself bit for bit.
        torch.add(came[0], came[1], out=output_tensor.view(-1))
        for peer in range(2, group.size()):
            output_tensor.view(-1).add_(came[peer])


def supports_direct_messages(device: torch.device) -> bool:
    """Return whether the ranks on ``device`` exchange parts by sends and receives."""
    return device.type == "cpu" and dist.get_backend() == "gloo"


def send_directly(module: FSDPModule) -> None:
    """Let ``module``'s unit gather and reduce by direct messages; its ranks share a CPU backend."""
    module.set_custom_all_gather(DirectAllGather())  # type: ignore[arg-type]
    module.set_custom_reduce_scatter(DirectReduceScatter())  # type: ignore[arg-type]


def _others(group: dist.ProcessGroup) -> list[int]:
    return [peer for peer in range(group.size()) if peer != group.rank()]


def _exchange(
    messages: dict[int, tuple[torch.Tensor, torch.Tensor]], group: dist.ProcessGroup, tag: int
) -> list[dist.Work]:
    """Start a send and a receive for each peer, a rank within ``group``: what goes, where it comes to."""
    receives = [group.recv([to], peer, tag) for peer, (_, to) in messages.items()]
    return receives + [group.send([what], peer, tag) for peer, (what, _) in messages.items()]
