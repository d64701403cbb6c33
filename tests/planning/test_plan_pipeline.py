"""Plans of pipelines: schedules, stages, memory and time of the whole, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from fsdptool.errors import PlanError
from fsdptool.memory.simulation.program import program
from fsdptool.modeling.resolve import resolve_run
from fsdptool.planning import Options, chosen_run, make_plan, read_request
from fsdptool.planning.candidate.estimator import Estimator
from fsdptool.planning.candidate.point import point_of
from fsdptool.planning.candidate.stage_cut import cut_trace, cut_units, divide
from fsdptool.planning.pipeline import bubble_fraction, in_flight, plan_pipeline, schedule_order
from fsdptool.planning.plan import inspect_model, plan_document, plan_from
from fsdptool.records.plan import Pipeline, Plan
from fsdptool.records.trace import Component
from fsdptool.report.console.plan import print_plan

LAYERS, WIDTH, INNER, TOKENS, WORDS = 14, 256, 512, 1024, 8000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": LAYERS,
        "vocab_size": WORDS,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def options(model: str, **given: Any) -> Options:
    usual = {"gpu": "H100-80GB-SXM", "gpus": 8, "nodes": 2, "sequence_length": TOKENS, "precision": "bf16"}
    usual |= {"checkpointing": "none", "micro_batch": 2, "accumulation": 8}
    return Options(reference=model, **{**usual, **given})


def planned(model: str, **given: Any) -> Plan:
    return make_plan(read_request(options(model, **given)))


def test_schedules_follow_the_published_formulas() -> None:
    simple, interleaved = Pipeline(4), Pipeline(4, "interleaved", 2)
    assert (bubble_fraction(simple, 8), bubble_fraction(interleaved, 8)) == (3 / 8, 3 / 16)
    assert [in_flight(simple, 8, rank) for rank in range(4)] == [4, 3, 2, 1]
    assert [in_flight(simple, 2, rank) for rank in range(4)] == [2, 2, 2, 1]
    # (v - 1) p + 2 (p - 1 - rank) + 1 forwards of virtual stages, and never more than there are.
    assert [in_flight(interleaved, 8, rank) for rank in range(4)] == [11, 9, 7, 5]
    assert [in_flight(interleaved, 4, rank) for rank in range(4)] == [8, 8, 7, 5]
    # The order is that of torch's own schedule, which has one entry for every action of a rank.
    for ranks, virtual, micro_batches in ((4, 2, 4), (4, 2, 8), (2, 3, 6)):
        for rank in range(ranks):
            ours = list(schedule_order(Pipeline(ranks, "interleaved", virtual), micro_batches, rank))
            assert ours == _torch_order(ranks, virtual, micro_batches, rank)
            alive = accumulate(-1 if backward else 1 for _, backward in ours)
            assert max(alive) == in_flight(Pipeline(ranks, "interleaved", virtual), micro_batches, rank)
    assert list(schedule_order(simple, 3, 2)) == [
        (0, backward) for backward in (False, False, True, False, True, True)
    ]
    # The outer stages, which also hold embedding and head, are the first to have a block less.
    assert [stage.blocks for stage in divide("layers", 14, 4)] == [3, 4, 4, 3]
    assert [stage.blocks for stage in divide("layers", 126, 8)] == [15, *[16] * 6, 15]


def _torch_order(ranks: int, virtual: int, micro_batches: int, rank: int) -> list[tuple[int, bool]]:
    from torch.distributed.pipelining.schedules import FULL_BACKWARD, ScheduleInterleaved1F1B

    schedule = ScheduleInterleaved1F1B.__new__(ScheduleInterleaved1F1B)
    schedule.pp_group_size, schedule.n_local_stages = ranks, virtual
    schedule._n_microbatches, schedule.microbatches_per_round = micro_batches, ranks
    actions = schedule._calculate_single_rank_operations(rank)
    return [
        (item.stage_index // ranks, item.computation_type is FULL_BACKWARD)
        for item in actions
        if item is not None
    ]


@pytest.mark.slow
def test_one_stage_is_the_whole_model_and_the_parts_of_several_add_up_to_it(model: str) -> None:
    request = read_request(options(model, search=False))
    spec, anatomy = inspect_model(request.inputs)
    inputs = request.inputs
    cluster, machine = inputs.clusters[0], inputs.machines[0]
    run = resolve_run(inputs.recipe, inputs.settings, ranks=cluster.world_size)
    estimator, point = Estimator(spec, anatomy, run), point_of(run)
    plain = estimator.candidate("plain", point, cluster, machine)
    candidate, document = plan_pipeline(estimator, Pipeline(), point, cluster, machine)
    assert candidate.allocated_peak_bytes == plain.allocated_peak_bytes
    assert candidate.reserved_peak_bytes == plain.reserved_peak_bytes
    assert candidate.device_total_bytes == plain.device_total_bytes
    assert candidate.step_seconds == pytest.approx(plain.step_seconds)
    assert candidate.mfu == pytest.approx(plain.mfu)
    assert document.bubble == 0

    trace, units = estimator.trace_of(point, cluster), estimator.units_of(point, cluster)
    stages = divide("model.layers", LAYERS, 4)
    block = 4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH
    ends = [WORDS * WIDTH, 0, 0, WORDS * WIDTH + WIDTH]
    for stage, end in zip(stages, ends, strict=True):
        own = cut_units(units, trace, stage)
        assert sum(unit.numel for unit in own.units) == stage.blocks * block + end
        # Every parameter of a stage, and no other one, has a gradient in its trace.
        modules = frozenset(module for unit in own.units for module in unit.modules)
        pieces = program(cut_trace(trace, stage), modules, 1)
        names = sorted(name for piece in pieces for name, _ in piece.gradients)
        assert names == sorted(p.fqn for unit in own.units for p in unit.parameters)
    # A tied embedding lies on the first and on the last stage.
    tied = replace(units, units=tuple(_tied(unit) for unit in units.units))
    counts = [sum(unit.numel for unit in cut_units(tied, trace, stage).units) for stage in stages]
    assert counts[3] == stages[3].blocks * block + 2 * WORDS * WIDTH + WIDTH


def _tied(unit: Any) -> Any:
    return replace(
        unit,
        parameters=tuple(
            replace(p, aliases=("lm_head.weight",)) if p.fqn == "model.embed_tokens.weight" else p
            for p in unit.parameters
        ),
    )


@pytest.mark.slow
def test_the_step_is_that_of_the_slowest_stage_with_bubble_and_transfers(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = planned(model, pp=4, tp=2)
    candidate, pipeline = plan.candidates[0], plan.details.pipeline
    stages = pipeline.stages
    assert candidate.settings.dp_shard == 2
    assert pipeline.sent_bytes == 2 * TOKENS * WIDTH * 2
    slowest = max(stage.micro_batch_seconds or 0.0 for stage in stages)
    assert pipeline.bubble_seconds == pytest.approx(3 * slowest)
    least = 11 * slowest + pipeline.transfer_seconds
    assert least < candidate.step_seconds < 1.2 * least
    assert candidate.tokens_per_second == pytest.approx(2 * 8 * 2 * TOKENS / candidate.step_seconds)
    assert candidate.allocated_peak_bytes == max(stage.allocated_bytes for stage in stages)
    # Only the last stage holds the logits that another training loop keeps.
    kept = planned(model, pp=4, tp=2, loss="kept").details.pipeline.stages
    held = [more.allocated_bytes - less.allocated_bytes for more, less in zip(kept, stages, strict=True)]
    assert held[:3] == [0, 0, 0]
    assert held[3] > 0
    # Two stages of equal depth differ in the forwards in flight: each keeps the activations of its blocks.
    middle = [stages[rank].activation_bytes for rank in (1, 2)]
    assert middle[0] / middle[1] == pytest.approx(3 / 2, rel=0.1)

    interleaved = planned(model, pp=2, pp_virtual=3).details.pipeline
    assert (interleaved.schedule, interleaved.bubble) == ("interleaved", 1 / 24)
    blocks = [item for stage in interleaved.stages for item in stage.blocks]
    assert sorted(number for first, last in blocks for number in range(first, last)) == list(range(LAYERS))

    # What is not resharded after forward stays gathered while the rank's other virtual stages run.
    kept = [
        planned(model, pp=2, reshard="false", gradients="sharded", **schedule).candidates[0]
        for schedule in ({}, {"pp_virtual": 3})
    ]
    gathered = [
        next(item.bytes or 0 for item in one.components if item.name is Component.UNSHARDED) for one in kept
    ]
    assert gathered[1] == pytest.approx(gathered[0], rel=0.1)

    print_plan(plan)
    said = capsys.readouterr().out
    assert "pipeline of 4 stages, planned only" in said
    (table,) = (part for part in said.split("\n\n") if "in flight" in part)
    assert [line.split()[0] for line in table.splitlines()[-4:]] == ["0", "1", "2", "3"]
    again = plan_from(json.loads(json.dumps(plan_document(plan))), where="plan")
    assert again.inputs.pipeline == Pipeline(4)
    with pytest.raises(PlanError, match="planned only"):
        chosen_run(again)


@pytest.mark.slow
def test_reserved_peaks_of_stages_are_kept_apart(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage has the recipe, the mesh and the trace's key of the whole model and of other stages."""
    settings: tuple[dict[str, Any], ...] = (
        {"nodes": 1},
        {"pp": 2},
        {"pp": 2, "pp_schedule": "interleaved", "pp_virtual": 7},
    )

    def reserved(cache: str, given: dict[str, Any]) -> int | None:
        monkeypatch.setenv("FSDPTOOL_CACHE", str(tmp_path / cache))
        plan = planned(model, **given)
        [chosen] = [item for item in plan.candidates if item.id == plan.chosen]
        return chosen.reserved_peak_bytes

    alone = [reserved(f"alone-{number}", given) for number, given in enumerate(settings)]
    assert None not in alone and len(set(alone)) == len(alone)
    assert [reserved("shared", given) for given in settings] == alone
    assert [reserved("shared", given) for given in settings] == alone, "from the cache"


@pytest.mark.parametrize(
    ("given", "message", "help"),
    [
        ({"pp": 3}, "does not divide 2 x 8 ranks", "use --pp 2 or 4"),
        ({"pp": 16}, "16 stages are more than the 14 blocks of model.layers", "use --pp 8"),
        ({"pp": 4, "pp_virtual": 4}, "16 stages are more than the 14 blocks", "use --pp 2"),
        ({"pp": 4, "pp_virtual": 2, "accumulation": 6}, "multiple of 4", "use --accumulation 4 or 8"),
        ({"pp_schedule": "interleaved"}, "needs pipeline stages", "--pp 2"),
        ({"pp": 2, "pp_schedule": "1f1b", "pp_virtual": 2}, "needs the interleaved", "--pp-schedule"),
        ({"pp": 2, "search": True}, "--search is not supported beside --pp", "leave"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    model: str, given: dict[str, Any], message: str, help: str
) -> None:
    with pytest.raises(PlanError, match=message) as error:
        planned(model, **given)
    assert help in str(error.value.help)
