"""A small proof for ``fsdptool doctor``: FSDP2 shards and trains here as a plain loop does."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from fsdptool.distributed.rendezvous import join
from fsdptool.garbage import skip_last_collection

_STEPS = 3
_WIDTH = 8
_TOLERANCE = 1e-5


def probe(device_type: str) -> dict[str, Any]:
    """Shard a small model over all ranks, train it, and compare with the same model unsharded.

    Returns:
        ``sharded`` (every parameter is a DTensor with half its rows on each rank), ``equal`` (weights
        after three steps equal the plain loop's), ``difference`` (largest) and ``backend``.
    """
    rank = int(os.environ["LOCAL_RANK"])
    device = torch.device(device_type, rank) if device_type == "cuda" else torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(device)
    join("nccl" if device_type == "cuda" else "gloo")
    mesh = init_device_mesh(device_type, (dist.get_world_size(),))
    plain, sharded = _model().to(device), _model().to(device)
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    rows = [
        isinstance(p, DTensor) and p.to_local().shape[0] * dist.get_world_size() == p.shape[0]
        for p in sharded.parameters()
    ]
    batches = torch.randn(
        _STEPS, 2 * dist.get_world_size(), _WIDTH, generator=torch.Generator().manual_seed(1)
    )
    mine = batches.to(device)[:, dist.get_rank() :: dist.get_world_size()]
    _train(plain, batches.to(device))
    _train(sharded, mine)
    difference = max(
        float((p.full_tensor() - q).abs().max()) if isinstance(p, DTensor) else float((p - q).abs().max())
        for p, q in zip(sharded.parameters(), plain.parameters(), strict=True)
    )
    backend = dist.get_backend()
    dist.destroy_process_group()
    return {
        "backend": backend,
        "sharded": all(rows),
        "equal": difference <= _TOLERANCE,
        "difference": difference,
    }


def _model() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.Tanh()) for _ in range(2)))


def _train(model: Any, batches: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def main(arguments: list[str]) -> int:
    """Write what this rank found to ``FOLDER/rank-N.json``."""
    skip_last_collection()
    folder, device_type = Path(arguments[0]), arguments[1]
    found = probe(device_type)
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: what was found is written, and torch's threads can abort while the interpreter ends.
    os._exit(status)
