"""What filling a model with its weights allocates, before the first step.

On a GPU this decides which segments the caching allocator holds when the first step begins: what loading
frees stays reserved. :data:`fsdptool.records.sharding.Loading` lists the ways in which training loops load.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from fsdptool.memory.simulation.collective_bytes import WIDTH, ShardedParameter, rounded, rounded_sum
from fsdptool.memory.simulation.groups import Rank, UnitShare
from fsdptool.memory.simulation.ledger import PARAMETERS, REPLICATED, TEMPORARIES, Block, Ledger
from fsdptool.records.recipe import Recipe
from fsdptool.records.sharding import Loading

DRAWN_AT_ONCE = 1 << 16
"""Elements drawn at a time where a shard cuts a block (``distributed/recording.py``)."""

ENCODED_AT_ONCE = 1 << 22
"""Weights that a GPU quantises at a time (``modeling/methods/quantised_formats.py``)."""

_CONVERTED = 3
"""Whole tensors' states while experts of a checkpoint are fused: the parts, their stack, the result."""

_ORDER = ("embedding", "shared", "experts", "block", "tail", "root")
"""Units as their parameters usually follow one another in a model."""


def in_model_order(rank: Rank) -> list[UnitShare]:
    """Return a rank's units in the order in which a model usually lists their parameters."""
    return sorted(rank.shares, key=lambda share: _ORDER.index(share.unit.kind))


def play_loading(
    ledger: Ledger, rank: Rank, states: Mapping[int, Block], buffers: Block, recipe: Recipe, loading: Loading
) -> None:
    """Add what exists once the model is filled: shards, whole parameters, buffers.

    Args:
        ledger: Where bytes are counted.
        rank: The units.
        states: What the rank keeps, by component.
        buffers: The model's buffers.
        recipe: Where weights come from, and how a frozen base is stored.
        loading: Who fills the model.
    """
    host_apart = rank.device.host_apart
    if host_apart and loading == "units":
        _move_units(ledger, rank)
    elif host_apart and loading == "broadcast":
        _receive_parameters(ledger, rank)
    elif host_apart and _stored_format(recipe) is not None:
        _quantise(ledger, rank, recipe)
    elif PARAMETERS in states:
        ledger.add(states[PARAMETERS])
    if REPLICATED in states:
        ledger.add(states[REPLICATED])
    ledger.add(buffers)
    if not host_apart:
        # Values are made or read in the same memory, one parameter at a time.
        size = loading_temporaries(rank, random=recipe.model.weights == "random")
        _come_and_go(ledger, rounded(size, rank.device.grain), (size,))


def loading_temporaries(rank: Rank, *, random: bool) -> int:
    """Return the most host bytes on top of the values of one parameter while they are made or read.

    Random values are drawn in fp32 and cast; pretrained ones are cut out of a file's map and copied,
    and stacked experts are put together whole on every rank (``distributed/weights.py``).
    """
    most = 0
    for weights in (weights for unit in rank.distinct for weights in unit):
        rows, wide = weights.shard, 8 if weights.stored == 8 else 4
        if random:
            block = min(DRAWN_AT_ONCE, weights.parameter.numel) * wide
            most = max(most, block + (rows * wide if weights.stored != wide else 0))
        elif len(weights.parameter.shape) >= 3 and ".experts." in weights.parameter.fqn:
            most = max(most, weights.parameter.numel * weights.stored * _CONVERTED)
        else:
            most = max(most, rows * weights.stored)
    return most


def _move_units(ledger: Ledger, rank: Rank) -> None:
    """Shard a model with values: each unit is moved to the GPU whole, then cut.

    ``fully_shard`` holds a unit's whole parameters until it returns (torch 2.13, ``_fully_shard.py``,
    ``_fsdp_init.py:_move_states_to_device``), and accelerate 1.15 passes it a model on the CPU
    unless ``cpu_ram_efficient_loading`` is set (``fsdp_utils.py:fsdp2_prepare_model``).
    """
    for share in rank.shares:
        sizes = tuple(weights.parameter.numel * weights.stored for weights in share.weights)
        whole = Block(TEMPORARIES, rounded_sum(sizes, rank.device.grain), sizes)
        ledger.add(whole)
        for weights in share.weights:
            _keep(ledger, rank, weights)
        ledger.drop(whole)


def _receive_parameters(ledger: Ledger, rank: Rank) -> None:
    """Broadcast each parameter from rank 0 and cut it.

    accelerate 1.15 does this with ``cpu_ram_efficient_loading`` (``fsdp_utils.py:
    fsdp2_load_full_state_dict``): whole parameters are on the GPU one at a time, in the dtype of the shards.
    """
    for weights in _parameters(rank):
        size = weights.parameter.numel * weights.stored
        whole = Block(TEMPORARIES, rounded(size, rank.device.grain), (size,))
        ledger.add(whole)
        _keep(ledger, rank, weights)
        ledger.drop(whole)


def _quantise(ledger: Ledger, rank: Rank, recipe: Recipe) -> None:
    """Quantise this rank's rows on the GPU, one layer at a time, before the other parameters are loaded.

    A layer's codes and scales exist first, then its rows in the model's dtype, then fp32 copies of the rows
    that are encoded at a time (``distributed/materialize.py``, ``modeling/methods/quantised_formats.py``).
    """
    grain = rank.device.grain
    others: list[ShardedParameter] = []
    scales = {
        name.removesuffix(".scales"): weights
        for share in rank.shares
        for name, weights in share.by_name.items()
        if name.endswith(".scales")
    }
    per_code = 2 if _stored_format(recipe) == "nf4" else 1
    for share in in_model_order(rank):
        for name, weights in share.by_name.items():
            layer = name.removesuffix(".codes")
            if layer == name or layer not in scales:
                if name.removesuffix(".scales") == name:
                    others.append(weights)
                continue
            _keep(ledger, rank, weights)
            _keep(ledger, rank, scales[layer])
            elements = weights.shard * per_code
            columns = prod(weights.parameter.shape[1:]) * per_code
            size = elements * WIDTH.get(recipe.model.dtype, 4)
            rows = Block(TEMPORARIES, rounded(size, grain), (size,))
            ledger.add(rows)
            piece = min(max(ENCODED_AT_ONCE // max(columns, 1), 1) * columns, elements)
            # The rows in fp32, then scaled, and the codes before they are stored.
            sizes = (4 * piece, 4 * piece, piece)
            _come_and_go(ledger, rounded_sum(sizes, grain), sizes)
            ledger.drop(rows)
    for weights in others:
        _keep(ledger, rank, weights)


def _stored_format(recipe: Recipe) -> str | None:
    lora = recipe.method.lora if recipe.method.name == "lora" else None
    return lora.base if lora is not None and lora.base != "unchanged" else None


def _parameters(rank: Rank) -> Iterator[ShardedParameter]:
    for share in in_model_order(rank):
        yield from share.weights


def _keep(ledger: Ledger, rank: Rank, weights: ShardedParameter) -> None:
    """Add a parameter's shard; shards that are offloaded only pass through the GPU."""
    size = weights.shard * weights.stored
    block = Block(PARAMETERS, rounded(size, rank.device.grain), (size,))
    ledger.add(block)
    if rank.plan.cpu_offload:
        ledger.drop(block)


def _come_and_go(ledger: Ledger, total: int, sizes: tuple[int, ...]) -> None:
    if total:
        block = Block(TEMPORARIES, total, sizes)
        ledger.add(block)
        ledger.drop(block)
