"""Steps of varying lengths through the allocator."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from memory_cases import LLAMA, Case

from fsdptool.memory.simulation.allocator import MIB, CachingAllocator, ReplayLedger
from fsdptool.memory.simulation.collectives import DEVICES
from fsdptool.memory.simulation.limited_allocator import LimitedAllocator, OutOfMemory
from fsdptool.memory.simulation.order_replay import OrderReplay
from fsdptool.memory.simulation.simulate import prepare, simulate
from fsdptool.memory.simulation.step_tapes import StepTapes, part_names, record_step
from fsdptool.records.trace import Trace

LENGTHS = (64, 256, 512)
WORKSPACES = (1 << 23,)


@cache
def traced(length: int) -> Trace:
    """A small model at one length."""
    return case(length).trace()


def case(length: int, **changes: Any) -> Case:
    """Large enough for segments of every kind."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "vocab_size": 4000, "num_hidden_layers": 2}
    batch = {"sequence_length": length, "micro_batch": 4, "accumulation": changes.pop("accumulation", 1)}
    return Case(overrides={**LLAMA, **sizes}, batch=batch, **changes)


def recorded(length: int, **changes: Any) -> tuple[StepTapes, dict[bool, int]]:
    """The tapes of a length, and what the allocator has reserved after two steps of the schedule itself."""
    this = case(length, **changes)
    trace, mesh, recipe = traced(length), this.mesh.resolve(8), this.recipe()
    rank = prepare(this.plan(), mesh, recipe, device=DEVICES["cuda"], trace=trace)
    reserved = {}
    for expandable in (False, True):
        ledger = ReplayLedger(allocator=CachingAllocator(expandable=expandable))
        simulate(trace, rank, mesh, recipe, ledger=ledger, warm=True, workspaces=WORKSPACES, middle=True)
        reserved[expandable] = ledger.allocator.reserved_peak
    return record_step(trace, rank, mesh, recipe, workspaces=WORKSPACES), reserved


@pytest.mark.parametrize(
    "changes",
    [{}, {"sharding": {"reshard_after_forward": 2}}],
    ids=["plain", "integer reshard"],
)
def test_steps_of_one_length_are_those_of_the_schedule(changes: dict[str, Any]) -> None:
    """What is recorded and looked up reserves exactly what the schedule does, request by request."""
    tapes = {length: recorded(length, **changes) for length in LENGTHS}
    for expandable in (False, True):
        replay = OrderReplay({n: t for n, (t, _) in tapes.items()}, 1, expandable=expandable)
        for length, (_, reserved) in tapes.items():
            assert replay.run([[length]] * 2)[-1].reserved == reserved[expandable]


@pytest.mark.parametrize("accumulation", [2, 3, 5])
def test_accumulation_leaves_nothing_behind(accumulation: int) -> None:
    """However many micro-batches a step has, its further steps reserve no more."""
    tapes = {64: recorded(64, accumulation=accumulation)[0]}
    replay = OrderReplay(tapes, accumulation, expandable=False)
    outcomes = replay.run([[64] * accumulation] * 12)
    assert outcomes[-1].reserved == outcomes[3].reserved
    assert len(part_names(accumulation)) == accumulation


def test_looked_up_states_are_those_that_a_replay_without_memory_reaches() -> None:
    """A second replay of the same order is only looked up, and one on a limit it never meets is equal."""
    tapes = {length: recorded(length)[0] for length in LENGTHS}
    draw = random.Random(0)
    order = [[draw.choice(LENGTHS)] for _ in range(40)]
    for expandable in (False, True):
        replay = OrderReplay(tapes, 1, expandable=expandable)
        first = replay.run(order)
        played = replay.played
        assert replay.run(order) == first
        assert replay.played == played
        plain = _plainly(tapes, order, expandable=expandable)
        assert [outcome.reserved for outcome in first] == plain
        assert first[-1].reserved >= max(replay.run([[n]] * 4)[-1].reserved for n in LENGTHS)


def _plainly(tapes: dict[int, StepTapes], order: list[list[int]], *, expandable: bool) -> list[int]:
    """Replay by one allocator for everything, without states."""
    allocator = CachingAllocator(expandable=expandable)
    load = tapes[order[0][0]].load
    slots: list[Any] = []
    for operation in load.operations:
        if operation >= 0:
            slots.append(allocator.allocate(*load.requests[operation]))
        else:
            allocator.release(slots[~operation])
    carried = [slots[slot] for slot in load.leaves]
    reserved = []
    for number, (length,) in enumerate(order):
        tape = tapes[length]
        inputs = [allocator.allocate(size) for size in tape.inputs]
        for part in (tape.later if number else tape.first).values():
            for operation in part.operations:
                if operation >= 0:
                    carried.append(allocator.allocate(*part.requests[operation]))
                else:
                    allocator.release(carried[~operation])
            carried = [carried[slot] for slot in part.leaves]
        for chunk in inputs:
            allocator.release(chunk)
        reserved.append(allocator.reserved)
    return reserved


def test_an_order_that_does_not_fit_retries_and_then_fails() -> None:
    tapes = {length: recorded(length)[0] for length in LENGTHS}
    replay = OrderReplay(tapes, 1, expandable=False)
    order = [[64], [256], [512], [64], [512]]
    need = replay.run(order)[-1].reserved
    assert replay.run(order, limit=need) == replay.run(order)
    squeezed = replay.run(order, limit=need - MIB)
    assert len(squeezed) == len(order)
    assert any(outcome.retries for outcome in squeezed)
    failed = replay.run(order, limit=tapes[512].allocated_peak - MIB)
    assert failed[-1].failed and len(failed) == 3


def test_a_full_device_gives_back_segments_that_nothing_uses() -> None:
    """``release_cached_blocks``: a whole free segment is returned, one that is partly in use is not."""
    allocator = LimitedAllocator(limit=64 * MIB)
    kept, freed = allocator.allocate(4 * MIB), allocator.allocate(32 * MIB)
    allocator.release(freed)
    allocator.allocate(40 * MIB)
    assert (allocator.reserved, allocator.retries) == (60 * MIB, 1)
    allocator.release(kept)
    with pytest.raises(OutOfMemory):
        allocator.allocate(26 * MIB)
    assert allocator.reserved == 40 * MIB


def test_a_full_device_unmaps_free_pages_of_expandable_segments() -> None:
    """Whole pages of 20 MiB between memory in use are returned; parts of pages stay."""
    allocator = LimitedAllocator(expandable=True, limit=120 * MIB)
    first, middle, last = (
        allocator.allocate(10 * MIB),
        allocator.allocate(70 * MIB),
        allocator.allocate(MIB * 20),
    )
    assert allocator.reserved == 100 * MIB
    allocator.release(middle)
    allocator.allocate(75 * MIB)
    # Of 10 to 80 MiB the three pages from 20 to 80 are free.
    assert (allocator.reserved, allocator.retries) == (120 * MIB, 1)
    allocator.release(first)
    allocator.release(last)
    with pytest.raises(OutOfMemory):
        allocator.allocate(130 * MIB)
    # What is left are the pages of the block that is still in use.
    assert allocator.reserved == 80 * MIB


@pytest.mark.parametrize("length", [24, 200])
def test_the_peak_of_a_length_is_that_of_torch(length: int) -> None:
    """The simulated peak at padded lengths, odd and long, against ``fully_shard`` on fake tensors."""
    this = Case(ranks=2, batch={"sequence_length": length, "micro_batch": 4})
    observed = this.observe().peak
    simulated, _ = this.simulate(this.trace())
    assert simulated == pytest.approx(observed, rel=0.001)
