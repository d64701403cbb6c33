"""A rank's rows, described as its part of a sharded tensor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor


def sharded_like(rows: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return ``rows`` as this rank's part of a tensor cut as ``whole`` is; as they are if that is not cut."""
    if not isinstance(whole, DTensor):
        return rows
    return DTensor.from_local(
        rows,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
