"""What the simulation says of phases that no CPU can show, by their arithmetic."""

from __future__ import annotations

import dataclasses

import pytest
from memory_cases import Case

from fsdptool.inspection import inspect
from fsdptool.memory import footprint
from fsdptool.memory.footprint import foresee, prepared
from fsdptool.memory.tracing.make_trace import make_trace, sampled_recipe
from fsdptool.modeling.resolve import resolve_run
from fsdptool.records.cluster import DeviceProfile
from fsdptool.records.mesh import ParallelDims
from fsdptool.records.plan import OWN_LOOP, Footprint, Phase, TrainingLoop
from fsdptool.records.recipe import Checkpoints, Data, Ema, Evaluation, Lora, Method, Recipe
from fsdptool.records.sharding import StateDictType
from fsdptool.records.trace import KINDS, Trace

PARAMETERS = 4 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 352 + 2 * 128) + 2 * 1000 * 128 + 128
"""Of ``memory_cases.LLAMA``."""


def foot(
    case: Case,
    trace: Trace,
    recipe: Recipe | None = None,
    saves: StateDictType = "sharded",
    *,
    profile: DeviceProfile = "cuda",
    loop: TrainingLoop = OWN_LOOP,
) -> Footprint:
    mesh, recipe = ParallelDims().resolve(case.ranks), recipe or case.recipe()
    rank = prepared(case.plan(), mesh, recipe, profile=profile, trace=trace)
    return foresee(trace, rank, mesh, recipe, saves=saves, reserved=False, loop=loop)


def phases(made: Footprint) -> dict[str, Phase]:
    return {phase.name: phase for phase in made.phases}


@pytest.fixture(scope="module")
def trace() -> Trace:
    return Case().trace()


@pytest.mark.slow
def test_offloaded_checkpoints_move_from_the_device_to_the_host() -> None:
    """Four blocks keep one input each, of 4 x 512 tokens x 128 x 2 bytes; the last two stay on the device.

    The one before the last has a copy on the host, too, as it was not known then that it is.
    """
    settings = {"activation_checkpointing": True}
    kept = Case(settings=settings, batch={"sequence_length": 512, "micro_batch": 4})
    gone = dataclasses.replace(kept, settings={**settings, "activation_checkpointing_offload": True})
    device, host = foot(kept, kept.trace()), foot(gone, gone.trace())
    one = 4 * 512 * 128 * 2
    assert device.allocated_peak_bytes is not None and host.allocated_peak_bytes is not None
    assert device.allocated_peak_bytes - host.allocated_peak_bytes == 2 * one
    assert phases(host)["backward"].host_bytes_per_rank == 3 * one
    assert phases(device)["backward"].host_bytes_per_rank == 0
    assert sum(c.bytes or 0 for c in host.components) == host.allocated_peak_bytes


