"""Proof that a model is sharded: a run's before its first step, and a small one for ``fsdptool doctor``."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdptool.distributed.materialize import rows_of
from fsdptool.distributed.rendezvous import join
from fsdptool.distributed.shard import local, managed_names, require, sharded_modules
from fsdptool.modeling.methods.quantised_layers import describe_base
from fsdptool.records.sharding import Unit, UnitPlan

if TYPE_CHECKING:
    from fsdptool.distributed.session import Session


_EXAMPLES = 4


def prove(model: nn.Module, plan: UnitPlan, session: Session) -> dict[str, Any]:
    """Check units, placements, shard sizes and replicas on every rank.

    Args:
        model: Materialised.
        plan: What it should be.
        session: This rank.

    Returns:
        Plain data for ``summary.json``: counts, bytes per rank, examples with placements per rank.

    Raises:
        WorkerError: Something differs; the message names the parameter or unit.
    """
    names = dict(model.named_parameters(remove_duplicate=False))
    _check_units(model, plan)
    _check_placements(names, plan, session)
    replicated = _check_replicas(names, plan, session)
    return _summary(model, names, plan, session, replicated)


def _check_units(model: nn.Module, plan: UnitPlan) -> None:
    listed = 0
    for unit in plan.units:
        module = model.get_submodule(unit.modules[0])
        require(isinstance(module, FSDPModule), f"unit {unit.id} is not sharded")
        assert isinstance(module, FSDPModule)
        managed = set(managed_names(model, module))
        for parameter in unit.parameters:
            match = managed.intersection(parameter.names)
            require(bool(match), f"{parameter.fqn} is not in unit {unit.id}")
            managed -= match
        require(not managed, f"unit {unit.id} also manages {sorted(managed)[:1]}")
        listed += len(unit.parameters)
    states = {id(module._get_fsdp_state()) for module in sharded_modules(model)}
    require(len(states) == len(plan.units), f"{len(states)} units exist, {len(plan.units)} are planned")
    actual = sum(1 for _ in model.parameters())
    expected = listed + len(plan.ignored)
    require(actual == expected, f"the model has {actual} parameters, the plan lists {expected}")


def _check_placements(names: Mapping[str, torch.Tensor], plan: UnitPlan, session: Session) -> None:
    hybrid = session.dims.dp_replicate > 1
    expected: tuple[Placement, ...] = (Replicate(), Shard(0)) if hybrid else (Shard(0),)
    for unit in plan.units:
        for listed in unit.parameters:
            parameter = names.get(listed.fqn)
            require(isinstance(parameter, DTensor), f"{listed.fqn} is not a sharded parameter of the model")
            assert isinstance(parameter, DTensor)
            require(tuple(parameter.placements) == expected, f"{listed.fqn} is placed {parameter.placements}")
            require(
                tuple(parameter.shape) == listed.shape, f"{listed.fqn} has shape {tuple(parameter.shape)}"
            )
            require(parameter.requires_grad == listed.trainable, f"{listed.fqn} has the wrong requires_grad")
            first, last = rows_of(parameter)
            shard = local(parameter)
            require(shard.shape == (last - first, *listed.shape[1:]), f"{listed.fqn}: wrong rows")
            require(not shard.is_meta, f"{listed.fqn} has no values")
    for listed in plan.ignored:
        parameter = names.get(listed.fqn)
        require(parameter is not None, f"{listed.fqn} is not in the model")
        require(not isinstance(parameter, DTensor), f"{listed.fqn} should be whole on every rank")


def _check_replicas(names: dict[str, nn.Parameter], plan: UnitPlan, session: Session) -> str:
    """Compare hashes of whole parameters over all ranks, and of shards over HSDP's replicas."""
    whole = hashlib.blake2b(digest_size=16)
    for listed in plan.ignored:
        whole.update(content(names[listed.fqn]))
    shards = hashlib.blake2b(digest_size=16)
    if session.dims.dp_replicate > 1:
        for unit in plan.units:
            for listed in unit.parameters:
                shards.update(content(local(names[listed.fqn])))
    mine = (whole.hexdigest(), shards.hexdigest())
    everyone: list[Any] = [mine]
    if session.world_size > 1:
        everyone = [None] * session.world_size
        dist.all_gather_object(everyone, mine)
    require(len({item[0] for item in everyone}) == 1, "replicated parameters differ between ranks")
    for position in range(session.dims.stride("dp_replicate")):
        copies = {everyone[rank][1] for rank in session.dims.group(position, "dp_replicate")}
        require(len(copies) == 1, f"replicas of shard {position} differ")
    return mine[0]


def content(tensor: torch.Tensor) -> bytes:
    """Return a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def _summary(
    model: nn.Module, names: dict[str, nn.Parameter], plan: UnitPlan, session: Session, replicated: str
) -> dict[str, Any]:
    unique = {id(parameter): parameter for parameter in names.values()}
    mine = sum(local(p).numel() * p.element_size() for p in unique.values())
    gathered: list[Any] = [mine]
    examples = [parameter.fqn for parameter in _example_unit(plan).parameters[:_EXAMPLES]]
    shapes: list[Any] = [[list(local(names[name]).shape) for name in examples]]
    if session.world_size > 1:
        gathered, shapes = [None] * session.world_size, [None] * session.world_size
        dist.all_gather_object(gathered, mine)
        dist.all_gather_object(shapes, [list(local(names[name]).shape) for name in examples])
    placements = Counter(str(list(getattr(p, "placements", ("whole",)))) for p in unique.values())
    return {
        "proven": True,
        "units": len(plan.units),
        "parameters": len(unique),
        "elements": sum(p.numel() for p in unique.values()),
        "placements": dict(placements),
        "replicated": len(plan.ignored),
        "replicated_hash": replicated if plan.ignored else None,
        "quantised": describe_base(model),
        "local_bytes": gathered,
        "examples": [
            {
                "fqn": name,
                "shape": list(names[name].shape),
                "placements": [str(p) for p in getattr(names[name], "placements", ())],
                "local_shapes": [rank[index] for rank in shapes],
            }
            for index, name in enumerate(examples)
        ],
    }


def _example_unit(plan: UnitPlan) -> Unit:
    blocks = [unit for unit in plan.units if unit.kind == "block"]
    return blocks[0] if blocks else plan.units[-1]


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
    folder, device_type = Path(arguments[0]), arguments[1]
    found = probe(device_type)
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
