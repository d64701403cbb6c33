"""What the pool's ranks send each other directly."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fsdptool.distributed.direct_messages import DirectAllGather, DirectReduceScatter


def gathered_beside_gloo(dtype: str) -> tuple[int, list[bool]]:
    """Start three gathers before the first is waited for; compare each with gloo's own, bit for bit."""
    group, gather = dist.group.WORLD, DirectAllGather()
    assert group is not None
    ranks, rank = group.size(), group.rank()
    kind, device = getattr(torch, dtype), torch.device("cpu")
    generator = torch.Generator().manual_seed(rank)
    under_way: list[tuple[Any, torch.Tensor, torch.Tensor]] = []
    for size in (5, 70_001, 1):
        part = torch.randn(size, generator=generator).to(kind)
        output = gather.allocate((ranks * size,), dtype=kind, device=device)
        # FSDP hands in this rank's part of the output; a tensor of its own does as well.
        own = output.narrow(0, rank * size, size) if size > 1 else part
        own.copy_(part)
        under_way.append((gather(output, own, group, async_op=False), output, part))
    equal = []
    for work, output, part in reversed(under_way):
        work.wait()
        wanted = torch.empty_like(output)
        dist.all_gather_into_tensor(wanted, part)
        equal.append(torch.equal(output, wanted))
    return ranks, equal


def reduced_in_order(dtype: str) -> bool:
    """Compare with a sum made in the order of ranks, bit for bit."""
    group, scatter = dist.group.WORLD, DirectReduceScatter()
    assert group is not None
    ranks, kind = group.size(), getattr(torch, dtype)
    whole = [
        torch.randn(ranks * 1_003, generator=torch.Generator().manual_seed(rank)).to(kind)
        for rank in range(ranks)
    ]
    output = scatter.allocate((1_003,), dtype=kind, device=torch.device("cpu"))
    scatter(output, whole[group.rank()], group, dist.ReduceOp.SUM)
    rows = [part.view(ranks, -1)[group.rank()] for part in whole]
    wanted = rows[0]
    for row in rows[1:]:
        wanted = wanted + row
    return torch.equal(output, wanted)


def averaged() -> str:
    """Ask for what it cannot do."""
    try:
        DirectReduceScatter()(torch.empty(1), torch.ones(2), dist.group.WORLD, dist.ReduceOp.AVG)  # type: ignore[arg-type]
    except ValueError as error:
        return str(error)
    return "done"


def left_alone() -> str:
    """Rank 1 leaves; the others are told so while they wait for its part."""
    group = dist.group.WORLD
    assert group is not None
    connected = torch.zeros(1)
    if group.rank() == 1:
        dist.recv(connected, src=0)  # leaving while rank 0 still connects would fail its start instead
        dist.destroy_process_group()
        return "gone"
    dist.send(connected, dst=1)
    size = 1_000_000
    output = torch.zeros(group.size() * size)
    try:
        work = DirectAllGather()(output, output[:size], group)
        work.wait()
    except RuntimeError as error:
        dist.destroy_process_group()
        return str(error)
    return "done"
