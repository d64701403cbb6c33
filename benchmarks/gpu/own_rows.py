"""FSDP's collectives among ranks that do not exist, with real values: the others hold what this one holds.

torch's ``fake`` backend leaves gathered parameters and reduced gradients as memory happened to be. A GPU
computes faster on zeros and on equal bits, because its clock follows its power, and behind NaN everything is
NaN. Here each part of a gathered parameter is this rank's own rows, and a reduced gradient this rank's own
part of the input: real values, with their real statistics. Copies take memory bandwidth, as receiving does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule


class _Memory:
    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for an input or an output."""
        return torch.empty(*size, dtype=dtype, device=device)


class OwnAllGather(_Memory):
    """Fills each part of the output with this rank's own."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather ``ranks x n`` elements of ``n``, on the current stream."""
        parts = output_tensor.view(group.size(), -1)
        mine = parts[group.rank()]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor.view_as(mine))
        for rank in range(group.size()):
            if rank != group.rank():
                parts[rank].copy_(mine)


class OwnReduceScatter(_Memory):
    """Takes this rank's own part of the input for the reduced one."""

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Write ``n`` of ``ranks x n`` elements."""
        output_tensor.view(-1).copy_(input_tensor.view(group.size(), -1)[group.rank()])


def use_own_rows(model: nn.Module) -> None:
    """Let every unit of a sharded model gather and reduce so."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(OwnAllGather())  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(OwnReduceScatter())  # type: ignore[arg-type]
