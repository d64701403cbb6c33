"""What a rank holds between steps: shards, optimizer states, buffers; and what the update adds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

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
from fsdptool.records.recipe import Optimizer, Recipe

_BLOCK8 = 256
"""Elements per quantisation block of 8-bit AdamW, and the size from which a tensor is quantised."""
_QUANTISED_FROM = 4096


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


@dataclass(frozen=True, slots=True)
class _Local:
    shape: tuple[int, ...]
    numel: int
    width: int
    trainable: bool


def states(rank: Rank, recipe: Recipe, *, cuda: bool) -> States:
    """Return what the rank holds from step 2 on (optimizer states exist).

    Args:
        rank: The units.
        recipe: Optimizer, EMA.
        cuda: Whether optimizer ``auto`` means fused.
    """
    plan, grain = rank.plan, rank.grain
    shapes = {id(w): _shard_shape(w, rank.degree) for weights in rank.distinct for w in weights}
    ordered = sorted(rank.shares, key=lambda share: _ORDER.index(share.unit.kind))
    shards = [_Local(shapes[id(w)], w.shard, w.stored, w.trainable) for s in ordered for w in s.weights]
    whole = [_Local(p.shape, p.numel, WIDTH.get(stored_dtype(p, plan), 4), p.trainable) for p in plan.ignored]
    implementation = recipe.optimizer.implementation
    if implementation == "auto":
        implementation = "fused"

    def kept(trained: Sequence[_Local]) -> tuple[Block, Block, Block]:
        optimizer = _optimizer_sizes(recipe.optimizer, trained, implementation, cuda)
        average = [t.numel * max(t.width, 4) for t in trained] if recipe.ema.decay is not None else []
        update = _update_sizes(recipe.optimizer, trained, implementation)
        return (
            _block(OPTIMIZER, optimizer, grain),
            _block(EMA, average, grain),
            _block(OPTIMIZER_TEMPORARIES, update, grain),
        )

    parameters = _block(PARAMETERS, [s.numel * s.width for s in shards], grain)
    replicated = _block(REPLICATED, [p.numel * p.width for p in whole], grain)
    trained = [local for local in [*shards, *whole] if local.trainable]
    optimizer, average, update = kept(trained)
    saved = (*(t.numel * t.width for t in trained), *optimizer.sizes, *average.sizes)
    host, copied = 0, sum(pinned(size) for size in saved)
    if plan.cpu_offload:
        copied = sum(saved)
        # FSDP moves what it manages; parameters it does not stay on the device with all that is theirs.
        managed = kept([s for s in shards if s.trainable])
        host = sum(sum(block.sizes) for block in (parameters, *managed))
        host += sum(s.numel * s.width for s in shards if s.trainable)
        parameters = _block(PARAMETERS, [], grain)
        optimizer, average, update = kept([w for w in whole if w.trainable])
    device = (parameters, replicated, optimizer, average)
    return States(device, host, update if update.sizes else None, saved, copied)


def _shard_shape(weights: Weights, ranks: int) -> tuple[int, ...]:
    shape = weights.parameter.shape
    return (-(-shape[0] // ranks), *shape[1:]) if shape else ()


def _block(kind: int, sizes: Sequence[int], grain: int) -> Block:
    return Block(kind, rounded_sum(sizes, grain), tuple(sizes))


def _optimizer_sizes(
    optimizer: Optimizer, trained: Sequence[_Local], implementation: str, cuda: bool
) -> list[int]:
    """Return the states' sizes: AdamW and SGD as ``torch/optim`` keeps them (torch 2.13)."""
    sizes: list[int] = []
    for local in trained:
        if optimizer.name == "adamw":
            sizes += [local.numel * local.width] * 2
            if implementation == "fused" or not cuda:
                sizes.append(4)
        elif optimizer.name == "adamw8bit":
            sizes += _eight_bit(local)
        elif optimizer.name == "adafactor":
            sizes += _factored(local)
        elif optimizer.momentum:
            sizes.append(local.numel * local.width)
    return sizes


def _eight_bit(local: _Local) -> list[int]:
    if local.numel < _QUANTISED_FROM:
        return [local.numel * 4] * 2
    return [local.numel, local.numel, *[-(-local.numel // _BLOCK8) * 4] * 2]


def _factored(local: _Local) -> list[int]:
    """Adafactor keeps a row and a column mean for matrices, else a full second moment."""
    if len(local.shape) < 2:
        return [local.numel * local.width, 4]
    rows = prod(local.shape[:-1])
    columns = prod(local.shape[:-2]) * local.shape[-1]
    return [rows * local.width, columns * local.width, 4]


def _update_sizes(optimizer: Optimizer, trained: Sequence[_Local], implementation: str) -> list[int]:
    """Return what is alive at the worst moment of ``step`` beside states and gradients.

    foreach AdamW holds the square roots of a parameter group's second moments (``_multi_tensor_adam``;
    matrices, which decay, are one group, everything else the other: ``training/optimizers/sharded.py``); the
    loop two temporaries of one parameter and one of the parameter before it; the fused kernel none.
    """
    if not trained:
        return []
    groups = [[t.numel * t.width for t in trained if (len(t.shape) >= 2) is wide] for wide in (True, False)]
    if optimizer.name == "adamw" and implementation == "foreach":
        return max(groups, key=sum)
    if optimizer.name == "adamw" and implementation == "fused":
        return []
    if optimizer.name in ("adamw", "adafactor"):
        # The previous parameter's denominator is still bound while the next one's is computed
        # (``_single_tensor_adam``).
        worst = [
            (size, size, before) for group in groups for before, size in zip([0, *group], group, strict=False)
        ]
        return [size for size in max(worst, key=sum) if size]
    return []


_ORDER = ("embedding", "shared", "block", "tail", "root")
"""Units as their parameters usually follow one another in a model."""
