"""Plans with expert parallelism: what is sharded and sent, what routing can cost, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pytest

from fsdptool.errors import ConfigError
from fsdptool.inspection import inspect
from fsdptool.planning import Options, make_plan, read_request
from fsdptool.planning.clusters import make_cluster
from fsdptool.planning.hardware import load_gpu, machine_for
from fsdptool.planning.request.inputs import Request
from fsdptool.planning.time.expert_time import make_all_to_all
from fsdptool.records.plan import Plan
from fsdptool.report.plan_words import brief, mesh, mesh_lines
from fsdptool.source import resolve

LAYERS, WIDTH, INNER, EXPERTS, CHOICES, TOKENS = 3, 256, 512, 8, 2, 2048
GPU = load_gpu("H100-80GB-SXM")
OTHERS = (
    "accumulation",
    "checkpointing",
    "cpu_offload",
    "gradients",
    "micro_batch",
    "optimizer_implementation",
    "prefetch",
    "reshard_after_forward",
    "wrap",
)
"""What a search over meshes leaves as it is."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_size": WIDTH,
        "intermediate_size": INNER,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": LAYERS,
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": CHOICES,
        "vocab_size": 8000,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def planned(model: str, **options: Any) -> Plan:
    given = {"gpu": "H100-80GB-SXM", "gpus": 8, "sequence_length": TOKENS, "checkpointing": "none"}
    given |= {"precision": "bf16", "search": False, "micro_batch": 2}
    return make_plan(read_request(Options(reference=model, **{**given, **options})))


@pytest.mark.slow
def test_every_mixture_waits_for_four_exchanges_and_six_where_it_is_recomputed(model: str) -> None:
    group = make_all_to_all(make_cluster(GPU, 8), machine_for(GPU), ranks=4)
    rows, number = group.seconds(2 * TOKENS * CHOICES * WIDTH * 2), group.seconds(1)
    flops = planned(model).candidates[0].step_flops
    for checkpointing, exchanges, numbers in (("none", 4, 1), ("full", 6, 2)):
        spread = planned(model, ep=4, checkpointing=checkpointing).candidates[0]
        expected = LAYERS * (exchanges * rows + numbers * number)
        assert spread.seconds["group_communication"] == pytest.approx(expected)
        assert spread.seconds["exposed_communication"] >= expected
        assert spread.step_flops == pytest.approx(flops)
    assert mesh(spread.settings) == "shard 8 x experts over 4"
    assert "experts over 4" in brief(spread.settings)


@pytest.mark.slow
def test_the_worst_routing_brings_the_tokens_of_all_ranks_to_one(model: str) -> None:
    routing = planned(model, ep=4).details.routing
    rows = 2 * TOKENS * CHOICES * WIDTH * 2
    assert (routing.all_to_all_bytes, routing.worst_all_to_all_bytes) == (rows, 4 * rows)
    # Every layer keeps at least the three times as many rows that came, and what the experts make of them.
    assert routing.worst_case_bytes - routing.balanced_bytes > LAYERS * 3 * rows
    # With one expert on each rank, only one choice of a token can go there.
    assert planned(model, ep=8).details.routing.worst_all_to_all_bytes == 8 * rows // CHOICES


@pytest.mark.slow
def test_experts_are_sharded_over_the_ranks_that_hold_the_same_ones(model: str) -> None:
    # Each rank keeps the same share of all states; what it gathers of the experts is its own part only.
    states = [planned(model, ep=ep).details.states["parameters"] for ep in (1, 2, 8)]
    assert states[1:] == pytest.approx(states[:1] * 2, rel=0.01)
    gathered = [peak_of(planned(model, ep=ep), "unsharded parameters") for ep in (1, 2, 8)]
    assert gathered == sorted(gathered, reverse=True)


@pytest.mark.slow
def test_ranks_of_divided_layers_send_a_part_of_their_tokens_each(model: str) -> None:
    alone, beside = (planned(model, ep=4, tp=tp).candidates[0] for tp in (1, 2))
    group = make_all_to_all(make_cluster(GPU, 8), machine_for(GPU), ranks=4)
    rows = 2 * TOKENS * CHOICES * WIDTH * 2
    # The all-to-alls of half as many rows, and the sums and gathers of the divided layers.
    halved = LAYERS * (4 * group.seconds(rows / 2) + group.seconds(1))
    assert alone.seconds["group_communication"] > halved
    assert beside.seconds["group_communication"] > halved
    # Two ranks train on one rank's samples: half of the work of a step with as many micro-batches.
    assert beside.step_flops == pytest.approx(alone.step_flops / 2)
    assert mesh(beside.settings) == "shard 4 x tensor 2 x experts over 4"
    states = [planned(model, ep=ep, tp=2).details.states["parameters"] for ep in (1, 8)]
    assert states[0] == pytest.approx(states[1], rel=0.05)


