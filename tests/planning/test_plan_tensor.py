"""Plans with tensor parallelism: the sums they wait for, the work they count, and the sizes they refuse."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from fsdptool.errors import ConfigError, PlanError
from fsdptool.planning import Options, chosen_run, make_plan, read_request
from fsdptool.planning.clusters import make_cluster
from fsdptool.planning.hardware import load_gpu, machine_for
from fsdptool.planning.request.inputs import Request
from fsdptool.planning.time.overlap import Ring, make_ring
from fsdptool.records.plan import Candidate, RejectionKind
from fsdptool.report.plan_words import brief

LAYERS, WIDTH, TOKENS = 3, 512, 2048
GPU = load_gpu("A100-80GB-SXM")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "intermediate_size": 1408,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "num_hidden_layers": LAYERS,
        "vocab_size": 8000,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def _options(model: str, **options: Any) -> Options:
    given = {"gpu": "A100-80GB-SXM", "gpus": 2, "sequence_length": TOKENS, "checkpointing": "none"}
    given |= {"precision": "bf16", "search": False}
    return Options(reference=model, **{**given, **options})


def planned(model: str, **options: Any) -> Candidate:
    return make_plan(read_request(_options(model, **options))).candidates[0]


def loss_seconds(ring: Ring) -> float:
    """Return how long a divided loss waits: for the greatest logits, then for two sums, in fp32."""
    return ring.reduce(2 * TOKENS * 4) + ring.reduce(2 * 2 * TOKENS * 4)


@pytest.mark.slow
def test_every_block_waits_for_two_sums_in_forward_and_two_in_backward(model: str) -> None:
    ring = make_ring(make_cluster(GPU, 2), machine_for(GPU), ranks=2)
    once = ring.reduce(2 * TOKENS * WIDTH * 2)
    # The table's rows, the gradient of the head's input, and three numbers of the loss for each token.
    ends = 2 * once + loss_seconds(ring)
    whole = planned(model, micro_batch=2, tp=2)
    assert whole.seconds["communication"] == pytest.approx(4 * LAYERS * once + ends)
    assert whole.seconds["exposed_communication"] == pytest.approx(whole.seconds["communication"])
    # Recomputation repeats attention's sum and stops before the last one, which backward does not need.
    again = planned(model, micro_batch=2, tp=2, checkpointing="full")
    assert again.seconds["communication"] == pytest.approx(5 * LAYERS * once + ends)
    assert "tensor 2" in brief(whole.settings)


@pytest.mark.slow
def test_a_divided_sequence_is_gathered_and_scattered_by_every_region(model: str) -> None:
    ring = make_ring(make_cluster(GPU, 2), machine_for(GPU), ranks=2)
    once = ring.gather(2 * TOKENS * WIDTH * 2)
    whole = planned(model, micro_batch=2, tp=2)
    parts = planned(model, micro_batch=2, tp=2, sequence_parallel=True)
    # Two regions a block, gathered at their entry and scattered at their exit, and the other way round in
    # backward; the final norm's output, and the gradient of the first block's input.
    ends = 2 * once + 2 * ring.reduce(2 * TOKENS * WIDTH * 2) + loss_seconds(ring)
    assert parts.seconds["communication"] == pytest.approx(8 * LAYERS * once + ends)
    assert parts.seconds["compute"] < whole.seconds["compute"]
    assert parts.step_flops == pytest.approx(whole.step_flops)
    # Of a block's hidden states the inputs of two norms and two additions are kept, 16 bits each.
    saved = (whole.allocated_peak_bytes or 0) - (parts.allocated_peak_bytes or 0)
    assert saved > LAYERS * 4 * TOKENS * WIDTH * 2
    again = planned(model, micro_batch=2, tp=2, sequence_parallel=True, checkpointing="full")
    assert again.seconds["communication"] == pytest.approx(11 * LAYERS * once + ends)
    with pytest.raises(PlanError, match="needs tensor-parallel ranks"):
        planned(model, micro_batch=2, sequence_parallel=True)


def test_what_another_loop_does_beside_it_changes_the_time_alone(model: str) -> None:
    given: dict[str, Any] = {"micro_batch": 2, "tp": 2, "sequence_parallel": True, "gpu": "H100-80GB-SXM"}
    plain = planned(model, **given)
    compiled = planned(model, **given, assume=("compile",))
    overlapped = planned(model, **given, assume=("async-tp", "compile"))
    assert compiled.allocated_peak_bytes == overlapped.allocated_peak_bytes == plain.allocated_peak_bytes
    assert compiled.seconds["compute"] < plain.seconds["compute"]
    assert compiled.seconds["communication"] == plain.seconds["communication"]
    # Two ranks hide behind half of the products at most, and nothing outside the blocks.
    hidden = compiled.seconds["group_communication"] - overlapped.seconds["group_communication"]
    products = 6 * LAYERS * (2 * TOKENS) * (2 * WIDTH**2 + 2 * WIDTH * 128 + 3 * WIDTH * 1408) / 2
    gpu = load_gpu("H100-80GB-SXM")
    arithmetic = products / (gpu.flops["bfloat16"] * machine_for(gpu).matmul_efficiency)
    # Traffic bounds the narrow products for keys and values.
    assert arithmetic / 2 < hidden < 1.3 * arithmetic / 2
    plan = make_plan(read_request(_options(model, **given, assume=("compile", "float8"))))
    assert any("linear layers of the blocks in float8" in note for note in plan.details.notes)
    with pytest.raises(PlanError, match="planned only"):
        chosen_run(plan)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"assume": ("compile",)}, "is for tensor-parallel plans"),
        ({"assume": ("async_tp", "compile"), "tp": 2}, "overlaps what sequence parallelism gathers"),
        ({"assume": ("float8",), "tp": 2}, "needs compiled blocks"),
        ({"assume": ("speed",), "tp": 2}, "'speed' is not supported"),
    ],
)
def test_an_assumption_that_means_nothing_is_refused(model: str, given: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        read_request(_options(model, micro_batch=1, **given))


def test_the_work_of_a_step_does_not_depend_on_who_does_it(model: str) -> None:
    alone, divided = planned(model, micro_batch=1), planned(model, micro_batch=2, tp=2)
    assert alone.settings.global_batch == divided.settings.global_batch == 2
    assert divided.step_flops == pytest.approx(alone.step_flops)
    assert (divided.mfu or 0) < (alone.mfu or 0)


@pytest.mark.slow
def test_a_size_that_does_not_divide_the_model_is_refused_by_name(model: str) -> None:
    with pytest.raises(ConfigError, match="2 key and value heads"):
        planned(model, gpus=8, tp=4)
    options = Options(reference=model, gpu="A100-80GB-SXM", gpus=8, sequence_length=TOKENS, micro_batch=1)
    inputs = read_request(options).inputs
    given = ("accumulation", "checkpointing", "cp", "cpu_offload", "gradients", "micro_batch", "prefetch")
    fixed = (*given, "optimizer_implementation", "reshard_after_forward", "wrap")
    plan = make_plan(Request(dataclasses.replace(inputs, search="wide", fixed=fixed)))
    groups = {(c.settings.tp, c.settings.sequence_parallel) for c in plan.candidates if c.step_seconds}
    assert groups == {(1, False), (2, True)}, "a search divides sequences with the layers"
    apart = dataclasses.replace(inputs, search="wide", fixed=(*fixed, "sequence_parallel"))
    assert not any(c.settings.sequence_parallel for c in make_plan(Request(apart)).candidates)
    refused = {c.settings.tp: c for c in plan.candidates if c.device_total_bytes is None}
    assert set(refused) == {4}, "a group of eight would leave nothing to shard over"
    for candidate in refused.values():
        assert candidate.rejected_by is not None
        assert candidate.rejected_by.kind is RejectionKind.INDIVISIBLE
        assert "2 key and value heads" in candidate.rejected_by.detail
    assert any(c.settings.tp == 2 and c.step_seconds for c in plan.candidates)
    assert plan.verdict == "fits"
