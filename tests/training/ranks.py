"""What the pool's ranks run."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch
from cases import CASES, MICRO_BATCHES, STEPS, inputs_for, micro_batch
from torch.distributed.tensor import DTensor

from fsdptool.distributed.proof import content
from fsdptool.distributed.session import Session, open_session
from fsdptool.modeling.tensor_parallel import by_name
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.recipe import Recipe
from fsdptool.training.checkpoint.split_tensors import Division, SplitTensor
from fsdptool.training.state import Assembled
from fsdptool.training.trainer import assemble


def replica_hash(tensors: list[torch.Tensor]) -> str:
    """Return one hash of several whole tensors, to compare between ranks."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(content(tensor))
    return digest.hexdigest()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor on every rank, as a copy."""
    if isinstance(tensor, SplitTensor):
        return tensor.whole()
    gathered = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return gathered.detach().clone()


def weights_of(assembled: Assembled, division: Division | None = None) -> dict[str, torch.Tensor]:
    """Gather every parameter, under every name."""
    named = assembled.model.named_parameters(remove_duplicate=False)
    tensors = {f"model/{name}": parameter.detach() for name, parameter in named}
    divided = division.wrap(tensors) if division is not None else tensors
    return {name.removeprefix("model/"): whole(value) for name, value in divided.items()}


def share(session: Session, step: int, name: str, count: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Return this rank's micro-batches of a global step."""
    mine = [i for i in range(count) if i % session.data_ranks == session.data_rank]
    batches = [micro_batch(CASES[name], step, index) for index in mine]
    return [
        {key: value.to(dtype) if value.is_floating_point() else value for key, value in batch.items()}
        for batch in batches
    ]


def train(
    name: str,
    folder: Path,
    recipe: Recipe,
    mesh: ParallelDims | None = None,
    steps: int = STEPS,
    count: int = MICRO_BATCHES,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train a case and return losses, norms and weights before and after (rank 0 only)."""
    torch.manual_seed(recipe.seed)
    inputs = inputs_for(CASES[name], folder, recipe, mesh=mesh, **(settings or {}))
    session = open_session(inputs.settings, recipe.sharding.expert_parallel)
    assembled = assemble(inputs, session)
    division = Division(session.tensor, by_name(inputs.units.placements))
    before = weights_of(assembled, division)
    teacher = getattr(assembled.stepper.micro_loss, "teacher", None)
    taught = (
        {}
        if teacher is None
        else {n: whole(p) for n, p in teacher.model.named_parameters(remove_duplicate=False)}
    )
    dtype = torch.float64 if recipe.model.dtype == "float64" else torch.float32
    losses, norms = [], []
    for step in range(steps):
        outcome = assembled.stepper.run(share(session, step, name, count, dtype), rate=assembled.rate)
        losses.append(outcome.loss)
        norms.append(outcome.grad_norm)
    after = weights_of(assembled, division)
    main = session.is_main
    return {
        "losses": losses,
        "norms": norms,
        "before": before if main else None,
        "after": after if main else None,
        "teacher": taught if main else None,
        "hash": replica_hash([after[key] for key in sorted(after)]),
        "proof": assembled.proof,
        "units": [dataclasses.asdict(unit)["id"] for unit in inputs.units.units],
    }