def check_counts(told: list[str]) -> None:
    """Check that all parts of a search are counted together: the total is what there may be at most."""
    found = [re.search(r"evaluated (\d+) of (up to )?(\d+) configurations", line) for line in told]
    steps = [(int(match[1]), bool(match[2]), int(match[3])) for match in found if match]
    totals = [total for *_, total in steps]
    assert [number for number, *_ in steps] == list(range(1, len(steps) + 1))
    assert totals == sorted(totals, reverse=True)
    assert steps[0][1]
    assert steps[-1] == (len(steps), False, len(steps))


@pytest.mark.slow
def test_a_search_shares_out_experts_and_says_why_its_mesh_won(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdptool.planning.search.search._PROGRESS_SECONDS", 0.0)
    for cp in (1, 2):
        options = Options(reference=model, gpu=GPU.name, gpus=8, nodes=2, sequence_length=TOKENS, cp=cp)
        inputs = dataclasses.replace(read_request(options).inputs, search="wide", fixed=(*OTHERS, "cp", "tp"))
        told: list[str] = []
        plan = make_plan(Request(inputs), progress=told.append)
        check_counts(told)
        spread = [c for c in plan.candidates if c.settings.ep == 8]
        assert all(c.step_seconds for c in spread) and spread
        if cp > 1:
            continue
        choice = plan.details.mesh
        sizes = {(other.dp_replicate, other.ep) for other in choice.alternatives}
        assert len(sizes) == len(choice.alternatives) == 3
        groups = {group.dimension: (group.ranks, group.nodes) for group in choice.groups}
        assert groups["dp_shard"] in ((16, 2), (8, 1))
        lines = list(mesh_lines(plan))
        assert len(lines) == 4
        assert lines[0].startswith("mesh: ")


@pytest.mark.slow
def test_a_given_size_of_expert_groups_stays_where_layers_are_divided(model: str) -> None:
    options = Options(reference=model, gpu=GPU.name, gpus=4, sequence_length=TOKENS, ep=2)
    inputs = read_request(options).inputs
    assert "ep" in inputs.fixed
    inputs = dataclasses.replace(inputs, search="wide", fixed=(*inputs.fixed, *OTHERS, "cp"))
    divided = [c for c in make_plan(Request(inputs)).candidates if c.settings.tp > 1]
    assert {c.settings.ep for c in divided if c.rejected_by is None or c.step_seconds} == {2}


def peak_of(plan: Plan, component: str) -> int:
    moments = plan.candidates[0].timeline
    return max(moment.components.get(component, 0) for moment in moments)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ep": 3}, "3 does not divide the 8 ranks of one copy of the model"),
        ({"ep": 16, "tp": 2}, "16 does not divide the 8 ranks of one copy of the model"),
        ({"ep": 16, "gpus": 16}, "16 does not divide the 8 experts"),
    ],
)
def test_a_size_that_cannot_be_trained_is_refused_by_name(
    model: str, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        planned(model, **options)


@pytest.mark.slow
def test_experts_on_more_ranks_than_there_are_experts_are_said_to_be_stored_unevenly(model: str) -> None:
    def told(**options: Any) -> list[str]:
        return [item.message for item in planned(model, **options).diagnostics if item.code == "PLN015"]

    assert told() == told(nodes=2, hsdp="2x8") == []
    # The rows of each expert are sharded instead, in the layout that can.
    assert told(nodes=2) == told(nodes=2, ep=8) == []
    (message,) = told(nodes=2, layout="accelerate")
    plan = planned(model, nodes=2, layout="accelerate")
    one = plan.details.states["parameters"]
    even = sum(p.numel for p in inspect(resolve(model)).parameters) * 4 / 16
    assert f"rank 0 stores {one / even:.1f} times its even share" in message
    assert "mlp.experts.gate_up_proj has 8 rows for 16 ranks" in message
    (message,) = told(gpus=12)
    assert "mlp.experts.gate_up_proj has 8 rows for 12 ranks" in message
