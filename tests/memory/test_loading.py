"""What filling a model leaves behind on a GPU, by the way in which it is filled."""

from __future__ import annotations

import pytest

from fsdptool.memory.simulation.allocator import MIB, ReplayLedger
from fsdptool.memory.simulation.collective_bytes import DEVICES
from fsdptool.memory.simulation.groups import Rank, cut
from fsdptool.memory.simulation.ledger import BUFFERS, PARAMETERS, Block
from fsdptool.memory.simulation.loading import ENCODED_AT_ONCE, play_loading
from fsdptool.memory.simulation.off_step import rank_states
from fsdptool.modeling.resolve import resolve_run
from fsdptool.records.anatomy import Parameter
from fsdptool.records.plan import TrainingLoop
from fsdptool.records.recipe import Lora, Method, ModelChoice, Recipe, Sharding
from fsdptool.records.sharding import FsdpSettings, Layout, Loading, Unit, UnitPlan

RECIPE = Recipe(ModelChoice("llama3:8b"))
NO_BUFFERS = Block(BUFFERS, 0, ())


def parameter(name: str, *shape: int, dtype: str = "float32", trainable: bool = True) -> Parameter:
    return Parameter(name, shape, dtype, trainable, ())


def rank_of(*units: Unit, offload: bool = False) -> Rank:
    plan = UnitPlan("native", units, None, None, None, cpu_offload=offload)
    return cut(plan, 4, DEVICES["cuda"])


def loaded(rank: Rank, loading: Loading, recipe: Recipe = RECIPE) -> ReplayLedger:
    ledger = ReplayLedger()
    states = {block.kind: block for block in rank_states(rank, recipe, cuda=True).device}
    play_loading(ledger, rank, states, NO_BUFFERS, recipe, loading)
    return ledger


EMBEDDING = Unit("e", "embedding", ("e",), "Embedding", (parameter("e.weight", 4096, 8192),))
BLOCK = Unit("b", "block", ("b",), "Block", (parameter("b.up", 4096, 4096), parameter("b.down", 4096, 4096)))
ROOT = Unit("root", "root", ("",), "Model", ())


@pytest.mark.parametrize(
    ("loading", "peak", "reserved"),
    [
        # A quarter of 128, 64 and 64 MiB.
        ("rows", 64, 64),
        # The embedding whole, 128 MiB, with its shard; the others and their shards in what is free.
        ("broadcast", 160, 160),
        # In the order of ``fully_shard``: the block's parameters together, then the embedding, which finds no
        # free segment of its size; its shard takes one of the two that the block left.
        ("units", 192, 288),
    ],
)
def test_what_is_loaded_leaves_its_segments(loading: Loading, peak: int, reserved: int) -> None:
    ledger = loaded(rank_of(BLOCK, EMBEDDING, ROOT), loading)
    assert ledger.live[PARAMETERS] == ledger.total == ledger.allocator.allocated == 64 * MIB
    assert ledger.allocator.allocated_peak == peak * MIB
    assert ledger.allocator.reserved == reserved * MIB


def test_offloaded_shards_only_pass_through() -> None:
    rank = rank_of(BLOCK, EMBEDDING, ROOT, offload=True)
    assert loaded(rank, "rows").allocator.reserved == 0
    received = loaded(rank, "broadcast").allocator
    assert (received.allocated, received.reserved) == (0, 160 * MIB)


@pytest.mark.parametrize(("base", "columns"), [("nf4", 2048), ("int8", 4096)])
def test_a_quantised_base_passes_through_its_own_dtype(base: str, columns: int) -> None:
    """One layer's rows in bf16, the fp32 copies of the rows encoded at a time, and its codes."""
    codes = parameter("b.codes", 8192, columns, dtype="uint8", trainable=False)
    scales = parameter("b.scales", 8192, dtype="int32", trainable=False)
    rank = rank_of(Unit("b", "block", ("b",), "Block", (codes, scales)), ROOT)
    recipe = Recipe(
        ModelChoice("llama3:8b", dtype="bfloat16"),
        method=Method("lora", Lora(base=base)),  # type: ignore[arg-type]
    )
    ledger = loaded(rank, "rows", recipe)
    kept = 2048 * columns + 2048 * 4
    encoded = 9 * ENCODED_AT_ONCE  # two fp32 copies and the codes
    assert ledger.total == kept
    assert ledger.allocator.allocated_peak == kept + 2048 * 4096 * 2 + encoded


def test_pieces_are_as_long_as_the_encoder_makes_them() -> None:
    from fsdptool.distributed.recording import BLOCK as DRAWN
    from fsdptool.memory.simulation.loading import DRAWN_AT_ONCE
    from fsdptool.modeling.methods.quantised_formats import _AT_ONCE_ELSEWHERE

    assert (DRAWN_AT_ONCE, ENCODED_AT_ONCE) == (DRAWN, _AT_ONCE_ELSEWHERE)


def test_a_layout_is_filled_as_its_program_fills_it() -> None:
    def loading(layout: Layout, *, efficient: bool) -> str:
        recipe = Recipe(ModelChoice("gpt2:small"), sharding=Sharding(layout=layout))
        settings = FsdpSettings(cpu_ram_efficient_loading=efficient)
        return resolve_run(recipe, settings, loop=TrainingLoop()).loading

    assert loading("native", efficient=True) == "rows"
    assert loading("accelerate", efficient=True) == "broadcast"
    assert loading("accelerate", efficient=False) == "units"