@pytest.mark.slow
def test_whole_parameters_and_their_optimizer_stay_on_the_device_under_offload() -> None:
    """FSDP offloads what it shards: adapters kept whole keep two moments and a count there, each."""
    case = Case(
        method=Method("lora", lora=Lora(rank=4, adapters="replicated")), settings={"cpu_offload": True}
    )
    made = foot(case, case.trace(), dataclasses.replace(case.recipe(), ema=Ema(0.9)))
    device = {component.name: component.bytes for component in made.components}
    whole = [parameter.numel * 4 for parameter in case.plan().ignored]
    assert whole
    assert "parameters" not in device
    assert device["replicated parameters"] == sum(-(-size // 512) * 512 for size in whole)
    assert device["ema"] == device["replicated parameters"]
    assert device["optimizer"] == 2 * device["replicated parameters"] + 512 * len(whole)


def test_only_checkpointed_blocks_recompute() -> None:
    plain = Case().trace()
    again = Case(settings={"activation_checkpointing": True}).trace()
    assert "recomputed" not in {KINDS[kind] for kind in plain.kinds}
    recomputed = sum(
        size for size, kind in zip(again.sizes, again.kinds, strict=True) if KINDS[kind] == "recomputed"
    )
    # At least the four projections into and the two out of each block's feed-forward.
    assert recomputed > len(again.repeats or (1,)) * 64 * 352 * 2 * 2


def test_an_asynchronous_save_is_page_locked_memory(trace: Trace) -> None:
    """Each tensor takes a power of two: at least the shards of parameters and two states, at most twice."""
    case = Case()
    recipe = dataclasses.replace(case.recipe(), checkpoints=Checkpoints(every_steps=10), steps=100)
    made = phases(foot(case, trace, recipe))
    shards = 3 * 4 * PARAMETERS // 8
    assert inspect(case.spec()).total_parameters == PARAMETERS
    assert shards <= made["save"].host_bytes_per_rank < 2.02 * shards
    assert made["forward"].host_bytes_per_rank == made["save"].host_bytes_per_rank, "kept for the next save"
    last = dataclasses.replace(recipe, steps=10)
    assert phases(foot(case, trace, last))["forward"].host_bytes_per_rank == 0, "the last save is waited for"


def test_the_first_step_has_no_copy_of_a_save(trace: Trace) -> None:
    """On the CPU the copies are of the same memory, and are made after it."""
    case = Case()
    recipe = dataclasses.replace(case.recipe(), checkpoints=Checkpoints(every_steps=10), steps=100)
    copied, plain = (
        phases(foot(case, trace, dataclasses.replace(recipe, steps=steps), profile="cpu-gloo"))
        for steps in (100, 10)
    )
    assert copied["first step"].allocated_bytes == plain["first step"].allocated_bytes
    backward = copied["backward"].allocated_bytes, plain["backward"].allocated_bytes
    assert backward[0] is not None and backward[1] is not None
    assert backward[0] - backward[1] >= 3 * 4 * PARAMETERS // 8


def test_a_full_checkpoint_gathers_the_largest_tensor(trace: Trace) -> None:
    """Nothing but what is known exactly is alive beside it, in loops that read no inputs ahead."""
    case, loop = Case(), dataclasses.replace(OWN_LOOP, program="trainer")
    sharded, full = (phases(foot(case, trace, saves=kind, loop=loop))["save"] for kind in ("sharded", "full"))
    largest = 1000 * 128 * 4
    assert sharded.allocated_bytes is not None and full.allocated_bytes is not None
    assert full.allocated_bytes - sharded.allocated_bytes == largest
    assert full.host_bytes_rank_0 == largest
    assert sharded.basis == "exact" and full.basis == "estimated"
    assert phases(foot(case, trace))["save"].basis == "estimated"


def test_an_average_of_half_precision_parameters_is_cast_at_once() -> None:
    case = Case()
    recipe = case.recipe()
    half = dataclasses.replace(
        recipe, model=dataclasses.replace(recipe.model, dtype="bfloat16"), ema=Ema(decay=0.99)
    )
    plan = case.plan()
    stored = dataclasses.replace(plan, master_dtype="bfloat16")
    made = phases(footprint(case.trace(), stored, ParallelDims().resolve(8), half, reserved=False))
    average, save = made["average"].allocated_bytes, made["save"].allocated_bytes
    assert average is not None and save is not None
    cast = average - save
    assert 4 * PARAMETERS // 8 <= cast < 1.05 * 4 * PARAMETERS // 8


@pytest.mark.slow
def test_validation_keeps_no_gradients_and_all_that_is_not_resharded() -> None:
    """Without resharding the second batch finds every unit gathered; with it, two at a time."""
    seen = {}
    for reshard in (True, False):
        case = Case(settings={"reshard_after_forward": reshard})
        recipe = dataclasses.replace(case.recipe(), evaluation=Evaluation(every_steps=5, holdout=0.1))
        made = make_trace(case.spec(), resolve_run(recipe, case.yaml()), "cuda")
        assert made.evaluation is not None and not made.evaluation.gradients
        seen[reshard] = phases(foot(case, made, recipe))
        evaluation, backward = (seen[reshard][n].allocated_bytes for n in ("evaluation", "backward"))
        assert evaluation is not None and backward is not None and evaluation < backward
        assert seen[reshard]["evaluation"].moment.startswith("evaluation: ")
    gathered, freed = (seen[r]["evaluation"].allocated_bytes for r in (False, True))
    assert gathered is not None and freed is not None
    blocks = 2 * (PARAMETERS - 2 * 1000 * 128 - 128)
    assert gathered - freed > blocks // 2


@pytest.mark.parametrize(
    ("profile", "loop", "ahead"),
    [
        ("cuda", OWN_LOOP, 1),
        ("cuda", TrainingLoop(), 1),
        ("cuda", dataclasses.replace(OWN_LOOP, program="trainer"), 0),
        ("cpu-fake", OWN_LOOP, 0),
    ],
)
def test_a_gpu_holds_the_inputs_of_the_next_step(
    profile: DeviceProfile, loop: TrainingLoop, ahead: int
) -> None:
    """Where the loop is fsdptool's own: in the step, and between steps. Each micro-batch is 1 MiB larger."""
    case = Case(batch={"accumulation": 3})
    recipe = dataclasses.replace(
        case.recipe(),
        evaluation=Evaluation(every_steps=5, holdout=0.1),
        checkpoints=Checkpoints(every_steps=5),
    )
    made = make_trace(case.spec(), resolve_run(recipe, case.yaml()), "cuda")
    assert made.evaluation is not None
    large = dataclasses.replace(
        made,
        input_bytes=(*made.input_bytes, 1 << 20),
        evaluation=dataclasses.replace(made.evaluation, input_bytes=(*made.evaluation.input_bytes, 1 << 20)),
    )
    without, planted = (
        phases(foot(case, given, recipe, profile=profile, loop=loop)) for given in (made, large)
    )
    step = 3 << 20
    more = {
        name: (phase.allocated_bytes or 0) - (without[name].allocated_bytes or 0)
        for name, phase in planted.items()
    }
    validation = {1: 3 * step, 0: 1 << 20 if profile == "cuda" else step}[ahead]
    assert more["load"] == more["export"] == 0
    assert more["first step"] == more["forward"] == more["backward"] == (1 + ahead) * step
    assert more["save"] == ahead * step
    assert more["evaluation"] == validation


@pytest.mark.slow
def test_what_validation_held_is_gone_after_it() -> None:
    """Also under an integer reshard, whose copies outlive a forward without a backward."""
    case = Case(sharding={"reshard_after_forward": 2})
    recipe = dataclasses.replace(case.recipe(), evaluation=Evaluation(every_steps=5, holdout=0.1, samples=1))
    made = make_trace(case.spec(), resolve_run(recipe, case.yaml()), "cuda")
    assert made.sampling is not None
    with_it, without = (
        phases(foot(case, made, recipe)),
        phases(foot(case, dataclasses.replace(made, evaluation=None, sampling=None))),
    )
    assert with_it["save"].allocated_bytes == without["save"].allocated_bytes
    assert {"evaluation", "sampling"} == set(with_it) - set(without)


def test_a_run_that_validates_nothing_has_no_such_phase(trace: Trace) -> None:
    names = set(phases(foot(Case(), trace)))
    assert names == {"load", "first step", "forward", "backward", "optimizer", "save", "export"}


def test_the_highest_phase_decides(trace: Trace) -> None:
    made = foot(Case(), trace)
    assert made.allocated_peak_bytes == max(phase.allocated_bytes or 0 for phase in made.phases)


def test_a_sample_is_a_short_window() -> None:
    recipe = dataclasses.replace(
        Case(batch={"sequence_length": 4096, "micro_batch": 8}).recipe(),
        data=Data(options={"sample_tokens": 100}),
    )
    batch = sampled_recipe(recipe).batch
    assert (batch.micro_batch, batch.sequence_length) == (1, 132)
