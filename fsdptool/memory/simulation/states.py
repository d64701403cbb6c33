"""What a rank holds between steps: shards, optimizer states, buffers; and what the update adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fsdptool.memory.simulation.groups import Rank
from fsdptool.memory.simulation.ledger import (
    EMA,
    OPTIMIZER,
    OPTIMIZER_TEMPORARIES,
    PARAMETERS,
    REPLICATED,
    Block,
)
from fsdptool.memory.simulation.sizes import WIDTH, Weights, pinned, rounded_sum, stored_dtype
from fsdptool.modeling.optimizers import TrainedTensor, optimizer_spec
from fsdptool.records.anatomy import Parameter
from fsdptool.records.recipe import Recipe
from fsdptool.records.sharding import UnitPlan


@dataclass(frozen=True, slots=True)
class States:
    """Long-lived bytes of one rank, on the device and on the host."""

    device: tuple[Block, ...]
    host: int
    update: Block | None
    """Temporaries of ``optimizer.step``, on the device."""
    saved: tuple[int, ...] = ()
    """Bytes of each tensor this rank adds to a checkpoint: trained parameters, optimizer, average."""
    copied: int = 0
    """Host bytes of a copy of those: page-locked, but as they are where they are offloaded already."""


def rank_states(rank: Rank, recipe: Recipe, *, cuda: bool) -> States:
    """Return what the rank holds from step 2 on (optimizer states exist).

    Args:
        rank: The units.
        recipe: Optimizer, EMA.
        cuda: Whether the states lie on a GPU.
    """
    plan, grain = rank.plan, rank.device.grain
    tensors = {id(w): _shard(w, rank.degree) for weights in rank.distinct for w in weights}
    ordered = sorted(rank.shares, key=lambda share: _ORDER.index(share.unit.kind))
    shards = [(tensors[id(w)], w.trainable) for s in ordered for w in s.weights]
    whole = [(_whole(p, plan), p.trainable) for p in plan.ignored]
    spec = optimizer_spec(recipe.optimizer)
    kernel = spec.kernel(recipe.optimizer.implementation)

    def kept(trained: Sequence[TrainedTensor]) -> tuple[Block, Block, Block]:
        optimizer = [s for t in trained for s in spec.states(recipe.optimizer, t, kernel, cuda)]
        average = [t.numel * max(t.width, 4) for t in trained] if recipe.ema.decay is not None else []
        update = spec.temporaries(recipe.optimizer, trained, kernel, cuda)
        return (
            _block(OPTIMIZER, optimizer, grain),
            _block(EMA, average, grain),
            _block(OPTIMIZER_TEMPORARIES, update, grain),
        )

    parameters = _block(PARAMETERS, [s.bytes for s, _ in shards], grain)
    replicated = _block(REPLICATED, [p.bytes for p, _ in whole], grain)
    trained = [tensor for tensor, trainable in [*shards, *whole] if trainable]
    optimizer, average, update = kept(trained)
    saved = (*(t.bytes for t in trained), *optimizer.sizes, *average.sizes)
    host, copied = 0, sum(pinned(size) for size in saved)
    if plan.cpu_offload:
        copied = sum(saved)
        # FSDP moves what it manages; parameters it does not stay on the device with all that is theirs.
        ours = [tensor for tensor, trainable in shards if trainable]
        managed = kept(ours)
        host = sum(sum(block.sizes) for block in (parameters, *managed))
        host += sum(tensor.bytes for tensor in ours)
        parameters = _block(PARAMETERS, [], grain)
        optimizer, average, update = kept([tensor for tensor, trainable in whole if trainable])
    device = (parameters, replicated, optimizer, average)
    return States(device, host, update if update.sizes else None, saved, copied)


def trained_shards(rank: Rank) -> tuple[TrainedTensor, ...]:
    """Return the sharded parameters that a rank's optimizer updates."""
    return tuple(_shard(w, rank.degree) for share in rank.shares for w in share.weights if w.trainable)


def _shard(weights: Weights, ranks: int) -> TrainedTensor:
    parameter = weights.parameter
    shape = parameter.shape
    rows = (-(-shape[0] // ranks), *shape[1:]) if shape else ()
    return TrainedTensor(parameter.fqn, shape, rows, weights.stored, ranks)


def _whole(parameter: Parameter, plan: UnitPlan) -> TrainedTensor:
    width = WIDTH.get(stored_dtype(parameter, plan), 4)
    return TrainedTensor(parameter.fqn, parameter.shape, parameter.shape, width)


def _block(kind: int, sizes: Sequence[int], grain: int) -> Block:
    return Block(kind, rounded_sum(sizes, grain), tuple(sizes))


_ORDER = ("embedding", "shared", "block", "tail", "root")
"""Units as their parameters usually follow one another in a model."""
